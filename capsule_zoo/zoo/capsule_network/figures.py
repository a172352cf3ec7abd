"""Figures of the capsule network: reconstructions, and the meaning of a capsule's numbers."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from capsule_zoo.entry import Entry
from capsule_zoo.figures.grids import COLUMNS, image_rows
from capsule_zoo.models.common.modes import eval_mode
from capsule_zoo.models.routing.vector_capsules import squash

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STEPS = torch.linspace(-0.25, 0.25, 11)  # changes of a number, as in the paper


@torch.no_grad()
def reconstructions(entry: Entry, images: Tensor) -> "Figure":
    """Draw up to 8 images above the pictures decoded from their longest capsules."""
    originals = images[:COLUMNS]
    with eval_mode(entry.guide):
        drawn = entry.model.draw(squash(entry.guide.poses(originals)))
    rows = {"image": originals, "longest capsule": drawn}
    return image_rows(rows, "Test images and their reconstructions")


@torch.no_grad()
def dimensions(entry: Entry, images: Tensor, rows: int = 8) -> "Figure":
    """Draw the first image with one number of its longest capsule changed by -.25 to .25.

    The figure has a row for each of the numbers that change the image most.
    """
    with eval_mode(entry.guide):
        capsules = squash(entry.guide.poses(images[:1]))  # (1, J, 16)
    winner = capsules.norm(dim=-1).argmax(-1)  # (1,)
    size = capsules.shape[-1]
    moved = capsules.repeat(size * len(STEPS), 1, 1)
    change = torch.einsum("s,de->dse", STEPS.to(capsules), torch.eye(size).to(capsules))
    moved[:, winner] += change.flatten(0, 1)[:, None]
    drawn = entry.model.draw(moved, winner.expand(len(moved)))
    drawn = drawn.unflatten(0, (size, len(STEPS)))
    spread = (drawn[:, -1] - drawn[:, 0]).square().sum((1, 2, 3))
    indices = spread.argsort(descending=True)[:rows].sort().values
    pictures = {f"number {d + 1}": drawn[d] for d in indices.tolist()}
    return image_rows(
        pictures, "One number of the longest capsule, changed by -0.25 (left) to 0.25 (right)"
    )
