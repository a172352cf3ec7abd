"""Pictures of recurrent capsules: the canvas after each step, with the window of the step."""

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from capsule_zoo.figures.generic import on_scale_of
from capsule_zoo.figures.grids import image_rows
from capsule_zoo.models.common.modes import in_eval_mode, seeded
from capsule_zoo.models.recurrent_capsules import Drawing, RecurrentCapsules

if TYPE_CHECKING:
    from matplotlib.animation import FuncAnimation
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    from capsule_zoo.registry import Entry


@torch.no_grad()
def drawings_of(entry: "Entry", images: Tensor, seed: int = 0) -> list[Drawing]:
    """Return the guide's drawing of images (B, C, H, W), before the first and after each step."""
    with seeded(seed), in_eval_mode(entry.guide):
        return [entry.model.begin(len(images)), *entry.guide(images)]


def strokes(entry: "Entry", images: Tensor) -> "Figure":
    """Draw up to 6 images, the mean image after each step, and the window of each step."""
    images = images[:6]
    scale, drawings = on_scale_of(images), drawings_of(entry, images)
    seen = torch.stack([images, *(drawing.mean for drawing in drawings)], 1)
    rows = {f"image {i + 1}": pictures for i, pictures in enumerate(scale(seen))}
    figure = image_rows(rows, "Images, and the canvas from before the first step to the last")
    axes = np.array(figure.axes).reshape(len(images), -1)
    for t, drawing in enumerate(drawings[1:], start=2):
        for axis, frame in zip(axes[:, t], frames(entry.model, drawing), strict=True):
            axis.add_patch(frame)
    return figure


@torch.no_grad()
def frames(model: RecurrentCapsules, drawing: Drawing) -> "list[Rectangle]":
    """Return a rectangle around each image's window; it has size zero without windows."""
    from matplotlib.patches import Rectangle

    if model.window_size is None:
        return [Rectangle((0, 0), 0, 0) for _ in drawing.canvas]
    window = model.window(drawing)
    side = window.stride * (model.window_size - 1)
    height, width = model.image_shape[1:]
    corner = window.center + side.new_tensor([width - 1, height - 1]) / 2 - side[:, None] / 2
    return [
        Rectangle((x, y), length, length, fill=False, edgecolor="tab:red", linewidth=1)
        for (x, y), length in zip(corner.tolist(), side.tolist(), strict=True)
    ]


def animation(entry: "Entry", images: Tensor) -> "FuncAnimation":
    """Draw an animation of the steps, one frame each; `.to_jshtml()` plays it in a notebook."""
    from matplotlib import pyplot as plt
    from matplotlib.animation import FuncAnimation

    scale, drawings = on_scale_of(images), drawings_of(entry, images)
    figure = image_rows({"image": scale(images), "canvas": scale(images)})
    axes = np.array(figure.axes).reshape(2, -1)[1]

    def show(step: int) -> None:
        drawing = drawings[step]
        outlines = frames(entry.model, drawing)
        for axis, picture, frame in zip(axes, scale(drawing.mean), outlines, strict=True):
            axis.images[0].set_data(picture.movedim(0, -1).numpy())
            for old in list(axis.patches):
                old.remove()
            if step:
                axis.add_patch(frame)
        figure.suptitle(f"after {step} steps", fontsize=9)

    shown = FuncAnimation(figure, show, frames=len(drawings), interval=500)
    plt.close(figure)  # otherwise a notebook shows it twice
    return shown
