"""Routing: which parents are there, and where, given the votes of their children.

Three routings infer the same mixture (`capsule_zoo.models.switchable_gaussians`) in three ways:

    EMRouting       R, then mu and sigma2, then a, each at its optimum: EM with switches
    VBRouting       R, then Dirichlet and Normal-Gamma posteriors: variational Bayes
    DynamicRouting  R, then v = squash(sum_i w_i R_ij V_ij / n), agreement V_ij . v_j

Each is called as `routing(votes, law)` and is an argument of every capsule layer. `beliefs` gives
what it believes after each iteration and `free_energies` what that is worth, in nats, with the
Gaussians and switches that fit its shares best, so that routings can be compared on the same votes.

>>> EMRouting(3).free_energies(Votes.dense(values), layer.law())             # (3, N)

References:
    Hinton, Sabour & Frosst 2018, "Matrix capsules with EM routing", procedure 1.
    De Sousa Ribeiro, Leontidis & Kollias 2020, "Capsule Routing via Variational Bayes"
    (arXiv 1905.11455). Priors are diagonal here, one Gamma for each number of the pose, for which
    the updates are exact; a parent's switch is the one that EM uses, in expectation.
    Sabour, Frosst & Hinton 2017, "Dynamic Routing Between Capsules" (arXiv 1710.09829): its
    procedure 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import pyro
import pyro.distributions as dist
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import kl_divergence

from capsule_zoo.guides.base import Guide
from capsule_zoo.models.blocks.vector_capsules import squash
from capsule_zoo.models.blocks.votes import Gathered, Votes
from capsule_zoo.models.checks import check_at_least, check_one_of, check_positive
from capsule_zoo.models.switchable_gaussians import (
    Belief,
    ParentLaw,
    SwitchableGaussians,
    free_energy,
    parent_logits,
    vote_log_density,
)

_TINY = 1e-12


@dataclass(frozen=True)
class Routing:
    """Base of the routings.

    Attributes:
        iterations: how often the parents are inferred.

    Raises:
        ValueError: `iterations` below 1.
    """

    iterations: int = 3

    def __post_init__(self) -> None:
        check_at_least(1, iterations=self.iterations)

    def __call__(self, votes: Votes, law: ParentLaw) -> Belief:
        """What is believed in the end."""
        *_, last = self.beliefs(votes, law)
        return last

    def beliefs(self, votes: Votes, law: ParentLaw) -> Iterator[Belief]:
        """What is believed after each iteration; the first one starts at equal shares."""
        raise NotImplementedError

    def free_energies(self, votes: Votes, law: ParentLaw) -> Tensor:
        """Free energy after each iteration, in nats, (iterations, N).

        Means, variances and presences are those that minimise it at the routing's shares.
        """
        beliefs = (best_belief(votes, belief.share, law) for belief in self.beliefs(votes, law))
        return torch.stack([free_energy(votes, belief, law) for belief in beliefs])


@dataclass(frozen=True)
class AnnealedRouting(Routing):
    """Base of the routings at a temperature, which falls from one iteration to the next.

    Attributes:
        iterations: as for every routing.
        anneal: in iteration t = 0, 1, ... a parent's inverse temperature is that of its law times
            1 - anneal^(t + 1); 0 holds it constant.

    Raises:
        ValueError: `anneal` outside [0, 1).
    """

    anneal: float = 0.95

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.anneal < 1:
            raise ValueError(f"anneal must lie in [0, 1), not {self.anneal!r}")

    def _cooled(self, law: ParentLaw, iteration: int) -> ParentLaw:
        factor = 1 - self.anneal ** (iteration + 1)
        return law._replace(inverse_temperature=law.inverse_temperature * factor)


def best_belief(votes: Votes, share: Tensor, law: ParentLaw) -> Belief:
    """The M step: Gaussians and presences that minimise the free energy at given shares."""
    gathered = votes.gather(share)
    variance = gathered.variance + law.noise
    logits = parent_logits(gathered.number, variance, law)
    return Belief(share, gathered.mean, variance, logits)


@dataclass(frozen=True)
class EMRouting(AnnealedRouting):
    """EM routing.

    Attributes:
        iterations, anneal: as for every annealed routing.
        e_step: "paper", R ~ a N, or "exact", R ~ exp(a ln N + (1 - a) beta_u), which minimises
            the free energy, so that it never rises (at `anneal=0`). At an inverse temperature near
            1 the exact one is content with all parents off.

    Raises:
        ValueError: an unknown `e_step`.
    """

    e_step: str = "paper"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_of("e_step", self.e_step, ("paper", "exact"))

    def beliefs(self, votes: Votes, law: ParentLaw) -> Iterator[Belief]:
        share = votes.uniform()
        for iteration in range(self.iterations):
            belief = best_belief(votes, share, self._cooled(law, iteration))
            yield belief
            if iteration + 1 < self.iterations:
                share = self.shares(votes, belief, law)

    def shares(self, votes: Votes, belief: Belief, law: ParentLaw) -> Tensor:
        """The E step."""
        density = vote_log_density(votes, belief.mean, belief.variance, law.noise)
        if self.e_step == "paper":
            return votes.compete(density + F.logsigmoid(belief.logits)[..., None])
        there = belief.presence[..., None]
        return votes.compete(there * density + (1 - there) * law.beta_u[:, None])


class NormalGamma(NamedTuple):
    """q(pi, mu, precision) = Dirichlet x prod Normal(mean, 1 / (kappa prec)) Gamma(shape, rate).

    Attributes:
        alpha: of the Dirichlet, (N, positions, parents, 1).
        mean, rate: (N, positions, parents, D).
        kappa, shape: (N, positions, parents, 1).
    """

    alpha: Tensor
    mean: Tensor
    kappa: Tensor
    shape: Tensor
    rate: Tensor

    def log_precision(self) -> Tensor:
        """E ln precision, (N, positions, parents, D)."""
        return self.shape.digamma() - self.rate.log()

    def log_weight(self) -> Tensor:
        """E ln pi, (N, positions, parents, 1)."""
        return self.alpha.digamma() - self.alpha.sum((1, 2), keepdim=True).digamma()


@dataclass(frozen=True)
class VBRouting(AnnealedRouting):
    """Variational Bayes routing.

    Attributes:
        iterations, anneal: as for every annealed routing.
        alpha: concentration of the parents' weights.
        kappa: votes that the prior mean, zero, is worth. The reference has 1, which pulls poses
            towards zero, layer by layer, where a parent has one or two votes.
        nu: degrees of freedom of the prior precision.
        psi: squared deviation that the prior expects, in all of them.

    Raises:
        ValueError: a number that is not positive.
    """

    alpha: float = 1.0
    kappa: float = 0.1
    nu: float = 17.0
    psi: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(alpha=self.alpha, kappa=self.kappa, nu=self.nu, psi=self.psi)

    def beliefs(self, votes: Votes, law: ParentLaw) -> Iterator[Belief]:
        share = votes.uniform()
        for iteration in range(self.iterations):
            gathered = votes.gather(share)
            posterior = self.posterior(gathered, law)
            cooled = self._cooled(law, iteration)
            fit = _expected_fit(gathered, posterior, law) - gathered.number * law.beta_u[:, None]
            logits = cooled.inverse_temperature * (law.beta_a + fit[..., 0])
            variance = posterior.rate / posterior.shape
            yield Belief(share, posterior.mean, variance, logits)
            if iteration + 1 < self.iterations:
                share = self.shares(votes, posterior, law)

    def posterior(self, gathered: Gathered, law: ParentLaw) -> NormalGamma:
        """The best q(pi, mu, precision) at given shares."""
        number, mean, variance = gathered
        kappa = self.kappa + number
        scatter = number * (variance + law.noise) + self.kappa * number / kappa * mean.square()
        return NormalGamma(
            self.alpha + number,
            number * mean / kappa,
            kappa,
            0.5 * (self.nu + number),
            0.5 * (self.psi + scatter),
        )

    def shares(self, votes: Votes, posterior: NormalGamma, law: ParentLaw) -> Tensor:
        """The best q(z) at a given q(pi, mu, precision)."""
        precision = posterior.shape / posterior.rate
        constant = math.log(2 * math.pi) - posterior.log_precision() + law.noise * precision
        constant = constant.sum(3, keepdim=True) + votes.size / posterior.kappa
        density = -0.5 * (votes.distance(posterior.mean, precision) + constant)
        return votes.compete(density + posterior.log_weight())

    def bound(self, votes: Votes, share: Tensor, law: ParentLaw) -> Tensor:
        """Lower bound on the log evidence of the votes under the priors, in nats, (N,).

        It never falls from one iteration to the next where every parent sees every child.
        """
        gathered = votes.gather(share)
        q = self.posterior(gathered, law)
        fit = _expected_fit(gathered, q, law) + gathered.number * q.log_weight()
        entropy = -(votes.presence * torch.xlogy(share, share)).sum((1, 2, 3))
        half_nu, half_psi = (torch.full_like(q.rate, x / 2) for x in (self.nu, self.psi))
        precision, ratio = q.shape / q.rate, self.kappa / q.kappa
        means = ratio - 1 - ratio.log() + self.kappa * precision * q.mean.square()
        precisions = kl_divergence(dist.Gamma(q.shape, q.rate), dist.Gamma(half_nu, half_psi))
        weights = dist.Dirichlet(q.alpha.flatten(1))
        prior = dist.Dirichlet(torch.full_like(weights.concentration, self.alpha))
        apart = (precisions + 0.5 * means).sum((1, 2, 3)) + kl_divergence(weights, prior)
        return fit.sum((1, 2, 3)) + entropy - apart


def _expected_fit(gathered: Gathered, posterior: NormalGamma, law: ParentLaw) -> Tensor:
    """sum_i w_i R_ij E ln N_ij, (N, positions, parents, 1)."""
    precision = posterior.shape / posterior.rate
    spread = gathered.variance + law.noise + (gathered.mean - posterior.mean).square()
    each = math.log(2 * math.pi) - posterior.log_precision() + precision * spread
    return -0.5 * gathered.number * (each + 1 / posterior.kappa).sum(3, keepdim=True)


@dataclass(frozen=True)
class DynamicRouting(Routing):
    """Dynamic routing: a parent's presence is |v|, whatever its law says.

    Its pose is the mean of its votes, which has the direction of v: a capsule here has both a pose
    and a presence, and v as its pose would count the presence twice.

    Attributes:
        iterations: as for every routing; there is no temperature.
        fair: measure the sum of the votes against a fair share n (`Votes.fair_share`), or it
            saturates where there are many; False for n = 1, as Sabour et al. have it.
    """

    fair: bool = True

    def beliefs(self, votes: Votes, law: ParentLaw) -> Iterator[Belief]:
        agreement = torch.zeros_like(votes.uniform())
        for iteration in range(self.iterations):
            share = votes.compete(agreement)
            gathered = votes.gather(share)
            total = gathered.number * gathered.mean
            if self.fair:
                total = total / votes.fair_share
            square = total.square().sum(3).clamp_min(_TINY)  # |v| = square / (1 + square)
            variance = gathered.variance + law.noise
            yield Belief(share, gathered.mean, variance, square.log())
            if iteration + 1 < self.iterations:
                agreement = agreement + votes.agreement(squash(total))


class RoutedParents(Guide):
    """A routing as the guide to `SwitchableGaussians`: points for means, mean field for switches.

    The switches' site holds their mean a with the log density -H(a), so that Pyro's ELBO is minus
    the free energy. Children are there with the presences that are given, enumerated.

    Args:
        model: the layer.
        routing: any routing.
    """

    model_class = SwitchableGaussians
    observes = "votes"
    covers = ("parent_presence", "parent_mean", "parent_variance", "child_presence")

    def __init__(self, model: SwitchableGaussians, routing: Routing) -> None:
        super().__init__(model)
        self.routing = routing

    def forward(self, votes: Tensor, presence: Tensor | None = None) -> Belief:
        self.model.check_votes(votes, presence)
        belief = self.routing(Votes.dense(votes, presence), self.model.law())
        presence = votes.new_ones(votes.shape[:2]) if presence is None else presence
        logits = belief.logits[:, 0]
        entropy = F.softplus(logits) - logits.sigmoid() * logits
        with pyro.plate("images", len(votes), dim=-2):
            with pyro.plate("parents", votes.shape[2], dim=-1):
                pyro.sample("parent_presence", dist.Delta(logits.sigmoid(), -entropy))
                pyro.sample("parent_mean", dist.Delta(belief.mean[:, 0], event_dim=1))
                pyro.sample("parent_variance", dist.Delta(belief.variance[:, 0], event_dim=1))
            with pyro.plate("children", votes.shape[1], dim=-1):
                pyro.sample("child_presence", dist.Bernoulli(presence))
        return belief
