"""Affine warps of images with known parameters, and random warps for augmentation.

Coordinates are pixels from the center of the image, x to the right and y down. A motion is an
affine matrix (B, 2, 3) = [L | t] that moves the content: the pixel at p appears at L p + t. Warps
are bilinear, with zeros outside.

The random versions are values: `Rotate(20)(images, generator=g)` draws one motion for each image
from `g`, a CPU generator, and returns new images on the device of the old ones.

A family of requests describes the transformations that can be asked of a model, such as a rotation
in degrees or a shift in pixels. Its parameters (B, n) are in these units. The model gets them as
numbers (B, 2) that suit a network, and the numbers of the identity are `identity`. The inverse of a
request has the negative parameters.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import isfinite
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from capsule_zoo.data.registration import Settings
from capsule_zoo.data.tensors import accept_arrays, as_tensor


def motion(
    degrees: Tensor | float = 0.0,
    shear: Tensor | float = 0.0,
    scale: tuple[Tensor | float, Tensor | float] = (1.0, 1.0),
    shift: tuple[Tensor | float, Tensor | float] = (0.0, 0.0),
) -> Tensor:
    """Return the affine matrices (B, 2, 3) of scaling, then shear, rotation and shift.

    Args:
        degrees: rotation, counter-clockwise as seen; a number or one per image, like all others.
        shear: x moves by `shear` times y.
        scale: factors along x and y.
        shift: pixels along x and y.
    """
    like = as_tensor("degrees", degrees)
    like = like if like.is_floating_point() else like.float()  # whole numbers cut no other
    settings = (degrees, shear, *scale, *shift)
    numbers = (torch.as_tensor(n, dtype=like.dtype, device=like.device) for n in settings)
    angle, slant, scale_x, scale_y, shift_x, shift_y = torch.broadcast_tensors(
        *(torch.atleast_1d(n) for n in numbers)
    )
    cos, sin = angle.deg2rad().cos(), angle.deg2rad().sin()
    first = [cos * scale_x, (cos * slant + sin) * scale_y, shift_x]
    second = [-sin * scale_x, (cos - sin * slant) * scale_y, shift_y]
    return torch.stack([torch.stack(first, -1), torch.stack(second, -1)], -2)


@accept_arrays("images", "motions")
def warp_images(images: Tensor, motions: Tensor, size: tuple[int, int] | None = None) -> Tensor:
    """Move images (B, C, H, W) by `motions` (B, 2, 3) or (1, 2, 3).

    Args:
        size: (height, width) of the result, with the same center as the images; by default the
            images' size.

    Raises:
        ValueError: motions of another shape.
    """
    if motions.shape[1:] != (2, 3) or len(motions) not in (1, len(images)):
        raise ValueError(
            f"motions must be (B, 2, 3) with B = {len(images)} or 1, not {tuple(motions.shape)}"
        )
    height, width = size or images.shape[-2:]
    motions = motions.to(images).expand(len(images), 2, 3)
    pixels = pixel_centers(height, width).to(images)  # (height * width, 2)
    source = (pixels - motions[:, None, :, 2]) @ torch.linalg.inv(motions[:, :, :2]).mT
    # `grid_sample` wants -1 and 1 at the outer edges of the outer pixels
    half = source.new_tensor([images.shape[-1] / 2, images.shape[-2] / 2])
    grid = (source / half).view(-1, height, width, 2)
    return F.grid_sample(images, grid, padding_mode="zeros", align_corners=False)


def pixel_centers(height: int, width: int) -> Tensor:
    """Return the positions (x, y) of all pixels from the center of the image, row by row."""
    y, x = torch.meshgrid(
        torch.arange(height) - (height - 1) / 2,
        torch.arange(width) - (width - 1) / 2,
        indexing="ij",
    )
    return torch.stack([x, y], -1).view(-1, 2)


@accept_arrays("images", "x", "y")
def shift_pixels(images: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Move images by whole pixels, `x` to the right and `y` down (B,), without interpolation."""
    count, channels, height, width = images.shape
    device = images.device
    columns = torch.arange(width, device=device) - x.to(device)[:, None]  # (images, width)
    rows = torch.arange(height, device=device) - y.to(device)[:, None]
    inside_x, inside_y = (columns >= 0) & (columns < width), (rows >= 0) & (rows < height)
    source = rows.clamp(0, height - 1)[:, :, None] * width + columns.clamp(0, width - 1)[:, None]
    source = source.view(count, 1, -1).expand(-1, channels, -1)
    inside = inside_y[:, None, :, None] & inside_x[:, None, None, :]
    return images.flatten(2).gather(2, source).view_as(images) * inside


