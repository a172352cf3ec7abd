"""The distribution of a layer's parents, beliefs about them, and the free energy of a routing.

The layer is the mixture of switchable Gaussians of `capsule_zoo.models.switchable_gaussians`, where
the free energy stands. `Routing` is the base of the procedures that infer its parents; the
procedures themselves are in `capsule_zoo.guides.routing`.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Self, TypeVar

import pyro
import torch
import torch.nn.functional as F
from pyro.nn import PyroModule
from torch import Tensor, nn

from capsule_zoo.data.registration import Settings
from capsule_zoo.models.checks import check_whole
from capsule_zoo.models.common.remembering import Remembering, note_changes
from capsule_zoo.models.routing.votes import Votes

VOTE_NOISE = 0.02
M = TypeVar("M", bound=nn.Module)


class ParentDistribution(NamedTuple):
    """The prior of a layer's parents, before any vote.

    Attributes:
        beta_a: log-odds that a parent is present, in nats, (parents,).
        beta_u: log density of the vote of a child whose parent is absent, in nats, (parents,).
        inverse_temperature: lambda, the inverse temperature of the parents' presences.
        noise: variance of a vote's own noise.
        connections: learned connections of the layer's routing, (numbers, parents, children); see
            `Routing.connections`. None where nothing is learned.
    """

    beta_a: Tensor
    beta_u: Tensor
    inverse_temperature: float = 1.0
    noise: float = VOTE_NOISE
    connections: Tensor | None = None


class Belief(NamedTuple):
    """The belief of a routing about the parents after some iterations.

    Attributes:
        responsibility: R, the part of each child that each parent claims,
            (N, positions, parents, children).
        mean, variance: mean and variance of the parents' votes, (N, positions, parents, D).
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
    """Convert the paper's beta_u, a cost for each of `size` numbers of a pose, to nats per vote.

    The paper's a = sigmoid(lambda [beta_a - sum_d (beta_u + ln sigma_d) n]) leaves the entropy of
    the standard normal out of both terms.
    """
    return size * (beta_u - 0.5 * math.log(2 * math.pi * math.e))


def vote_log_density(votes: Votes, mean: Tensor, variance: Tensor, noise: float) -> Tensor:
    """Compute the log density ln N_ij of each vote, (N, positions, parents, children)."""
    constant = ((2 * math.pi * variance).log() + noise / variance).sum(3, keepdim=True)
    return -0.5 * (votes.distance(mean, 1 / variance) + constant)


def parent_logits(count: Tensor, variance: Tensor, distribution: ParentDistribution) -> Tensor:
    """Compute presence logits lambda [beta_a + sum_i w_i R_ij (ln N_ij - beta_u)] of parents.

    Args:
        count: n_j, (..., parents, 1).
        variance: the variance of the votes, their noise included, (..., parents, D).
    """
    claimed = -0.5 * (2 * math.pi * math.e * variance).log().sum(-1)
    return distribution.inverse_temperature * (
        distribution.beta_a + count[..., 0] * (claimed - distribution.beta_u)
    )


def free_energy(votes: Votes, belief: Belief, distribution: ParentDistribution) -> Tensor:
    """Compute the free energy F of a belief at the prior's temperature, in nats, (N,)."""
    present = belief.presence
    parent_presence = present[..., None]
    density = vote_log_density(votes, belief.mean, belief.variance, distribution.noise)
    density = parent_presence * density + (1 - parent_presence) * distribution.beta_u[:, None]
    claimed = belief.responsibility * (density + votes.uniform().log())
    claimed = votes.presence * (claimed - torch.xlogy(belief.responsibility, belief.responsibility))
    entropy = F.softplus(belief.logits) - present * belief.logits
    parent_terms = (
        present * distribution.beta_a
        - F.softplus(distribution.beta_a)
        + entropy / distribution.inverse_temperature
    )
    return -claimed.sum((1, 2, 3)) - parent_terms.sum((1, 2))


def best_belief(votes: Votes, responsibility: Tensor, distribution: ParentDistribution) -> Belief:
    """Compute the parents that minimize the free energy, given responsibilities."""
    gathered = votes.gather(responsibility)
    variance = gathered.variance + distribution.noise
    logits = parent_logits(gathered.number, variance, distribution)
    return Belief(responsibility, gathered.mean, variance, logits)


