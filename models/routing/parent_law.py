"""The law of a layer's parents, beliefs about them, and the free energy that a routing lowers.

The layer is the mixture of switchable Gaussians of `capsule_zoo.models.switchable_gaussians`, where
the free energy stands. `Routing` is the base of the procedures that infer its parents; the
procedures themselves are in `capsule_zoo.guides.routing`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from capsule_zoo.models.checks import check_at_least
from capsule_zoo.models.routing.votes import Votes

VOTE_NOISE = 0.02


class ParentLaw(NamedTuple):
    """The prior of a layer's parents, before any vote is seen.

    Attributes:
        beta_a: log-odds that a parent is present, in nats, (parents,).
        beta_u: log density of the vote of a child whose parent is absent, in nats, (parents,).
        inverse_temperature: lambda, the inverse temperature of the parents' presences.
        noise: variance of a vote's own noise.
    """

    beta_a: Tensor
    beta_u: Tensor
    inverse_temperature: float = 1.0
    noise: float = VOTE_NOISE


class Belief(NamedTuple):
    """The belief of a routing about the parents after some iterations.

    Attributes:
        responsibility: R, the part of each child that each parent claims,
            (N, positions, parents, children).
        mean, variance: of the parents' votes, (N, positions, parents, D).
        logits: log-odds of the parents' presences, (N, positions, parents).
    """

    responsibility: Tensor
    mean: Tensor
    variance: Tensor
    logits: Tensor

    @property
    def presence(self) -> Tensor:
        """The presences a of the parents, (N, positions, parents)."""
        return self.logits.sigmoid()


def unclaimed_log_density(beta_u: Tensor, size: int) -> Tensor:
    """Compute beta_u in nats from the paper's beta_u, a cost for each of `size` numbers of a pose.

    The paper's a = sigmoid(lambda [beta_a - sum_d (beta_u + ln sigma_d) n]) leaves the entropy of
    the standard normal out of both terms.
    """
    return size * (beta_u - 0.5 * math.log(2 * math.pi * math.e))


def vote_log_density(votes: Votes, mean: Tensor, variance: Tensor, noise: float) -> Tensor:
    """Compute ln N_ij, (N, positions, parents, children)."""
    constant = ((2 * math.pi * variance).log() + noise / variance).sum(3, keepdim=True)
    return -0.5 * (votes.distance(mean, 1 / variance) + constant)


def parent_logits(count: Tensor, variance: Tensor, law: ParentLaw) -> Tensor:
    """Compute lambda [beta_a + sum_i w_i R_ij (ln N_ij - beta_u)] at the best Gaussians.

    Args:
        count: n_j, (..., parents, 1).
        variance: the variance of the votes, their noise included, (..., parents, D).
    """
    claimed = -0.5 * (2 * math.pi * math.e * variance).log().sum(-1)
    return law.inverse_temperature * (law.beta_a + count[..., 0] * (claimed - law.beta_u))


def free_energy(votes: Votes, belief: Belief, law: ParentLaw) -> Tensor:
    """Compute the free energy F of a belief at the law's temperature, in nats, (N,)."""
    present = belief.presence
    there = present[..., None]
    density = vote_log_density(votes, belief.mean, belief.variance, law.noise)
    density = there * density + (1 - there) * law.beta_u[:, None]
    claimed = belief.responsibility * (density + votes.uniform().log())
    claimed = votes.presence * (claimed - torch.xlogy(belief.responsibility, belief.responsibility))
    entropy = F.softplus(belief.logits) - present * belief.logits
    own = present * law.beta_a - F.softplus(law.beta_a) + entropy / law.inverse_temperature
    return -claimed.sum((1, 2, 3)) - own.sum((1, 2))


def best_belief(votes: Votes, responsibility: Tensor, law: ParentLaw) -> Belief:
    """Compute the Gaussians and presences that minimize the free energy, given responsibilities."""
    gathered = votes.gather(responsibility)
    variance = gathered.variance + law.noise
    logits = parent_logits(gathered.number, variance, law)
    return Belief(responsibility, gathered.mean, variance, logits)


@dataclass(frozen=True)
class Routing:
    """The base of the routings.

    Attributes:
        iterations: number of times that the parents are inferred.

    Raises:
        ValueError: `iterations` below 1.
    """

    iterations: int = 3

    def __post_init__(self) -> None:
        check_at_least(1, iterations=self.iterations)

    def __call__(self, votes: Votes, law: ParentLaw) -> Belief:
        """Return the belief after the last iteration."""
        *_, last = self.beliefs(votes, law)
        return last

    def parents(self, votes: Votes, law: ParentLaw) -> tuple[Tensor, Tensor]:
        """Return the mean and the logits of the last belief, which are all that a layer needs."""
        belief = self(votes, law)
        return belief.mean, belief.logits

    def beliefs(self, votes: Votes, law: ParentLaw) -> Iterator[Belief]:
        """Yield the belief after each iteration; the first starts at equal responsibilities."""
        raise NotImplementedError

    def free_energies(self, votes: Votes, law: ParentLaw) -> Tensor:
        """Compute the free energy after each iteration, in nats, (iterations, N).

        Means, variances and presences are those that minimize it at the routing's responsibilities.
        """
        beliefs = (
            best_belief(votes, belief.responsibility, law) for belief in self.beliefs(votes, law)
        )
        return torch.stack([free_energy(votes, belief, law) for belief in beliefs])
