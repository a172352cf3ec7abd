"""Figures of the capsule network: reconstructions, and the meaning of a capsule's numbers."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from capsule_zoo.entry import Entry
from capsule_zoo.figures.grids import COLUMNS, draw_changes, image_rows
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
    winner = int(capsules.norm(dim=-1).argmax())

    def draw(numbers: Tensor) -> Tensor:
        labels = torch.full((len(numbers),), winner, device=numbers.device)
        return entry.model.draw(numbers[:, None], labels)

    pictures = draw_changes(draw, capsules[0, winner], STEPS.to(capsules), rows)
    return image_rows(
        pictures, "One number of the longest capsule, changed by -0.25 (left) to 0.25 (right)"
    )