@accept_arrays("images", "motions")
def ink_extent(images: Tensor, motions: Tensor) -> Tensor:
    """Return the bounds of each image's ink after `motions`: left, right, top, bottom, (B, 4).

    The bounds, in pixels, hold every point at which the warped image can differ from zero: the
    ink's pixels are moved one by one, and the moved bilinear kernel is added around them.
    """
    inked = (images.amax(1) > 0).flatten(1)  # (images, height * width)
    pixels = pixel_centers(*images.shape[-2:]).to(motions)
    moved = pixels @ motions[:, :, :2].mT + motions[:, None, :, 2]
    reach = motions[:, :, :2].abs().sum(-1)
    inf = float("inf")
    low = moved.masked_fill(~inked[..., None], inf).amin(1) - reach
    high = moved.masked_fill(~inked[..., None], -inf).amax(1) + reach
    return torch.stack([low, high], -1).flatten(1)


def uniform(
    low: Tensor | float, high: Tensor | float, count: int, generator: torch.Generator
) -> Tensor:
    """Draw `count` numbers, uniform between `low` and `high`, on the CPU."""
    return low + (high - low) * torch.rand(count, generator=generator)


@dataclass(frozen=True)
class Shift:
    """A random shift by whole pixels, uniform in [-pixels, pixels] along each axis."""

    pixels: int

    def __post_init__(self) -> None:
        if not (float(self.pixels).is_integer() and self.pixels >= 0):
            raise ValueError(f"pixels must be a whole number, 0 or more, not {self.pixels!r}")

    def __call__(self, images: Tensor, *, generator: torch.Generator) -> Tensor:
        shape, reach = (2, len(images)), int(self.pixels)
        x, y = torch.randint(-reach, reach + 1, shape, generator=generator)
        return shift_pixels(images, x, y)


@dataclass(frozen=True)
class Rotate:
    """A random rotation about the center by an angle uniform in [-degrees, degrees]."""

    degrees: float

    def __post_init__(self) -> None:
        _check_not_negative(degrees=self.degrees)

    def __call__(self, images: Tensor, *, generator: torch.Generator) -> Tensor:
        return warp_images(
            images, motion(uniform(-self.degrees, self.degrees, len(images), generator))
        )


