"""Poses of objects whose places are a Poisson process in the plane."""

import math
from typing import Any

import torch
from pyro.distributions import TorchDistribution, constraints
from torch import Tensor
from torch.special import log_ndtr


class UniformPlaces(TorchDistribution):
    """The distribution of poses (log size, x, y and perhaps an angle) of objects on a picture.

        x, y       = Uniform(-1, 1) + Normal(0, edge)
        log size   ~ Normal(mean, standard deviation), and likewise the angle

    Objects that the border cuts have places about it, inside and outside. The density telescopes:
    with a Poisson number of objects, the objects of two pictures side by side are those of the
    picture that both are cut from.

    Args:
        mean, scale: of the log size and the angle, (3,) or (4,); those of x and y are not used.
        edge: standard deviation of the normal term of x and y, (2,), in half canvases.
    """

    arg_constraints: dict = {}
    support = constraints.real_vector
    has_rsample = True

    def __init__(self, mean: Tensor, scale: Tensor, edge: Tensor) -> None:
        self.center, self.scale, self.edge = mean, scale, edge
        super().__init__(torch.Size(), mean.shape, validate_args=False)

    def expand(self, batch_shape: Any, _instance: Any = None) -> "UniformPlaces":
        new = UniformPlaces(self.center, self.scale, self.edge)
        new._batch_shape = torch.Size(batch_shape)
        return new

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        shape = (*sample_shape, *self.batch_shape)
        noise = torch.randn(
            *shape, len(self.center), dtype=self.center.dtype, device=self.center.device
        )
        pose = self.center + self.scale * noise
        place = 2 * torch.rand_like(noise[..., 1:3]) - 1 + self.edge * noise[..., 1:3]
        return torch.cat([pose[..., :1], place, pose[..., 3:]], -1)

    @property
    def mean(self) -> Tensor:
        inside = self.center.new_zeros(2)
        mean = torch.cat([self.center[:1], inside, self.center[3:]])
        return mean.expand(*self.batch_shape, *self.event_shape)

    def log_prob(self, value: Tensor) -> Tensor:
        error = (value - self.center) / self.scale
        log_density = -0.5 * error.square() - self.scale.log() - 0.5 * math.log(math.tau)
        place = value[..., 1:3].abs()
        near, far = log_ndtr((1 - place) / self.edge), log_ndtr(-(1 + place) / self.edge)
        log_place = near + (-(far - near).exp()).log1p() - math.log(2)
        total = log_density[..., 0] + log_place.sum(-1) + log_density[..., 3:].sum(-1)
        return total.expand(torch.broadcast_shapes(total.shape, self.batch_shape))
