"""Transforms of pixel values: binary images drawn anew, and standard scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True)
class Binarize:
    """Each pixel drawn from Bernoulli(pixel), anew whenever the image is seen.

    `Dataset.binarized` draws once and for all instead.
    """

    def __call__(self, images: Tensor, *, generator: torch.Generator) -> Tensor:
        uniform = torch.rand(images.shape, generator=generator)
        return (uniform.to(images.device) < images).to(images.dtype)


@dataclass(frozen=True)
class Standardize:
    """Pixels less a mean, over a scale: as units of real values want them.

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
        """To mean 0 and variance 1 over all pixels of these images."""
        return cls(images.mean().item(), images.std(correction=0).item())

    def __call__(self, images: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        return (images - self.mean) / self.scale

    def inverse(self, images: Tensor) -> Tensor:
        """The pixels of which `images` are the standard scores."""
        return images * self.scale + self.mean
