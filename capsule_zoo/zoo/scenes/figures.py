"""Figures of scenes: found objects, each in its color and box, and fractions of correct counts."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from capsule_zoo.data.scenes import boxes_of, masks_of
from capsule_zoo.entry import Entry
from capsule_zoo.figures.curves import legend_below, number_curves
from capsule_zoo.figures.grids import COLUMNS, image_rows, panels, part_colors
from capsule_zoo.inference.objects import find_objects

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from capsule_zoo.records import Numbers

ZOOM = 4  # pixels of a picture for each pixel of an image
DRAWN, COUNTED = (
    COLUMNS,
    60,
)  # images in the figure of objects, and images whose objects are counted


def colored_objects(images: Tensor, numbers: Tensor, slots: int) -> Tensor:
    """Draw the objects of images, each in its color and box, (B, 3, ZOOM H, ZOOM W).

    Args:
        numbers: the slot, from 1, that each pixel shows; 0 for the ground, (B, H, W).
    """
    colors = part_colors(slots).to(images)
    object_colors = torch.cat([colors.new_ones(1, 3), colors])[numbers].movedim(-1, 1)
    gray = images.mean(1, keepdim=True)
    pictures = torch.where((numbers > 0)[:, None], object_colors * (0.35 + 0.65 * gray), 0.5 * gray)
    pictures = pictures.repeat_interleave(ZOOM, -1).repeat_interleave(ZOOM, -2)
    for image, boxes in zip(pictures, boxes_of(masks_of(numbers, slots)).long(), strict=True):
        for box, color in zip(boxes.tolist(), colors, strict=True):
            _frame(image, box, color)
    return pictures


def outlined_objects(picture: Tensor, numbers: Tensor) -> Tensor:
    """Draw the objects of a whole picture (C, H, W), each in its color, (3, H, W).

    A dim picture is brightened, so that its .995 quantile is white.

    Args:
        numbers: the object, from 1, that each pixel shows; 0 for the ground, (H, W).
    """
    gray = picture.mean(0).nan_to_num()
    gray = (gray / gray.flatten().kthvalue(max(1, int(0.995 * gray.numel()))).values).clamp(0, 1)
    colors = torch.cat([gray.new_ones(1, 3), part_colors(max(1, int(numbers.max()))).to(gray)])
    color, visible = colors[numbers].movedim(-1, 0), numbers > 0
    edge = F.max_pool2d(numbers[None].float(), 3, 1, 1)[0] != numbers
    mixed = torch.where(visible, 0.45 * color + 0.55 * gray, gray)
    return torch.where(visible & edge, color, mixed)


def _frame(image: Tensor, box: list[int], color: Tensor) -> None:
    """Draw the frame of a box, in pixels of the scene, onto a picture, in place."""
    height, width = image.shape[-2:]
    left, top = (max(ZOOM * edge - 2, 0) for edge in box[:2])
    right, bottom = min(ZOOM * box[2] + 1, width - 1), min(ZOOM * box[3] + 1, height - 1)
    if box[2] > box[0]:
        image[:, top : bottom + 1, [left, left + 1, right - 1, right]] = color[:, None, None]
        image[:, [top, top + 1, bottom - 1, bottom], left : right + 1] = color[:, None, None]


def found_objects(entry: Entry, images: Tensor) -> "Figure":
    """Draw up to 8 images above their objects, each in its color and box.

    Objects of more images are inferred, so that the warning of too few slots rests on more than 8.
    """
    detections = find_objects(entry.model, entry.guide, images[:COUNTED])
    images = images[:DRAWN]
    large = images.repeat_interleave(ZOOM, -1).repeat_interleave(ZOOM, -2)
    numbers = detections.numbers[:DRAWN]
    rows = {"image": large, "objects": colored_objects(images, numbers, entry.model.slots)}
    return image_rows(rows, "Test images and their inferred objects, a color and a box for each")


def counts_against_time(
    curves: Sequence[Sequence[tuple[float, int, float]]],
    published: float,
    names: Sequence[str] = (),
) -> "Figure":
    """Draw the fraction of correct counts against minutes and against updates, a line for each run.

    Args:
        curves: for each run, the seconds, updates and fractions of its measurements.
        published: a published fraction, drawn as a horizontal line.
        names: names of the runs; by default the numbers of their seeds.
    """
    figure, (axes,) = panels(2, size=(4, 3), sharey=True)
    names = names or [f"seed {number}" for number in range(len(curves))]
    for name, curve in zip(names, curves, strict=True):
        seconds, updates, fraction = zip(*curve, strict=True)
        for axis, places in zip(axes, ([s / 60 for s in seconds], updates), strict=True):
            axis.plot(places, fraction, lw=1, marker=".", label=name)
    for axis, axis_label in zip(axes, ("time of training (minutes)", "updates"), strict=True):
        axis.axhline(
            published, color="gray", ls="--", lw=1, label="Attend, Infer, Repeat (published)"
        )
        axis.set(xlabel=axis_label)
    axes[0].set_ylabel("fraction of correct counts")
    return legend_below(figure)


def counts_reliability(bins: "Mapping[str, Mapping[str, Numbers]]") -> "Figure":
    """Draw the fraction of wrong counts against their predicted probability.

    There is a panel for each set of scenes. A dotted line shows where both are equal.

    Args:
        bins: by set of scenes and inference method, the fraction at each mean probability.
    """
    figure = number_curves(bins, "probability that the count is wrong")
    places = torch.logspace(-9, 0, 200)
    for axis, kind in zip(figure.axes, bins, strict=True):
        axis.plot(places, places, color="gray", ls=":", lw=1)
        axis.set(xscale="log", xticks=[10.0**power for power in range(-9, 1, 3)])
        axis.set(title=kind, ylabel="fraction of wrong counts", ylim=(-0.03, 1.03))
    return figure


def counts_by_number(fractions: "Mapping[str, Numbers]", max_trained_number: int) -> "Figure":
    """Draw the fraction of correct counts by true number of objects, a line for each method.

    Args:
        fractions: by inference method, the fraction at each number.
        max_trained_number: the largest number that was trained on; a dotted line lies above it.
    """
    figure = number_curves(
        {"fraction of correct counts": fractions}, "number of objects in the scene"
    )
    figure.axes[0].axvline(max_trained_number + 0.5, color="gray", ls=":", lw=1)
    return figure
