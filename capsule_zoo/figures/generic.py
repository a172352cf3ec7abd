"""Figures for any model: samples, and test images above their reconstructions."""

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from capsule_zoo.entry import Entry
from capsule_zoo.figures.grids import COLUMNS, image_rows, split_into_rows
from capsule_zoo.inference.evaluation.ancestral import mean_images
from capsule_zoo.models.common.spaces import ImageSpace

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def pixel_scaling(images: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a function that maps the range of the pixels of `images` to [0, 1], clamped."""
    low, high = torch.aminmax(images)
    return lambda pixels: ((pixels - low) / (high - low)).clamp(0, 1)


def samples(entry: Entry, seed: int = 0) -> "Figure":
    """Draw the mean images of 32 samples, from Gibbs chains or by ancestral sampling.

    Pixels without limits are drawn from the smallest one of the samples to the largest.
    """
    drawn = mean_images(entry.model, 4 * COLUMNS, seed=seed)
    limits = drawn.new_tensor(cast(ImageSpace, entry.model.space).pixel_range)
    drawn = pixel_scaling(limits if limits.isfinite().all() else drawn)(drawn)
    return image_rows(split_into_rows("samples", drawn), "Samples from the model (mean images)")


@torch.no_grad()
def reconstructions(entry: Entry, images: Tensor) -> "Figure":
    """Draw up to 8 images above their reconstructions from the guide's means."""
    scale, images = pixel_scaling(images), images[:COLUMNS]
    reconstructed = entry.model.mean_image(entry.guide.expectations(images))
    rows = {"image": scale(images), "reconstruction": scale(reconstructed)}
    return image_rows(rows, "Test images and their reconstructions")
