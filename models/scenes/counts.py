"""Presences of a scene's slots: their prior, and lists of subsets."""

import itertools
import math
from typing import Any

import pyro.distributions as dist
import torch
from pyro.distributions import constraints
from torch import Tensor


def subsets_of(slots: int, like: Tensor, most: int | None = None) -> Tensor:
    """List all subsets of `slots` slots as presences, (2^S, S), ordered by size.

    Args:
        like: a tensor of the precision and on the device of the result.
        most: the largest number of objects; by default S.
    """
    numbers = range(1 + (slots if most is None else min(most, slots)))
    subsets = [c for n in numbers for c in reversed([*itertools.combinations(range(slots), n)])]
    return like.new_tensor([[float(slot in c) for slot in range(slots)] for c in subsets])


def prefixes_of(slots: int, like: Tensor) -> Tensor:
    """List presences of the first n of `slots` slots, and of these without one slot.

    Args:
        like: see `subsets_of`.
    """
    whole = like.new_ones(slots + 1, slots).tril(-1)
    without = [row * (1 - one) for row in whole for one in like.new_ones(slots).diag()]
    return torch.stack([*whole, *without]).unique(dim=0)


def upto(number: int, like: Tensor) -> Tensor:
    """Return 0, 1, ..., number - 1 in the dtype and on the device of a tensor, (number,)."""
    return torch.arange(number, dtype=like.dtype, device=like.device)


def log_binomials(slots: int, like: Tensor) -> Tensor:
    """Return the log binomial coefficients of 0 to `slots` out of `slots`, (S + 1,)."""
    number = upto(slots + 1, like)
    return math.lgamma(slots + 1) - (number + 1).lgamma() - (slots - number + 1).lgamma()


class CountDistribution(dist.TorchDistribution):
    """The distribution of the presences of S slots, given the distribution of their number.

    All sets of one size are equally likely.

    Args:
        log_counts: normalized log probabilities of 0 to S objects, (*batch, S + 1).
    """

    arg_constraints = {"log_counts": constraints.real_vector}
    support = constraints.independent(constraints.boolean, 1)
    has_enumerate_support = True

    def __init__(self, log_counts: Tensor, validate_args: bool | None = None) -> None:
        self.log_counts = log_counts
        slots = log_counts.shape[-1] - 1
        super().__init__(log_counts.shape[:-1], torch.Size([slots]), validate_args=validate_args)

    def expand(self, batch_shape: Any, _instance: Any = None) -> "CountDistribution":
        shape = torch.Size(batch_shape)
        return CountDistribution(self.log_counts.expand(*shape, -1), validate_args=False)

    @property
    def mean(self) -> Tensor:
        number = upto(self.log_counts.shape[-1], self.log_counts)
        expected = (self.log_counts.exp() * number).sum(-1, keepdim=True)
        return (expected / self.event_shape[0]).expand(*self.batch_shape, *self.event_shape)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        shape = torch.Size(sample_shape) + self.batch_shape
        with torch.no_grad():
            counts = torch.distributions.Categorical(logits=self.log_counts).sample(sample_shape)
            rank = torch.rand(*shape, *self.event_shape).to(self.log_counts).argsort(-1).argsort(-1)
            return (rank < counts[..., None]).to(self.log_counts)

    def log_prob(self, value: Tensor) -> Tensor:
        slots = self.event_shape[0]
        count = value.sum(-1).round().long()
        shape = torch.broadcast_shapes(count.shape, self.batch_shape)
        log_probs = (self.log_counts - log_binomials(slots, value)).expand(*shape, -1)
        return log_probs.gather(-1, count.expand(shape)[..., None])[..., 0]

    def enumerate_support(self, expand: bool = True) -> Tensor:
        values = subsets_of(self.event_shape[0], self.log_counts)
        values = values.reshape(-1, *(1,) * len(self.batch_shape), *self.event_shape)
        return values.expand(-1, *self.batch_shape, -1) if expand else values
