"""The observation space of scenes of points in the plane, some of which may be absent."""

from dataclasses import dataclass

import torch
from torch import Tensor

from capsule_zoo.models.checks import check_tensor
from capsule_zoo.models.common.spaces import ObservationSpace

FEWEST = 2  # least points of a scene: two points fix a similarity


@dataclass(frozen=True)
class PointSpace(ObservationSpace):
    """The space of scenes of at most `most` points, (B, N, 2); NaN marks an absent point.

    Attributes:
        most: the largest number of points of a scene.
    """

    most: int

    site = "points"
    variable = "points"
    dims = ("point", "axis")

    def check(self, batch: Tensor) -> None:
        """Raise ValueError, with a remedy, unless `batch` holds scenes of two points or more."""
        check_tensor("points", batch, "torch.Tensor of shape (B, N, 2)", "give one batch")
        if batch.dim() != 3 or batch.shape[-1] != 2:
            one = batch.dim() == 2 and batch.shape[-1] == 2
            remedy = (
                "add the missing dimension with points[None]"
                if one
                else "the model explains points of the plane, neither images nor points in 3-D"
            )
            raise ValueError(
                f"points must have shape (B, N, 2), not {tuple(batch.shape)}; {remedy}"
            )
        if not len(batch):
            raise ValueError("points is an empty batch; give at least one scene")
        if not batch.is_floating_point():
            raise ValueError(f"points must be floating point, not {batch.dtype}; use .float()")
        absent = batch.isnan()
        if batch.isinf().any() or (absent[..., 0] != absent[..., 1]).any():
            raise ValueError(
                "points holds infinite coordinates, or a point of which one coordinate only is "
                "NaN; a point that is absent is NaN in both"
            )
        number = (~absent[..., 0]).sum(1)
        if number.max() > self.most:
            raise ValueError(
                f"points holds a scene of {int(number.max())} points, but the model explains at "
                f"most {self.most}; give it more clutter or more objects"
            )
        if number.min() < FEWEST:
            raise ValueError(
                f"points holds a scene of {int(number.min())} points; fewer than two points say "
                "nothing of an object's scale and angle: leave such scenes out"
            )

    def example(self, number: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
        """Sample scenes of as many points as possible, uniform in the square [-1, 1]^2."""
        return 2 * torch.rand(number, self.most, 2, generator=generator, dtype=dtype) - 1

    def squared_error(self, predicted: Tensor, observed: Tensor) -> Tensor:
        """Compute the squared error of each scene, (B,), summed over the points present."""
        return (predicted - observed).square().nansum((1, 2))
