"""Distributions of the matching of points to corners, and of the points given the matching.

A matching is a row of numbers, one for each slot of a scene: -1 where there is no point, 0 for
clutter, and 1, 2, ... for the corners of all objects, in their order.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pyro.distributions as dist
import torch
from pyro.distributions import constraints
from torch import Tensor

from capsule_zoo.models.constellations.scene_distribution import LOG_AREA, SceneDistribution
from capsule_zoo.models.constellations.similarities import nearly_equal

MOST_SYMMETRIES = 1000


class _Scene(constraints.Constraint):
    """The support of scenes of points, in which NaN marks slots without a point."""

    event_dim = 2

    def check(self, value: Tensor) -> Tensor:
        return ~value.isinf().flatten(-2).any(-1)


class _Codes(constraints.Constraint):
    """The support of matchings: whole numbers, -1 or more."""

    event_dim = 1
    is_discrete = True

    def check(self, value: Tensor) -> Tensor:
        return ((value >= -1) & (value == value.round())).all(-1)


def codes_of(
    distribution: SceneDistribution, present: Tensor, objects: Tensor, corners: Tensor
) -> Tensor:
    """Encode matchings (*batch, N) as one number for each slot."""
    first = distribution.first.to(objects.device)
    code = 1 + first[objects.clamp(min=0)] + corners
    code = torch.where(objects >= 0, code, torch.zeros_like(code))
    return torch.where(present, code, torch.full_like(code, -1))


def from_codes(distribution: SceneDistribution, code: Tensor) -> tuple[Tensor, Tensor]:
    """Decode the object and the corner of each slot, (*batch, N) each; -1 if it has none."""
    objects, corners = corner_table(distribution, code.device)
    code = code.long().clamp(min=0)
    return objects[code], corners[code]


def corner_table(
    distribution: SceneDistribution, device: torch.device | None = None
) -> tuple[Tensor, Tensor]:
    """List the object and the corner of each code 0, 1, ..., (1 + corners,); -1 for clutter."""
    objects = [k for k, size in enumerate(distribution.sizes) for _ in range(size)]
    corners = [c for size in distribution.sizes for c in range(size)]
    return (
        torch.tensor([-1, *objects], device=device),
        torch.tensor([-1, *corners], device=device),
    )


class RandomMatching(dist.TorchDistribution):
    """The prior of a matching: each present object has all its corners, in a random order.

    Args:
        distribution: the distribution of the scene.
        presence: presences of the objects, (*batch, objects), 0 or 1.
    """

    arg_constraints: dict[str, Any] = {}
    support = _Codes()

    def __init__(self, distribution: SceneDistribution, presence: Tensor, slots: int) -> None:
        self.distribution = distribution
        self.presence = presence
        self.slots = slots
        super().__init__(presence.shape[:-1], torch.Size([slots]), validate_args=False)

    def expand(self, batch_shape: torch.Size, _instance: Any = None) -> "RandomMatching":
        presence = self.presence.expand(*batch_shape, self.presence.shape[-1])
        return RandomMatching(self.distribution, presence, self.slots)

    @torch.no_grad()
    def sample(self, sample_shape: torch.Size = torch.Size()) -> Tensor:
        """Sample matchings; points fill the first slots, and points that do not fit are dropped."""
        presence = self.presence.expand(*sample_shape, *self.presence.shape)
        owner, clutter = (
            corner_table(self.distribution, presence.device)[0][1:],
            self.distribution.clutter,
        )
        count = torch.randint(clutter + 1, (*presence.shape[:-1], 1), device=presence.device)
        stray = torch.arange(clutter, device=presence.device) < count
        is_present = torch.cat([presence[..., owner] > 0.5, stray], -1)
        code = torch.arange(1, is_present.shape[-1] + 1, device=presence.device)
        code = torch.where(code <= len(owner), code, torch.zeros_like(code)).expand(
            is_present.shape
        )
        code = torch.where(is_present, code, torch.full_like(code, -1))
        place = torch.rand(is_present.shape, device=presence.device).masked_fill(~is_present, 2.0)
        return code.gather(-1, place.argsort(-1))[..., : self.slots]

    def log_prob(self, value: Tensor) -> Tensor:
        """Compute the log probability of matchings given which slots hold a point."""
        owner = corner_table(self.distribution, value.device)[0][1:]
        corners = torch.arange(1, len(owner) + 1, device=value.device)
        held = (value[..., None] == corners).sum(-2)
        right = (held == (self.presence[..., owner] > 0.5)).all(-1)
        number, left = (mask.sum(-1).to(self.presence) for mask in (value >= 0, value == 0))
        right = right & (left <= self.distribution.clutter)
        log = (
            (left + 1.0).lgamma()
            - (number + 1.0).lgamma()
            - math.log(self.distribution.clutter + 1)
        )
        return log.masked_fill(~right, -torch.inf)


class MatchedPoints(dist.TorchDistribution):
    """The distribution of points given their corners: normal about them, uniform for clutter.

    Clutter has the uniform density of the square [-1, 1]^2, wherever it lies.

    Args:
        places: positions of all corners, (*batch, corners, 2).
        scale: standard deviation of the points at each corner, (*batch, corners).
        code: the matching, (*batch, slots).
    """

    arg_constraints: dict[str, Any] = {}
    support = _Scene()

    def __init__(self, places: Tensor, scale: Tensor, code: Tensor) -> None:
        batch = torch.broadcast_shapes(places.shape[:-2], scale.shape[:-1], code.shape[:-1])
        self.places = places.expand(*batch, *places.shape[-2:])
        self.scale = scale.expand(*batch, scale.shape[-1])
        self.code = code.expand(*batch, code.shape[-1])
        super().__init__(batch, torch.Size([code.shape[-1], 2]), validate_args=False)

    def expand(self, batch_shape: torch.Size, _instance: Any = None) -> "MatchedPoints":
        scale = self.scale.expand(*batch_shape, self.scale.shape[-1])
        return MatchedPoints(self.places, scale, self.code)  # the constructor expands all three

    @property
    def _at(self) -> tuple[Tensor, Tensor]:
        """The mean (*batch, slots, 2) and standard deviation (*batch, slots) of every slot."""
        index = (self.code.long() - 1).clamp(min=0)
        mean = self.places.gather(-2, index[..., None].expand(*index.shape, 2))
        return mean, self.scale.gather(-1, index)

    @property
    def mean(self) -> Tensor:
        """The mean of every point: 0 for clutter, NaN where there is no point."""
        mean = self._at[0].masked_fill((self.code == 0)[..., None], 0.0)
        return mean.masked_fill((self.code < 0)[..., None], torch.nan)

    @torch.no_grad()
    def sample(self, sample_shape: torch.Size = torch.Size()) -> Tensor:
        """Sample points; slots without a point are NaN."""
        mean, scale = self._at
        mean = mean.expand(*sample_shape, *mean.shape)
        points = mean + scale[..., None] * torch.randn_like(mean)
        stray = 2 * torch.rand_like(mean) - 1
        points = torch.where((self.code == 0)[..., None], stray, points)
        return points.masked_fill((self.code < 0)[..., None], torch.nan)

    def log_prob(self, value: Tensor) -> Tensor:
        """Compute the log density; -inf if matching and points disagree on empty slots."""
        mean, scale = self._at
        present = ~value.isnan().any(-1)
        away = (value.nan_to_num() - mean).square().sum(-1)
        log = -away / (2 * scale.square()) - 2 * scale.log() - math.log(2 * math.pi)
        log = torch.where(self.code == 0, torch.full_like(log, -LOG_AREA), log)
        log = torch.where(present, log, torch.zeros_like(log))
        return log.sum(-1).masked_fill((present != (self.code >= 0)).any(-1), -torch.inf)


class FunctionMatchings(dist.TorchDistribution):
    """A distribution of matchings, defined by a sampling function and a log probability.

    Args:
        points: the scenes, (batch, slots, 2).
        draw: from a number of draws d, matchings (d, batch, slots).
        log_probability: from matchings (*draws, batch, slots), (*draws, batch).
    """

    arg_constraints: dict[str, Any] = {}
    support = _Codes()

    def __init__(
        self,
        points: Tensor,
        draw: Callable[[int], Tensor],
        log_probability: Callable[[Tensor], Tensor],
    ) -> None:
        self._draw = draw
        self._log_probability = log_probability
        super().__init__(points.shape[:-2], points.shape[-2:-1], validate_args=False)

    @torch.no_grad()
    def sample(self, sample_shape: torch.Size = torch.Size()) -> Tensor:
        """Sample matchings by the given function."""
        shape = self.shape(sample_shape)
        return self._draw(math.prod(shape[:-2])).reshape(shape)

    def log_prob(self, value: Tensor) -> Tensor:
        """Compute the log probability of matchings by the given function."""
        return self._log_probability(value)


def symmetries(distribution: SceneDistribution) -> Tensor:
    """Return the near symmetries: maps of codes that nearly keep the density, (maps, codes).

    They rotate templates nearly into themselves, and exchange objects with nearly equal templates.
    The codes are 0, 1, ... and, last, -1. Only the identity is returned where there are more than
    1,000 maps.
    """
    exchanges = [
        order
        for order in itertools.permutations(range(len(distribution.templates)))
        if all(
            map(nearly_equal, distribution.templates, (distribution.templates[k] for k in order))
        )
    ]
    rotations = [template.near_rotations.tolist() for template in distribution.templates]
    number = len(exchanges) * math.prod(map(len, rotations))
    if number > MOST_SYMMETRIES:
        exchanges, rotations = exchanges[:1], [rotation[:1] for rotation in rotations]
    first, maps = distribution.first.tolist(), []
    for exchange, cycles in itertools.product(exchanges, itertools.product(*rotations)):
        codes = [1 + first[exchange[k]] + c for k, cycle in enumerate(cycles) for c in cycle]
        maps.append([0, *codes, -1])
    return torch.tensor(maps)
