"""Figures of capsule RBMs and Helmholtz machines: samples, fields of capsules, sums, spectra.

Images may be standard scores: figures map the range of the given images to [0, 1].
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from pyro import poutine
from torch import Tensor

from capsule_zoo.entry import Entry
from capsule_zoo.figures.generic import pixel_scaling
from capsule_zoo.figures.grids import COLUMNS, image_rows, panels, signed_colors, split_into_rows
from capsule_zoo.models.common.modes import use_seed

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@torch.no_grad()
def fields(entry: Entry, seed: int = 0) -> "Figure":
    """Draw the effect of each capsule of an RBM on the mean image when only this capsule is on.

    Red means more ink than with all capsules off, blue means less. Each capsule has its own scale.
    """
    model = entry.model
    with use_seed(seed):
        painted = torch.stack([model.projective_field(k) for k in range(model.num_capsules)])
    added = (painted - model.visible.mean()).mean(1)  # (K, H, W)
    tiles = torch.stack([signed_colors(field / field.abs().max()) for field in added])
    return image_rows(
        split_into_rows("capsules", tiles),
        "Effect of single capsules on the mean image (red: more ink, blue: less)",
    )


@torch.no_grad()
def sums(entry: Entry, images: Tensor, digits: int = 4, terms: int = 8) -> "Figure":
    """Draw images as sums of capsules: the strongest capsules' fields and the mean image so far.

    Each capsule adds its field to the visible biases (red for more ink, blue for less). Capsules
    weaker than the last column are not shown; the sum of all capsules is in the first column, below
    the image.
    """
    scale, images = pixel_scaling(images), images[:digits]
    added = entry.model.contributions(entry.guide.expectations(images))  # (B, K, C, H, W)
    strongest = added.flatten(2).norm(dim=2).argsort(1, descending=True)
    added = added[torch.arange(len(added))[:, None], strongest]
    so_far = scale(entry.model.visible.mean(added.cumsum(1)))
    rows: dict[str, Tensor] = {}
    for i, image in enumerate(scale(images)):
        limit = added[i].abs().max()
        parts = [signed_colors(part.mean(0) / limit) for part in added[i, :terms]]
        rows[f"image {i + 1}, fields"] = torch.stack([_rgb(image), *parts])
        sums_of = [so_far[i, -1], *so_far[i, :terms]]
        rows[f"sum {i + 1}, partial sums"] = torch.stack([*map(_rgb, sums_of)])
    return image_rows(
        rows, "Images as sums of capsules, strongest first (red: more ink, blue: less)"
    )


@torch.no_grad()
def gibbs(entry: Entry, images: Tensor, steps: int = 50, seed: int = 0) -> "Figure":
    """Draw ancestral samples of a Helmholtz machine above the results of its own Gibbs chain."""
    with use_seed(seed):
        drawn = poutine.trace(entry.model).get_trace(batch_size=COLUMNS).nodes
        scale, state = pixel_scaling(images), drawn["_RETURN"]["value"]
        rows = {"ancestral samples": scale(drawn["image"]["fn"].mean)}
        for done in (steps, 2 * steps):
            state = entry.guide.gibbs(state, steps)
            mean = entry.model.mean_image(entry.guide.expectations(state))
            rows[f"{done} Gibbs sweeps later"] = scale(mean)
    return image_rows(rows, "Samples, and Gibbs chains that start at them (mean images)")


def spectra(
    rows: Mapping[str, np.ndarray], labels: np.ndarray, images_per_class: int = 100
) -> "Figure":
    """Draw the features of images, class by class, a strip an image, up to `images_per_class`.

    Args:
        rows: features (N, F) by name, one row of panels for each name. They have a scale of their
            own unless they lie in [0, 1].
        labels: (N,), one column of panels for each value.
    """
    classes = np.unique(labels)
    figure, axes = panels(len(classes), len(rows), (1.1, 2.2), (0.8, 0.4))
    for row, (name, features) in zip(axes, rows.items(), strict=True):
        style: dict[str, Any] = dict(cmap="gray", aspect="auto", interpolation="nearest")
        style |= dict(vmin=min(0.0, features.min()), vmax=max(1.0, features.max()))
        for axis, label in zip(row, classes, strict=True):
            axis.imshow(features[labels == label][:images_per_class], **style)
            axis.set(xticks=[], yticks=[])
        row[0].set_ylabel(name.replace("_", " "), fontsize=9)
    for axis, label in zip(axes[0], classes, strict=True):
        axis.set_title(str(label), fontsize=9)
    figure.suptitle("Inferred features (columns) of test images (lines), by class", fontsize=10)
    return figure


def _rgb(image: Tensor) -> Tensor:
    """Return an image (C, H, W), gray or in colours, as (H, W, 3)."""
    return image.expand(3, -1, -1).movedim(0, -1)