@dataclass(frozen=True)
class Affine:
    """A random scale, shear, rotation and shift, each uniform and independent.

    Attributes:
        degrees: the angle lies in [-degrees, degrees].
        shear: the shear lies in [-shear, shear].
        scale: smallest and largest factor, drawn for x and for y.
        shift: pixels; the shift along each axis lies in [-shift, shift].
    """

    degrees: float = 0.0
    shear: float = 0.0
    scale: tuple[float, float] = (1.0, 1.0)
    shift: float = 0.0

    def __post_init__(self) -> None:
        _check_not_negative(degrees=self.degrees, shear=self.shear, shift=self.shift)
        low, high = self.scale
        if not 0 < low <= high < float("inf"):
            raise ValueError(f"scale must be (low, high) with 0 < low <= high, not {self.scale}")

    def motions(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw `count` random affine matrices (count, 2, 3)."""
        return motion(
            uniform(-self.degrees, self.degrees, count, generator),
            uniform(-self.shear, self.shear, count, generator),
            (uniform(*self.scale, count, generator), uniform(*self.scale, count, generator)),
            (
                uniform(-self.shift, self.shift, count, generator),
                uniform(-self.shift, self.shift, count, generator),
            ),
        )

    def __call__(self, images: Tensor, *, generator: torch.Generator) -> Tensor:
        return warp_images(images, self.motions(len(images), generator))


def _check_not_negative(**arguments: float) -> None:
    for name, value in arguments.items():
        if not (isfinite(value) and value >= 0):
            raise ValueError(f"{name} must be a finite number, 0 or more, not {value!r}")


@dataclass(frozen=True)
class Binarize:
    """A transform that draws each pixel from Bernoulli(pixel) each time an image is seen.

    `Dataset.binarize` draws only once instead. A missing pixel, NaN, stays missing.

    Raises:
        ValueError: a pixel outside [0, 1].
    """

    @accept_arrays("images")
    def __call__(self, images: Tensor, *, generator: torch.Generator) -> Tensor:
        if ((images < 0) | (images > 1)).any():
            raise ValueError(
                f"pixels to binarize must lie in [0, 1], not in [{images.min():g}, "
                f"{images.max():g}]; divide bytes by 255, and binarize before other transforms"
            )
        uniform = torch.rand(images.shape, generator=generator)
        binary = (uniform.to(images.device) < images).to(images.dtype)
        return torch.where(images.isnan(), images, binary)


@dataclass(frozen=True)
class Standardize:
    """A transform that subtracts a mean from pixels and divides by a scale.

    It is suited to real-valued units.

    Attributes:
        mean, scale: numbers for all pixels, so that an image stays an image.
    """

    mean: float
    scale: float

    def __post_init__(self) -> None:
        if not self.scale > 0:
            raise ValueError(f"scale must be positive, not {self.scale!r}; are all pixels alike?")

    @classmethod
    @accept_arrays("images")
    def of(cls, images: Tensor) -> Self:
        """Return the transform to mean 0 and variance 1 over all pixels of these images."""
        return cls(images.mean().item(), images.std(correction=0).item())

    @accept_arrays("images")
    def __call__(self, images: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        return (images - self.mean) / self.scale

    @accept_arrays("images")
    def inverse(self, images: Tensor) -> Tensor:
        """Return the pixels of which `images` are the standard scores."""
        return images * self.scale + self.mean


class Requests(Settings, ABC):
    """A family of transformations that can be requested of a model.

    Attributes:
        identity: the numbers of the request that leaves an image unchanged.
        parameters: number of parameters of a request.
    """

    identity: ClassVar[tuple[float, float]]
    parameters: ClassVar[int]

    @abstractmethod
    def numbers(self, parameters: Tensor) -> Tensor:
        """Return the model's inputs (B, 2) for requests with parameters (B, n)."""

    @abstractmethod
    def motions(self, parameters: Tensor) -> Tensor:
        """Return the affine matrices (B, 2, 3) of requests; see `capsule_zoo.data.transforms`."""

    @accept_arrays("low", "high")
    def draw(self, low: Tensor, high: Tensor) -> Tensor:
        """Draw parameters of requests (B, n), uniform from `low` to `high`, (B,) each."""
        low, high = low[:, None], high[:, None]
        uniform = torch.rand(len(low), self.parameters, dtype=low.dtype, device=low.device)
        return low + (high - low) * uniform

    @accept_arrays("images", "parameters")
    def move(self, images: Tensor, parameters: Tensor) -> Tensor:
        """Transform images (B, C, H, W) in [0, 1] as requested: bilinear, zero outside."""
        return warp_images(images, self.motions(parameters)).clamp(0, 1)


@dataclass(frozen=True)
class Rotations(Requests):
    """The family of rotations about the center, by degrees, counter-clockwise as seen."""

    identity = (1.0, 0.0)
    parameters = 1

    @accept_arrays("parameters")
    def numbers(self, parameters: Tensor) -> Tensor:
        angle = parameters[:, 0].deg2rad()
        return torch.stack([angle.cos(), angle.sin()], -1)

    @accept_arrays("parameters")
    def motions(self, parameters: Tensor) -> Tensor:
        return motion(parameters[:, 0])


@dataclass(frozen=True)
class Shifts(Requests):
    """The family of shifts, whose parameters are pixels to the right and down.

    Attributes:
        reach: the number of pixels that the model gets as 1.
    """

    reach: float = 20.0
    identity = (0.0, 0.0)
    parameters = 2

    @accept_arrays("parameters")
    def numbers(self, parameters: Tensor) -> Tensor:
        return parameters / self.reach

    @accept_arrays("parameters")
    def motions(self, parameters: Tensor) -> Tensor:
        x, y = parameters.unbind(-1)
        return motion(torch.zeros_like(x), shift=(x, y))

    def draw(self, low: Tensor, high: Tensor) -> Tensor:
        """Draw shifts by whole pixels, uniform in [low, high)."""
        return super().draw(low, high).floor()
