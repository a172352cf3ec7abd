"""Figures of scenes: what was found, every object in its color and box, and draws of the prior."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from capsule_zoo.figures.grids import image_rows, part_colors
from capsule_zoo.inference.evaluation.objects import FoundObjects, find_objects

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from capsule_zoo.registry import Entry


def colored_objects(images: Tensor, found: FoundObjects) -> Tensor:
    """Return images (B, C, H, W) whose objects have a color each and a box, (B, 3, H, W)."""
    colors = part_colors(found.presence.shape[1]).to(images)
    gray = images.mean(1, keepdim=True)
    own = torch.cat([gray.new_ones(1, 3), colors])[found.numbers].movedim(-1, 1)
    shown = torch.where((found.numbers > 0)[:, None], own * (0.35 + 0.65 * gray), 0.5 * gray)
    for image, boxes, on in zip(shown, found.boxes.long(), found.presence, strict=True):
        for slot in on.nonzero()[:, 0].tolist():
            _frame(image, boxes[slot].tolist(), colors[slot])
    return shown


def _frame(image: Tensor, box: list[int], color: Tensor) -> None:
    """Draw the edge of a box into an image (3, H, W), in place."""
    left, top, right, bottom = box
    if right <= left or bottom <= top:
        return
    for rows, columns in (
        (slice(top, bottom), [left, right - 1]),
        ([top, bottom - 1], slice(left, right)),
    ):
        image[:, rows, columns] = color[:, None, None]


def found_objects(entry: Entry, images: Tensor) -> Figure:
    """Draw up to 12 images above their objects, each in its color and box."""
    images = images[:12]
    found = find_objects(entry.model, entry.guide, images)
    rows = {"image": images, "objects": colored_objects(images, found)}
    return image_rows(rows, "Test images and the objects that were found in them")
