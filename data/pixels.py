"""Transforms of pixel values: random binary images and standard scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True)
class Binarize:
    """The transform that draws each pixel from Bernoulli(pixel) each time an image is seen.

    `Dataset.binarized` draws only once instead.
    """

    def __call__(self, images: Tensor, *, generator: torch.Generator) -> Tensor:
        uniform = torch.rand(images.shape, generator=generator)
        return (uniform.to(images.device) < images).to(images.dtype)


@dataclass(frozen=True)
class Standardize:
    """The transform that subtracts a mean from pixels and divides by a scale.

    It is suited to units of real values.

    Attributes:
        mean, scale: numbers, the same for all pixels, so that an image stays an image.
    """

    mean: float
    scale: float

    def __post_init__(self) -> None:
        if not self.scale > 0:
            raise ValueError(f"scale must be positive, not {self.scale!r}; are all pixels alike?")

    @classmethod
    def of(cls, images: Tensor) -> Self:
        """Return the transform to mean 0 and variance 1 over all pixels of these images."""
        return cls(images.mean().item(), images.std(correction=0).item())

    def __call__(self, images: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        return (images - self.mean) / self.scale

    def inverse(self, images: Tensor) -> Tensor:
        """Return the pixels whose standard scores are `images`."""
        return images * self.scale + self.mean
