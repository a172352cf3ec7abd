"""Missing pixels: images with NaN where they are not observed, and masks that hide a half."""

import torch
from torch import Tensor

from capsule_zoo.data.tensors import accept_arrays, as_tensor

SIDES = ("left", "right", "top", "bottom")


@accept_arrays("images", "observed")
def hide(images: Tensor, observed: Tensor) -> Tensor:
    """Replace the unobserved pixels of images (B, C, H, W) by NaN.

    Args:
        observed: bool, True where a pixel is observed: (H, W), (C, H, W), (B, 1, H, W) or
            (B, C, H, W).

    Raises:
        ValueError: `observed` is not bool, or of another shape.
    """
    return images.masked_fill(~check_mask(images, observed), float("nan"))


def check_mask(images: Tensor, observed: Tensor) -> Tensor:
    """Check a mask and expand it to the shape of the images, on their device; see `hide`."""
    observed = as_tensor("observed", observed)
    if observed.dtype != torch.bool:
        raise ValueError(
            f"observed must be a torch.Tensor of bool, not {observed.dtype}; True is observed"
        )
    count, channels, height, width = images.shape
    frame = (height, width)
    allowed = (frame, (channels, *frame), (count, 1, *frame), (count, channels, *frame))
    if tuple(observed.shape) not in allowed:
        raise ValueError(
            "observed must have the shape (H, W), (C, H, W), (B, 1, H, W) or (B, C, H, W) of "
            f"images {tuple(images.shape)}, not {tuple(observed.shape)}"
        )
    return observed.to(images.device).expand(images.shape)


def half_mask(size: tuple[int, int], side: str) -> Tensor:
    """Return a mask (H, W) that is False in one half; the middle line of an odd number counts in.

    Args:
        size: (height, width).
        side: the half that is hidden, "left", "right", "top" or "bottom".

    Raises:
        ValueError: there is no such side.
    """
    if side not in SIDES:
        raise ValueError(f"side must be one of {', '.join(SIDES)}, not {side!r}")
    observed = torch.ones(size, dtype=torch.bool)
    axis = 1 if side in ("left", "right") else 0
    half = (size[axis] + 1) // 2
    start = 0 if side in ("left", "top") else size[axis] - half
    observed.narrow(axis, start, half).fill_(False)
    return observed
