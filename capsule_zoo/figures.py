"""Pictures of trained entries: rows of images, parses into coloured parts, templates, samples.

`reconstruct` is `capsule_zoo.inference.reconstruct`.
"""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.figure import Figure
from pyro import poutine
from torch import Tensor

from capsule_zoo.guides.base import Guide, in_eval_mode
from capsule_zoo.inference.ancestral import mean_images
from capsule_zoo.inference.verbs import reconstruct as reconstruct
from capsule_zoo.models import Capsules, PartWholeCapsules, templates


def image_rows(rows: Mapping[str, Tensor | np.ndarray], title: str | None = None) -> Figure:
    """One labelled row of pictures for each item, each (N, C, H, W) or (N, H, W, 3), in [0, 1]."""
    pictures = {name: _as_pictures(images) for name, images in rows.items()}
    columns = max(len(images) for images in pictures.values())
    figure, axes = plt.subplots(
        len(rows), columns, figsize=(0.62 * columns + 1.3, 0.64 * len(rows) + 0.4), squeeze=False
    )
    for row, (name, images) in zip(axes, pictures.items(), strict=True):
        for axis, image in zip(row, images, strict=False):
            axis.imshow(image, cmap="gray", vmin=0, vmax=1)
        for axis in row:
            axis.set_xticks([])
            axis.set_yticks([])
            axis.spines[:].set_visible(False)
        row[0].set_ylabel(name, rotation=0, ha="right", va="center", fontsize=8)
    if title:
        figure.suptitle(title, fontsize=9)
    figure.set_layout_engine("constrained", w_pad=0.01, h_pad=0.01, hspace=0.02, wspace=0.02)
    return figure


def in_rows(kind: str, images: Tensor, length: int = 12) -> dict[str, Tensor]:
    """Images (N, ...) as rows of at most `length`, each named by their numbers from 1."""
    rows, first = {}, 1
    for row in images.split(length):
        rows[f"{kind} {first}-{first + len(row) - 1}"] = row
        first += len(row)
    return rows


def part_colours(parts: int) -> Tensor:
    """A colour (parts, 3) for each part, neighbours far apart."""
    turns = torch.arange(parts) * 0.618034 % 1.0
    return torch.from_numpy(plt.get_cmap("hsv")(turns.numpy())[:, :3]).float()


def coloured_parts(model: PartWholeCapsules, parts: Capsules) -> Tensor:
    """The mean image with every part in its own colour, (B, H, W, 3)."""
    seen = seen_of_parts(model, parts)
    hues = part_colours(len(seen)).to(seen)
    return torch.einsum("pbhw,pc->bhwc", seen, hues).clamp(0, 1)


def seen_of_parts(model: PartWholeCapsules, parts: Capsules) -> Tensor:
    """What each part adds to the mean image, (parts, B, H, W), colours averaged."""
    colour, alpha = model.layers(parts)
    if model.likelihood == "mixture":
        share = model.image_law(parts).share[1:]
    else:
        share = templates.visibility(alpha)
    return (share * colour).mean(1)


@torch.no_grad()
def infer_parts(guide: Guide, images: Tensor) -> Capsules:
    """The parts as the guide draws them for the discrete model."""
    with in_eval_mode(guide):
        nodes = poutine.trace(guide.with_discrete_presences()).get_trace(images).nodes
    return Capsules(nodes["part_presence"]["value"], nodes["part_pose"]["value"])


@torch.no_grad()
def parses(model: PartWholeCapsules, guide: Guide, images: Tensor) -> Figure:
    """Up to 12 images, their reconstructions, and each part in its own colour."""
    model, images = model.with_discrete_presences(), images[:12]
    parts = infer_parts(guide, images)
    rows = {"image": images, "reconstruction": model.render(parts)}
    return image_rows({**rows, "parts": coloured_parts(model, parts)}, "Images and their parts")


@torch.no_grad()
def learned_templates(model: PartWholeCapsules) -> Figure:
    """Every part's template as it paints on black: colour times alpha."""
    colour, alpha = model.templates()
    return image_rows(in_rows("parts", colour * alpha), "Learned templates (colour x alpha)")


def prior_samples(model: PartWholeCapsules, seed: int = 0) -> Figure:
    """Mean images of 36 draws from the discrete model's prior."""
    return image_rows(in_rows("draws", mean_images(model, 36, seed=seed)), "Samples from the prior")


def climbs(paths: dict[str, Tensor]) -> Figure:
    """How the mean objective of several refinements rises, step by step."""
    figure, axis = plt.subplots(figsize=(6, 3.5))
    for name, path in paths.items():
        axis.plot(range(1, len(path) + 1), path, label=name)
    axis.set_xscale("log")
    axis.set_xlabel("steps + 1")
    axis.set_ylabel("objective (nats per image)")
    axis.legend(fontsize=8)
    figure.set_layout_engine("constrained")
    return figure


def _as_pictures(images: Tensor | np.ndarray) -> np.ndarray:
    array = images.detach().cpu().numpy() if isinstance(images, Tensor) else np.asarray(images)
    if array.ndim == 4 and array.shape[1] in (1, 3):
        array = np.moveaxis(array, 1, -1)
    return array.squeeze(-1) if array.shape[-1] == 1 else array
