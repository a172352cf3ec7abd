"""Figures of stacked capsule autoencoders: reconstructions, templates, parts by object."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from capsule_zoo.entry import Entry
from capsule_zoo.figures.grids import COLUMNS, image_rows, part_colors, split_into_rows
from capsule_zoo.inference import infer
from capsule_zoo.models.parts.object_votes import FeaturedCapsules
from capsule_zoo.models.stacked_capsule_autoencoder import StackedCapsuleAutoencoder

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def color_parts(model: StackedCapsuleAutoencoder, parts: FeaturedCapsules, hues: Tensor) -> Tensor:
    """Return the mean image (B, H, W, 3), with every part in its color `hues` (B, parts, 3)."""
    distribution = model.image_distribution(parts)
    color, _ = distribution.layers()  # (parts, C, B, H, W)
    light = (distribution.mixing[1:] * color).mean(1)  # (parts, B, H, W)
    return torch.einsum("pbhw,bpc->bhwc", light, hues.to(light)).clamp(0, 1)


@torch.no_grad()
def reconstructions(entry: Entry, images: Tensor) -> "Figure":
    """Draw up to 8 images, their reconstructions from parts and objects, and colored parts.

    In the row "from objects" each part has the pose that its object votes for. In the last row
    parts of one object have one color, and parts of the dummy are gray.
    """
    model, images = entry.model.discretize(), images[:COLUMNS]
    drawn, quantities = infer(entry.guide, images), ("presence", "pose", "feature")
    objects, parts = (
        FeaturedCapsules(*(drawn[f"{level}_{quantity}"] for quantity in quantities))
        for level in ("object", "part")
    )
    owner = model.responsibilities(objects, parts).argmax(-1)  # (B, parts); 0: dummy
    number = model.levels[0].size
    palette = torch.cat([torch.full((1, 3), 0.6), part_colors(number)])
    hues = part_colors(model.levels[1].size).expand(len(images), -1, 3)
    rows = {
        "image": images,
        "from parts": model.render(parts),
        "from objects": model.render(model.predict_parts(objects, parts)),
        "color by part": color_parts(model, parts, hues),
        "color by object": color_parts(model, parts, palette[owner]),
    }
    return image_rows(rows, "Images and their reconstructions; gray parts belong to no object")


@torch.no_grad()
def learned_templates(entry: Entry, images: Tensor | None = None) -> "Figure":
    """Draw every part's template above the alpha of its pixels."""
    color, alpha = entry.model.templates()
    rows = {**split_into_rows("templates", color), **split_into_rows("opacity", alpha)}
    return image_rows(rows, "Learned templates of the parts, and their opacity")
