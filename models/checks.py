"""Checks of arguments: images, labels, sizes and choices, each with a remedy in its error."""

from __future__ import annotations

import torch
from torch import Tensor


def check_images_of(program: object, images: Tensor) -> None:
    """Raise ValueError unless `images` is a batch that a model, or its guide, accepts.

    A `Model` declares the range of its pixels. Any other program accepts pixels in [0, 1].
    """
    model = getattr(program, "model", program)
    getattr(model, "check_images", check_images)(images)


def check_images(
    images: Tensor,
    shape: tuple[int, ...] | None = None,
    pixel_range: tuple[float, float] = (0.0, 1.0),
) -> None:
    """Raise ValueError with a remedy unless `images` is a proper batch (B, C, H, W)."""
    if not isinstance(images, Tensor):
        raise ValueError(
            f"images must be a torch.Tensor of shape (B, C, H, W), not {type(images).__name__}"
        )
    if images.dim() != 4:
        raise ValueError(
            f"images must have shape (B, C, H, W), not {tuple(images.shape)}; "
            "add the missing dimensions with images[:, None] or images[None]"
        )
    if images.shape[0] == 0:
        raise ValueError("images is an empty batch; give at least one image")
    if shape is not None and tuple(images.shape[1:]) != tuple(shape):
        raise ValueError(
            f"images must be (B, {', '.join(map(str, shape))}) for this model, not "
            f"{tuple(images.shape)}; resize the images or build the model with their "
            "channels and image size"
        )
    if not images.is_floating_point():
        raise ValueError(f"images must be floating point, not {images.dtype}; divide bytes by 255")
    low, high = torch.aminmax(images)  # NaN in either bound means NaN somewhere in the images
    if not torch.isfinite(low + high):
        raise ValueError(
            "images holds NaN or infinite pixels; clean them before use, or, where NaN marks a "
            "missing pixel, use with_missing_pixels() of both model and guide"
        )
    least, most = pixel_range
    if low < least or high > most:
        raise ValueError(
            f"images must lie in [{least:g}, {most:g}], but these span "
            f"[{low.item():g}, {high.item():g}]; rescale them"
        )


def check_at_least(minimum: float, **arguments: float | list[float] | tuple[float, ...]) -> None:
    """Raise ValueError that names the first argument, or entry of one, below `minimum`."""
    for name, value in arguments.items():
        if isinstance(value, list | tuple):
            check_at_least(minimum, **{f"{name}[{i}]": entry for i, entry in enumerate(value)})
        elif not value >= minimum:
            raise ValueError(f"{name} must be at least {minimum:g}, not {value!r}")


def check_positive(**arguments: float) -> None:
    """Raise ValueError that names the first argument that is not a positive finite number."""
    for name, value in arguments.items():
        if not 0 < value < float("inf"):
            raise ValueError(f"{name} must be positive and finite, not {value!r}")


def check_one_of(name: str, value: object, allowed: tuple) -> None:
    """Raise ValueError that names the argument unless its value is allowed."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, not {value!r}")


def check_labels(labels: Tensor | None, classes: int) -> None:
    """Raise ValueError unless labels, if any, are (B,) integers from 0 to `classes` - 1."""
    if labels is None:
        return
    if labels.dim() != 1 or labels.is_floating_point():
        raise ValueError(
            f"labels must be integers of shape (B,), not {labels.dtype} of shape "
            f"{tuple(labels.shape)}"
        )
    if labels.numel() and not 0 <= labels.min() <= labels.max() < classes:
        raise ValueError(
            f"labels must lie in 0 to {classes - 1}, but these span {labels.min().item()} to "
            f"{labels.max().item()}; build the model with more classes"
        )
