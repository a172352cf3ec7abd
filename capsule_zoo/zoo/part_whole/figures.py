"""Figures of part-whole capsules: parses into colored parts, templates, prior samples."""

from typing import TYPE_CHECKING, Any

import torch
from pyro import poutine
from torch import Tensor

from capsule_zoo.figures.grids import COLUMNS, image_rows, part_colors, split_into_rows
from capsule_zoo.guides.base import Guide
from capsule_zoo.inference.evaluation.ancestral import mean_images
from capsule_zoo.models import Capsules, PartWholeCapsules, templates
from capsule_zoo.models.common.modes import eval_mode
from capsule_zoo.models.parts.painted_parts import PaintedParts

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def colored_parts(model: PaintedParts, parts: Capsules) -> Tensor:
    """Return the mean image with every part in its own color, (B, H, W, 3)."""
    visibility = seen_of_parts(model, parts)
    hues = part_colors(len(visibility)).to(visibility)
    return torch.einsum("pbhw,pc->bhwc", visibility, hues).clamp(0, 1)


def seen_of_parts(model: PaintedParts, parts: Capsules) -> Tensor:
    """Return each part's contribution to the mean image, colors averaged, (parts, B, H, W)."""
    color, alpha = model.layers(parts)
    if model.painting.likelihood == "mixture":
        fraction = model.image_distribution(parts).mixing[1:]
    else:
        fraction = templates.visibility(alpha)
    return (fraction * color).mean(1)


@torch.no_grad()
def infer_parts(guide: Guide, images: Tensor) -> Capsules:
    """Sample the parts of images from the guide to the discrete model."""
    with eval_mode(guide):
        nodes = poutine.trace(guide.discretize()).get_trace(images).nodes
    return Capsules(nodes["part_presence"]["value"], nodes["part_pose"]["value"])


@torch.no_grad()
def parses(model: PartWholeCapsules, guide: Guide, images: Tensor) -> "Figure":
    """Draw up to 8 images, their reconstructions, and each part in its own color."""
    model, images = model.discretize(), images[:COLUMNS]
    parts = infer_parts(guide, images)
    rows = {"image": images, "reconstruction": model.render(parts)}
    return image_rows(
        {**rows, "parts": colored_parts(model, parts)},
        "Images and their inferred parts, a color for each part",
    )


@torch.no_grad()
def learned_templates(model: PartWholeCapsules) -> "Figure":
    """Draw every part's template on black: color times alpha."""
    color, alpha = model.templates()
    return image_rows(
        split_into_rows("parts", color * alpha),
        "Learned templates of the parts (color times opacity)",
    )


def prior_samples(model: PartWholeCapsules, seed: int = 0) -> "Figure":
    """Draw the mean images of 32 samples from the discrete model's prior."""
    images = mean_images(model, 4 * COLUMNS, seed=seed)
    return image_rows(split_into_rows("samples", images), "Samples from the prior (mean images)")


PAINTED: dict[str, Any] = {  # figures of an entry and images (B, C, H, W)
    "parses": lambda entry, images: parses(entry.model, entry.guide, images),
    "templates": lambda entry: learned_templates(entry.model),
    "samples": lambda entry: prior_samples(entry.model),
}
