"""Families of transformations that can be requested of a model, each with its own parameters.

A request describes the transformation of an image, such as a turn in degrees or a shift in pixels.
Its parameters (B, n) are in these units. The model gets them as numbers (B, 2) that suit a network,
and the numbers of the identity are `identity`. The inverse of a request has the negative
parameters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from capsule_zoo.data.transforms import motion, warp_images


class Requests(ABC):
    """A family of transformations.

    Attributes:
        identity: the numbers of the request that leaves an image unchanged.
        parameters: number of parameters of a request.
    """

    identity: ClassVar[tuple[float, float]]
    parameters: ClassVar[int]

    @abstractmethod
    def numbers(self, parameters: Tensor) -> Tensor:
        """Compute the numbers (B, 2) that the model is given from parameters (B, n)."""

    @abstractmethod
    def motions(self, parameters: Tensor) -> Tensor:
        """Return the requests as affine matrices (B, 2, 3); see `capsule_zoo.data.transforms`."""

    def draw(self, low: Tensor, high: Tensor) -> Tensor:
        """Draw requests (B, n), every parameter uniform from `low` to `high`, (B,) each."""
        low, high = low[:, None], high[:, None]
        uniform = torch.rand(len(low), self.parameters, dtype=low.dtype, device=low.device)
        return low + (high - low) * uniform

    def move(self, images: Tensor, parameters: Tensor) -> Tensor:
        """Transform images (B, C, H, W) in [0, 1] as requested: bilinear, zero outside."""
        return warp_images(images, self.motions(parameters)).clamp(0, 1)


@dataclass(frozen=True)
class Rotations(Requests):
    """The rotations about the center, by an angle in degrees, counter-clockwise as seen."""

    identity = (1.0, 0.0)
    parameters = 1

    def numbers(self, parameters: Tensor) -> Tensor:
        angle = parameters[:, 0].deg2rad()
        return torch.stack([angle.cos(), angle.sin()], -1)

    def motions(self, parameters: Tensor) -> Tensor:
        return motion(parameters[:, 0])


@dataclass(frozen=True)
class Shifts(Requests):
    """The shifts, whose parameters are pixels to the right and down.

    Attributes:
        reach: the number of pixels that the model gets as 1.
    """

    reach: float = 20.0
    identity = (0.0, 0.0)
    parameters = 2

    def numbers(self, parameters: Tensor) -> Tensor:
        return parameters / self.reach

    def motions(self, parameters: Tensor) -> Tensor:
        x, y = parameters.unbind(-1)
        return motion(torch.zeros_like(x), shift=(x, y))

    def draw(self, low: Tensor, high: Tensor) -> Tensor:
        """Draw whole pixels, uniform in [low, high)."""
        return super().draw(low, high).floor()
