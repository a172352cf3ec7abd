"""Observation spaces: the observed site of a model, names of dims, checks and errors.

A model holds its space, `model.space`, and everything above the models asks it: what a batch must
look like, which site is observed, what the dims of an evaluation are called, and how far apart two
observations are. Images are an `ImageSpace`.

A batch is one tensor whose first dim counts the observations, so that every batch can be sliced,
split, shuffled, moved to a device and repeated (`tile_batch`) by the same code. Where observations
differ in size, as sets of points do, a batch is padded, and NaN marks the padding.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, ClassVar, Self

import torch
from pyro import poutine
from pyro.infer.autoguide import AutoGuide
from pyro.poutine import Trace
from torch import Tensor

from capsule_zoo.data.registration import Settings
from capsule_zoo.models.checks import check_tensor, told_apart
from capsule_zoo.models.common.missing_pixels import fill_missing
from capsule_zoo.models.common.trace_density import scored_sites

_ONE_BATCH = "of a Dataset of the zoo give a split, such as data.test, of a DataLoader one batch"


class PixelsOutOfRange(ValueError):
    """The error for images whose pixels leave the range of their space."""


class ObservationSpace(Settings, ABC):
    """The base class of observation spaces; subclasses name site and dims, and write `check`.

    Attributes:
        site: the name of the observed `pyro.sample` site.
        variable: the name of the observations in an evaluation.
        dims: the names of the dims of one observation.
    """

    site: ClassVar[str]
    variable: ClassVar[str]
    dims: ClassVar[tuple[str, ...]]

    @abstractmethod
    def check(self, batch: Tensor) -> None:
        """Raise ValueError, with a remedy, unless `batch` is a batch of the space."""

    @abstractmethod
    def example(self, number: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
        """Sample a random batch that `check` accepts; tests of every model use it."""

    @property
    def sites(self) -> tuple[str, ...]:
        """The names of all observed sites."""
        return (self.site,)

    def read(self, trace: Trace, of: Callable[[dict], Tensor] = itemgetter("value")) -> Tensor:
        """Return the batch that was sampled or observed in a trace of a model.

        Args:
            of: what to read from the observed site, (*batch, *observation), if not its value.

        Raises:
            ValueError: the run has no such site.
        """
        return self.as_batch(of(observed_node(trace, self)))

    def as_batch(self, values: Tensor) -> Tensor:
        """Flatten values of the observed site, (*batch, *observation), to one batch."""
        return values.reshape(-1, *values.shape[values.dim() - len(self.dims) :])

    def squared_error(self, predicted: Tensor, observed: Tensor) -> Tensor:
        """Compute the squared error of each observation of a batch, (B,)."""
        return (predicted - observed).square().sum(tuple(range(1, observed.dim())))


class AnyImages(ObservationSpace):
    """The space of images of any shape in [0, 1], for programs without a space."""

    site = "image"
    variable = "pixels"
    dims = ("channel", "row", "column")

    def check(self, batch: Tensor) -> None:
        """Raise ValueError, with a remedy, unless `batch` holds images (B, C, H, W) in [0, 1]."""
        _check_form(batch)
        _check_pixels(batch, 0.0, 1.0)

    def example(self, number: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
        """Sample gray images of 8x8 pixels, uniform in [0, 1]."""
        return torch.rand(number, 1, 8, 8, generator=generator, dtype=dtype)


@dataclass(frozen=True)
class ImageSpace(AnyImages):
    """The space of images of one shape, with pixels in a range.

    Attributes:
        shape: (channels, height, width).
        pixel_range: smallest and largest admissible pixel.
        may_miss: True where a pixel may be NaN, which is then a missing pixel.
    """

    shape: tuple[int, int, int]
    pixel_range: tuple[float, float] = (0.0, 1.0)
    may_miss: bool = False

    def example(self, number: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
        """Sample images with uniform pixels, in [0, 1] if the range is unbounded."""
        ends = self.pixel_range
        low, high = ends if all(map(math.isfinite, ends)) else (0.0, 1.0)
        uniform = torch.rand(number, *self.shape, generator=generator, dtype=dtype)
        return low + (high - low) * uniform

    @property
    def fill(self) -> float:
        """The value that replaces a missing pixel: 0, or the end of the range nearest to 0."""
        least, most = self.pixel_range
        return min(max(0.0, least), most)

    def with_missing_pixels(self) -> Self:
        """Return the space in which NaN marks a missing pixel."""
        return replace(self, may_miss=True)

    def check(self, batch: Tensor) -> None:
        """Raise ValueError, with a remedy, unless `batch` is (B, *shape) with pixels in range."""
        _check_form(batch, self.shape)
        pixels = fill_missing(batch, self.fill) if self.may_miss else batch
        _check_pixels(pixels, *self.pixel_range)


def space_of(program: Any) -> ObservationSpace:
    """Return the observation space of a model or guide, by default `AnyImages`.

    An AutoGuide of Pyro has the space of its model, and so has a model within effect handlers.
    """
    if isinstance(program, AutoGuide):
        program = program.model if program._model else None  # pickles of Pyro lack it
    space = getattr(poutine.unwrap(program), "space", None)
    return space if isinstance(space, ObservationSpace) else AnyImages()


def observed_node(trace: Trace, model: Any) -> dict:
    """Return the observed site of a trace; raise ValueError if the model has none.

    Args:
        trace: a trace of the model.
        model: the model, or its space.
    """
    space = model if isinstance(model, ObservationSpace) else space_of(model)
    if (site := space.site) in trace.nodes:
        return trace.nodes[site]
    raise ValueError(
        f"model has no site {site!r}, which its space observes, but {list(scored_sites(trace))}; "
        "rename one of them, or give the model a `space` with another `site`"
    )


def tile_batch(batch: Tensor, count: int) -> Tensor:
    """Return `count` copies of a batch (B, ...), one after the other, (count B, ...)."""
    return batch.repeat(count, *(1,) * (batch.dim() - 1))


def _check_form(images: Any, shape: tuple[int, ...] | None = None) -> None:
    """Raise ValueError unless images are a non-empty floating point batch of this shape."""
    if not isinstance(images, Tensor):
        check_tensor("images", images, "torch.Tensor of shape (B, C, H, W)", _ONE_BATCH)
    if images.dim() != 4:
        other = "; for a program of other data call examine(program, data)" if shape is None else ""
        raise ValueError(
            f"images must have shape (B, C, H, W), not {tuple(images.shape)}; "
            f"add the missing dimensions with images[:, None] or images[None]{other}"
        )
    if images.shape[0] == 0:
        raise ValueError("images is an empty batch; give at least one image")
    if shape is not None and tuple(images.shape[1:]) != tuple(shape):
        last = tuple(images.movedim(-1, 1).shape[1:]) == tuple(shape)
        remedy = "move the channels by images.movedim(-1, 1)" if last else "resize the images"
        if shape[0] == 1 and tuple(images.shape[2:]) == tuple(shape[1:]):
            remedy = "make the images gray by images.mean(1, keepdim=True)"
        raise ValueError(
            f"images must be (B, {', '.join(map(str, shape))}) for this model, not "
            f"{tuple(images.shape)}; {remedy} or build the model with their channels and image size"
        )
    if not images.is_floating_point():
        remedy = "call images.float()" if images.dtype is torch.bool else "divide bytes by 255"
        raise ValueError(f"images must be floating point, not {images.dtype}; {remedy}")
    if images.layout is not torch.strided:
        raise ValueError(f"images must be dense, not {images.layout}; call images.to_dense()")


def _check_pixels(images: Tensor, least: float, most: float) -> None:
    """Raise ValueError unless all pixels are finite and lie in a range; no check in an export."""
    if torch.compiler.is_exporting():  # an exported program has no branch that depends on pixels
        return
    low, high = torch.aminmax(images)  # NaN in either bound means NaN somewhere in the images
    if not torch.isfinite(low + high):
        raise ValueError(
            "images holds NaN or infinite pixels; clean them before use, or, where NaN marks a "
            "missing pixel, use with_missing_pixels() of both model and guide"
        )
    if low < least or high > most:
        span = ", ".join(told_apart(end.item(), least, most) for end in (low, high))
        raise PixelsOutOfRange(
            f"images must lie in [{least:g}, {most:g}], but these span [{span}]; rescale them, or "
            f"clamp rounding, or the noise of a model's draw: images.clamp({least:g}, {most:g})"
        )
