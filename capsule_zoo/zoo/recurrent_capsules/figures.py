"""Figures of recurrent capsules: the canvas after each step, with the window of the step."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from capsule_zoo.entry import Entry
from capsule_zoo.figures.generic import pixel_scaling
from capsule_zoo.figures.grids import image_rows
from capsule_zoo.models.common.modes import eval_mode, use_seed
from capsule_zoo.models.recurrent_capsules import Drawing, RecurrentCapsules

if TYPE_CHECKING:
    from matplotlib.animation import FuncAnimation
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage


@torch.no_grad()
def drawings_of(entry: Entry, images: Tensor, seed: int = 0) -> list[Drawing]:
    """Reconstruct images (B, C, H, W) with the guide: before the first step and after each step."""
    with use_seed(seed), eval_mode(entry.guide):
        return [entry.model.begin(len(images)), *entry.guide(images)]


def strokes(entry: Entry, images: Tensor) -> "Figure":
    """Draw up to 6 images, the mean image after each step, and the window of each step."""
    images = images[:6]
    scale, drawings = pixel_scaling(images), drawings_of(entry, images)
    frames = torch.stack([images, *(drawing.mean for drawing in drawings)], 1)
    rows = {f"image {i + 1}": pictures for i, pictures in enumerate(scale(frames))}
    figure = image_rows(
        rows, "Images, and the canvas before step 1 and after every step (red: window of the step)"
    )
    panels = np.array(figure.axes[0].images).reshape(len(images), -1)
    for t, drawing in enumerate(drawings[1:], start=2):
        add_frames(panels[:, t], entry.model, drawing)
    return figure


@torch.no_grad()
def add_frames(pictures: "Iterable[AxesImage]", model: RecurrentCapsules, drawing: Drawing) -> None:
    """Add a frame around every window, if any, to a figure of `image_rows`."""
    from matplotlib.patches import Rectangle

    if model.window_size is None:
        return
    window, size = model.window(drawing), drawing.canvas.new_tensor(model.image_shape[:0:-1])
    half = (window.stride * (model.window_size - 1) / 2)[:, None]
    ends = [window.center + size / 2 + sign * half for sign in (-1, 1)]
    low, high = (end.clamp(min=0).minimum(size) / size for end in ends)
    for picture, (x, y), (wide, tall) in zip(pictures, low, high - low, strict=True):
        left, right, bottom, top = picture.get_extent()
        across, down = right - left, bottom - top
        place, sides = (left + across * x, top + down * y), (across * wide, down * tall)
        picture.axes.add_patch(Rectangle(place, *sides, fill=False, edgecolor="tab:red"))


def animation(entry: Entry, images: Tensor) -> "FuncAnimation":
    """Return an animation with a frame for each step; `.to_jshtml()` plays it in a notebook."""
    from matplotlib import pyplot as plt
    from matplotlib.animation import FuncAnimation

    scale, drawings = pixel_scaling(images), drawings_of(entry, images)
    figure = image_rows({"image": scale(images), "canvas": scale(images)})
    (axis,), panels = figure.axes, figure.axes[0].images[len(images) :]

    def show(step: int) -> None:
        for picture, mean in zip(panels, scale(drawings[step].mean), strict=True):
            picture.set_data(mean.movedim(0, -1).numpy())
        for old in list(axis.patches):
            old.remove()
        if step:
            add_frames(panels, entry.model, drawings[step])
        figure.suptitle(f"after {step} steps", fontsize=10)

    moving = FuncAnimation(figure, show, frames=len(drawings), interval=500)
    plt.close(figure)  # otherwise a notebook shows it twice
    return moving
