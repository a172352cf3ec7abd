"""Families of transformations that a model can be asked for, each with parameters of its own.

A request says how an image is wanted: turned by so many degrees, moved by so many pixels. Its
parameters (B, n) are in these units; the model is told them as numbers (B, 2) that a network can
take, and the identity among them is `identity`. The inverse of a request has the negative
parameters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from capsule_zoo.data.transforms import motion, warp


class Requests(ABC):
    """A family of transformations.

    Attributes:
        identity: the numbers of the request to leave an image as it is.
        parameters: how many parameters a request has.
    """

    identity: ClassVar[tuple[float, float]]
    parameters: ClassVar[int]

    @abstractmethod
    def numbers(self, parameters: Tensor) -> Tensor:
        """What the model is told, (B, 2), of parameters (B, n)."""

    @abstractmethod
    def motions(self, parameters: Tensor) -> Tensor:
        """The requests as affine matrices (B, 2, 3); see `capsule_zoo.data.transforms`."""

    def draw(self, low: Tensor, high: Tensor) -> Tensor:
        """Requests (B, n), every parameter uniform from `low` to `high`, (B,) each."""
        low, high = low[:, None], high[:, None]
        uniform = torch.rand(len(low), self.parameters, dtype=low.dtype, device=low.device)
        return low + (high - low) * uniform

    def move(self, images: Tensor, parameters: Tensor) -> Tensor:
        """Images (B, C, H, W) in [0, 1] as requested: bilinear, zero outside."""
        return warp(images, self.motions(parameters)).clamp(0, 1)


@dataclass(frozen=True)
class Rotations(Requests):
    """Turns about the centre; the parameter is the angle in degrees, counter-clockwise as seen."""

    identity = (1.0, 0.0)
    parameters = 1

    def numbers(self, parameters: Tensor) -> Tensor:
        angle = parameters[:, 0].deg2rad()
        return torch.stack([angle.cos(), angle.sin()], -1)

    def motions(self, parameters: Tensor) -> Tensor:
        return motion(parameters[:, 0])


@dataclass(frozen=True)
class Shifts(Requests):
    """Shifts; the parameters are pixels to the right and down.

    Attributes:
        reach: pixels that the model is told as 1.
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
        """Whole pixels, uniform in [low, high)."""
        return super().draw(low, high).floor()
