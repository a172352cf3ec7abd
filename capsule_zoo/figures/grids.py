"""Grids of pictures: rows of images, and colors for parts and for signed values."""

import textwrap
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGE_WIDTH = 5.2  # inches: text of 9 points is 9 pixels high on a phone, 19 on a screen
MAX_PICTURE = 0.7  # largest width of a picture, in inches
COLUMNS = 8  # pictures in a row, so that 28 pixels are enlarged more than twice on a screen
LABEL_LENGTH = 14  # letters in a line of a row's label, if its words allow
TITLE_LENGTH = 58  # letters in a line of a title


def panels(
    columns: int = 1,
    rows: int = 1,
    size: tuple[float, float] = (6, 3.5),
    margin: tuple[float, float] = (0, 0),
    **shared: Any,
) -> "tuple[Figure, np.ndarray]":
    """Return a figure and its axes (rows, columns); `size` is the size of an axis in inches.

    Axes are narrower where the figure would be wider than a page, so that its text stays legible.
    """
    from matplotlib import pyplot as plt

    whole = min(columns * size[0] + margin[0], PAGE_WIDTH), rows * size[1] + margin[1]
    shared |= dict(figsize=whole, squeeze=False, layout="constrained")
    with plt.rc_context({"font.size": 9, "axes.titlesize": 9}):
        figure, axes = plt.subplots(rows, columns, **shared)
    for axis in axes.flat:
        axis.tick_params(labelsize=8)
    return figure, axes


def image_rows(rows: Mapping[str, Tensor | np.ndarray], title: str | None = None) -> "Figure":
    """Draw a labeled row of pictures per item, (N, C, H, W) or (N, H, W, 3), in [0, 1].

    Pictures are as large as the width of a page allows, but at most MAX_PICTURE inches wide.
    """
    pictures = {
        textwrap.fill(name.replace("_", " "), LABEL_LENGTH, break_long_words=False): _as_pictures(i)
        for name, i in rows.items()
    }
    lines = -(-len(title or "") // TITLE_LENGTH)
    title = textwrap.fill(title or "", min(TITLE_LENGTH, len(title or "") // max(1, lines) + 9))
    columns = max(len(images) for images in pictures.values())
    letters = max(len(line) for name in pictures for line in name.split("\n"))
    margin = 0.3 + 0.075 * letters, 0.4 + 0.17 * title.count("\n")
    side = min((PAGE_WIDTH - margin[0]) / columns, MAX_PICTURE)
    longest = max(map(len, title.split("\n")))
    wide = max(side * columns, 0.085 * longest - margin[0])  # inches for a row, or for the title
    figure, ((axis,),) = panels(1, 1, (wide, side * len(rows)), margin)
    for row, images in enumerate(pictures.values()):
        for column, image in enumerate(images):  # one pair of axes holds all: many take seconds
            high, wide = 0.48 * np.array(image.shape[:2]) / max(image.shape[:2])
            place = column - wide, column + wide, row + high, row - high
            drawn = image if image.ndim == 2 else np.clip(image, 0, 1)  # colors outside warn
            axis.imshow(drawn, cmap="gray", vmin=0, vmax=1, extent=place)
    axis.set(xlim=(-0.5, columns - 0.5), ylim=(len(rows) - 0.5, -0.5), xticks=[], anchor="W")
    axis.set_yticks(range(len(rows)), list(pictures), fontsize=9)
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    figure.suptitle(title, fontsize=10)
    return figure


def draw_changes(
    draw: Callable[[Tensor], Tensor], numbers: Tensor, changes: Tensor, rows: int
) -> dict[str, Tensor]:
    """Return pictures of numbers (D,) with one of them changed, a row for each number.

    The rows are those of the numbers that change the picture most, in the order of the numbers.

    Args:
        draw: returns the pictures (N, C, H, W) of numbers (N, D).
        changes: what is added to a number, (S,), or to each of them, (S, D).
        rows: the most rows.
    """
    size, steps = len(numbers), len(changes)
    change = changes.reshape(steps, -1).expand(steps, size)
    changed = numbers + torch.einsum("sd,de->dse", change, torch.eye(size).to(numbers))
    drawn = draw(changed.flatten(0, 1)).unflatten(0, (size, steps))
    effect = (drawn[:, -1] - drawn[:, 0]).square().sum((1, 2, 3))
    indices = effect.argsort(descending=True)[:rows].sort().values
    return {f"number {d + 1}": drawn[d] for d in indices.tolist()}


def split_into_rows(kind: str, images: Tensor, length: int = COLUMNS) -> dict[str, Tensor]:
    """Return images (N, ...) as rows of at most `length`, named by image numbers from 1."""
    rows, first = {}, 1
    for row in images.split(length):
        rows[f"{kind} {first}-{first + len(row) - 1}"] = row
        first += len(row)
    return rows


def part_colors(parts: int) -> Tensor:
    """Return a color for each part, (parts, 3); neighbors have very different colors."""
    from matplotlib import pyplot as plt

    hues = torch.arange(parts) * 0.618034 % 1.0
    return torch.from_numpy(plt.get_cmap("hsv")(hues.numpy())[:, :3]).float()


def _as_pictures(images: Tensor | np.ndarray) -> np.ndarray:
    array = images.detach().cpu().numpy() if isinstance(images, Tensor) else np.asarray(images)
    if array.ndim == 4 and array.shape[1] in (1, 3):
        array = np.moveaxis(array, 1, -1)
    return array.squeeze(-1) if array.shape[-1] == 1 else array


def signed_colors(values: Tensor) -> Tensor:
    """Return values (H, W) in [-1, 1] as colors (H, W, 3): blue below zero, red above."""
    from matplotlib import pyplot as plt

    return torch.from_numpy(plt.get_cmap("RdBu_r")((values.numpy() + 1) / 2)[..., :3]).float()