@dataclass(frozen=True)
class Routing(Settings):
    """The base class of routings.

    Attributes:
        iterations: number of times that the parents are inferred.

    Raises:
        ValueError: `iterations` below 1.
    """

    iterations: int = 3

    def __post_init__(self) -> None:
        check_whole(1, iterations=self.iterations)

    def __call__(self, votes: Votes, distribution: ParentDistribution) -> Belief:
        """Return the belief after the last iteration."""
        return self._iterations(votes, distribution)[-1]

    def _iterations(self, votes: Votes, distribution: ParentDistribution) -> list[Belief]:
        history = list(self.beliefs(votes, distribution))
        if not history or not all(isinstance(belief, Belief) for belief in history):
            raise ValueError(f"beliefs of {type(self).__name__} must yield a Belief, at least once")
        return history

    def parents(self, votes: Votes, distribution: ParentDistribution) -> tuple[Tensor, Tensor]:
        """Return the parents' mean and presence logits of the last belief."""
        belief = self(votes, distribution)
        return belief.mean, belief.logits

    def beliefs(self, votes: Votes, distribution: ParentDistribution) -> Iterator[Belief]:
        """Yield the belief after each iteration; the first starts at equal responsibilities."""
        raise NotImplementedError(f"{type(self).__name__} must write beliefs")

    def connections(self, children: int, parents: int, size: int) -> Tensor | None:
        """Return the initial connections of a layer, or None for a routing without weights.

        Args:
            children: children that a parent sees.
            size: numbers of a vote.

        Returns:
            Some numbers for each connection, (numbers, parents, children).
        """
        return None

    def draw_connections(self, connections: Tensor) -> Tensor:
        """Return the connections for one training step; in some routings a random sample."""
        return connections

    def cost(self, connections: Tensor) -> Tensor | None:
        """Return the cost of the connections, in nats per image, or None if they have none."""
        return None

    def free_energies(self, votes: Votes, distribution: ParentDistribution) -> Tensor:
        """Compute the free energy after each iteration, in nats, (iterations, N).

        Means, variances and presences are those that minimize it at the routing's responsibilities.

        Raises:
            ValueError: a responsibility that is no fraction of a child.
        """
        fractions = [belief.responsibility for belief in self._iterations(votes, distribution)]
        if not all(((fraction >= 0) & (fraction <= 1.001)).all() for fraction in fractions):
            raise ValueError(
                f"responsibilities of {type(self).__name__} must lie in [0, 1], the fractions of a "
                "child; votes.compete(scores) makes them of any scores"
            )
        return torch.stack(
            [
                free_energy(votes, best_belief(votes, r, distribution), distribution)
                for r in fractions
            ]
        )


class Routed(PyroModule):
    """The base class of modules that infer parents by a routing and own its connections.

    Attributes:
        routing: infers the parents.
        connections: learned connections, (numbers, parents, children), or None.
    """

    routing: Routing
    connections: nn.Parameter | None

    def route_by(self, routing: Routing, children: int, parents: int, size: int) -> None:
        """Set the routing, with its initial connections; see `Routing.connections`."""
        if not isinstance(routing, Routing):
            raise ValueError(f"routing must be a Routing such as EMRouting(3), not {routing!r}")
        self.routing = routing
        self._connected = (children, parents, size)
        first = routing.connections(*self._connected)
        self.connections = None if first is None else nn.Parameter(first)

    def with_routing(self, routing: Routing) -> Self:
        """Return a module with shared parameters and another routing.

        A routing of equal class keeps the learned connections; another class gets initial ones.
        """
        twin = sharing(self)
        if isinstance(twin, Remembering):
            note_changes(twin, {"routing": routing})
        if type(routing) is type(self.routing):
            twin.routing = routing
            return twin
        twin._parameters.pop("connections", None)
        twin.route_by(routing, *self._connected)
        if twin.connections is not None:
            twin.connections.data = twin.connections.data.to(next(iter(self.parameters())))
        return twin

    def routing_connections(self) -> Tensor | None:
        """Return the connections for the routing: sampled in training, otherwise unchanged."""
        if self.connections is None or not self.training:
            return self.connections
        return self.routing.draw_connections(self.connections)


def sharing(module: M, **parts: nn.Module) -> M:
    """Return a module with shared parameters (not copies) and some parts replaced."""
    twin = module.__class__.__new__(module.__class__)
    twin.__dict__.update(module.__dict__)
    twin._modules = {**module._modules, **parts}
    twin._parameters = dict(module._parameters)
    return twin


def pay_for_connections(modules: Iterable[nn.Module], sign: float) -> None:
    """Add the cost of all connections to the log density, times 1 in a guide, -1 in a model."""
    routed = (module for module in modules if isinstance(module, Routed))
    costs = [m.routing.cost(m.connections) for m in routed if m.connections is not None]
    if costs := [cost for cost in costs if cost is not None]:
        with costs[0].device:  # `pyro.factor` moves its number to torch's default device
            pyro.factor("connections", sign * torch.stack(costs).sum(), has_rsample=True)
