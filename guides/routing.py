"""Routing: inference of the parents' presences and poses from the votes of their children.

The joint distribution is a mixture (`capsule_zoo.models.switchable_gaussians`). Two routings infer
it, and one only looks as if it did:

    EMRouting       R, then mu and sigma2, then a: EM, each at its optimum with `e_step="exact"`
    VBRouting       R, then Dirichlet and Normal-Gamma posteriors: variational Bayes. Its joint is
                    the mixture with those priors on weights, means and precisions
    DynamicRouting  R, then v = squash(sum_i w_i R_ij V_ij / n), agreement V_ij . v_j. No joint has
                    these steps as its inference

Routings with learned weights are in `capsule_zoo.guides.learned_routing`.

Each is called as `routing(votes, distribution)` and is an argument of every capsule layer.
`beliefs` yields the belief after each iteration. `free_energies` returns the free energy of each
belief, in nats, with the Gaussians and switches that fit its responsibilities best, so that
routings can be compared on the same votes.

>>> EMRouting(3).free_energies(Votes.dense(values), layer.distribution())             # (3, N)

References:
    Hinton, Sabour & Frosst 2018, "Matrix capsules with EM routing", procedure 1.
    De Sousa Ribeiro, Leontidis & Kollias 2020, "Capsule Routing via Variational Bayes"
    (arXiv 1905.11455). Priors are diagonal here, one Gamma for each number of the pose, so
    that the updates are exact. A parent's switch is the switch of EM, in expectation.
    Hui 2017, "Understanding Matrix capsules with EM Routing" (an article), whose code most programs
    follow: the inverse temperature 1 + t and costs that are standardized over parents.
    Sabour, Frosst & Hinton 2017, "Dynamic Routing Between Capsules" (arXiv 1710.09829): its
    procedure 1.
    Ueda & Nakano 1998, "Deterministic annealing EM algorithm" (Neural Networks 11), for E steps
    with a temperature.
"""

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
from capsule_zoo.models.checks import check_one_of, check_positive
from capsule_zoo.models.routing.parent_distribution import (
    Belief,
    ParentDistribution,
    Routing,
    best_belief,
    vote_log_density,
)
from capsule_zoo.models.routing.vector_capsules import squash
from capsule_zoo.models.routing.votes import Gathered, Votes
from capsule_zoo.models.switchable_gaussians import SwitchableGaussians

_TINY = 1e-12
_ROUNDING = 100.0  # precisions of a number within which parents gain equally much


@dataclass(frozen=True)
class AnnealedRouting(Routing):
    """The base class of routings by a mixture, with two temperatures.

    Attributes:
        iterations: number of times that the parents are inferred.
        anneal: in iteration t = 0, 1, ... a parent's inverse temperature is the distribution's
            inverse temperature times 1 - anneal^(t + 1), where 0 keeps it constant, or with
            "linear" times 1 + t (Hui 2017).
        power: the inverse temperature of the responsibilities: R is proportional to (a N)^power. 1
            is the mixture's own E step. With less, the entropy of the assignments counts 1 / power
            times in the free energy (deterministic annealing: Ueda & Nakano 1998).

    With power=1 each iteration multiplies small differences between parents, and with them the
    gradients: a hundredfold in the first updates of a small network.
    Four iterations then do not learn. A smaller power keeps the product of all iterations near 1.

    Raises:
        ValueError: `anneal` outside [0, 1) and not "linear", or `power` that is not positive.
    """

    anneal: float | str = 0.95
    power: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(power=self.power)
        if self.anneal != "linear" and (isinstance(self.anneal, str) or not 0 <= self.anneal < 1):
            raise ValueError(f"anneal must lie in [0, 1) or be 'linear', not {self.anneal!r}")

    def factor(self, iteration: int) -> float:
        """Return the factor of the inverse temperature in an iteration, counted from 0."""
        if isinstance(self.anneal, str):
            return 1.0 + iteration
        return 1 - self.anneal ** (iteration + 1)

    def _cool(self, distribution: ParentDistribution, iteration: int) -> ParentDistribution:
        temperature = distribution.inverse_temperature * self.factor(iteration)
        return distribution._replace(inverse_temperature=temperature)


@dataclass(frozen=True)
class EMRouting(AnnealedRouting):
    """The routing by expectation maximization (EM).

    Joint distribution: the mixture of switchable Gaussians. With `e_step="exact"` R and the
    switches are its mean-field posterior, and means and variances are points at their optimum.

    Attributes:
        iterations, anneal, power: as for every `AnnealedRouting`.
        e_step: "paper", R ~ a N, or "exact", R ~ exp(a ln N + (1 - a) beta_u), both at power=1. The
            exact step minimizes the free energy, which therefore never rises (at `anneal=0`). At an
            inverse temperature near 1 the exact step may make all parents absent.
        costs: "summed", or "standardized" as in Hui's article: what a parent gains by its children
            is compared with the other parents of its position, less their mean and in their
            standard deviations, and beta_a counts as for one number of a fair fraction of the
            votes. Gains that differ by no more than rounding are equal. No joint distribution has
            these presences: some parents are on even where no votes agree.

    Raises:
        ValueError: an unknown `e_step` or `costs`.
    """

    e_step: str = "paper"
    costs: str = "summed"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_of("e_step", self.e_step, ("paper", "exact"))
        check_one_of("costs", self.costs, ("summed", "standardized"))

    def beliefs(self, votes: Votes, distribution: ParentDistribution) -> Iterator[Belief]:
        responsibility = votes.uniform()
        for iteration in range(self.iterations):
            if self.costs == "standardized":
                belief = self._standardize_belief(votes, responsibility, distribution, iteration)
            else:
                belief = best_belief(votes, responsibility, self._cool(distribution, iteration))
            yield belief
            if iteration + 1 < self.iterations:
                responsibility = self.responsibilities(votes, belief, distribution)

    def _standardize_belief(
        self, votes: Votes, responsibility: Tensor, distribution: ParentDistribution, iteration: int
    ) -> Belief:
        alone = distribution._replace(
            beta_a=torch.zeros_like(distribution.beta_a), inverse_temperature=1.0
        )
        belief = best_belief(votes, responsibility, alone)  # its logits: minus the costs, in nats
        variance, mean = torch.var_mean(belief.logits, 2, correction=0, keepdim=True)
        largest = belief.logits.detach().abs().amax(2, keepdim=True)
        rounding = _ROUNDING * torch.finfo(mean.dtype).eps * largest
        differ = variance > rounding**2
        scale = (torch.where(differ, variance, 1.0) + _TINY).rsqrt()
        surplus = torch.where(differ, (belief.logits - mean) * scale, 0.0)
        beta_a = distribution.beta_a / (votes.size * votes.votes_per_parent)
        return belief._replace(logits=self.factor(iteration) * (beta_a + surplus))

    def responsibilities(
        self, votes: Votes, belief: Belief, distribution: ParentDistribution
    ) -> Tensor:
        """Compute the responsibilities of the E step from the parents."""
        density = vote_log_density(votes, belief.mean, belief.variance, distribution.noise)
        if self.e_step == "paper":
            return votes.compete(self.power * (density + F.logsigmoid(belief.logits)[..., None]))
        parent_presence = belief.presence[..., None]
        return votes.compete(
            self.power
            * (parent_presence * density + (1 - parent_presence) * distribution.beta_u[:, None])
        )


class NormalGamma(NamedTuple):
    """The posterior Dirichlet x prod Normal(mean, 1 / (kappa prec)) Gamma(shape, rate) of parents.

    It is q(pi, mu, precision).

    Attributes:
        alpha: concentration of the Dirichlet, (N, positions, parents, 1).
        mean, rate: (N, positions, parents, D).
        kappa, shape: (N, positions, parents, 1).
    """

    alpha: Tensor
    mean: Tensor
    kappa: Tensor
    shape: Tensor
    rate: Tensor

    def log_precision(self) -> Tensor:
        """Compute E ln precision, (N, positions, parents, D)."""
        return self.shape.digamma() - self.rate.log()

    def log_weight(self) -> Tensor:
        """Compute E ln pi, (N, positions, parents, 1)."""
        return self.alpha.digamma() - self.alpha.sum((1, 2), keepdim=True).digamma()


@dataclass(frozen=True)
class VBRouting(AnnealedRouting):
    """The routing by variational Bayes.

    Attributes:
        iterations, anneal, power: as for every `AnnealedRouting`.
        alpha: concentration of the parents' weights.
        kappa: weight of the prior mean, zero, in votes. The reference has 1, which pulls poses
            towards zero, layer by layer, where a parent has one or two votes.
        nu: degrees of freedom of the prior precision.
        psi: prior sum of squared distances from the mean, over the degrees of freedom.

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

    def beliefs(self, votes: Votes, distribution: ParentDistribution) -> Iterator[Belief]:
        responsibility = votes.uniform()
        for iteration in range(self.iterations):
            gathered = votes.gather(responsibility)
            posterior = self.posterior(gathered, distribution)
            cooled = self._cool(distribution, iteration)
            fit = (
                _expected_fit(gathered, posterior, distribution)
                - gathered.number * distribution.beta_u[:, None]
            )
            logits = cooled.inverse_temperature * (distribution.beta_a + fit[..., 0])
            variance = posterior.rate / posterior.shape
            yield Belief(responsibility, posterior.mean, variance, logits)
            if iteration + 1 < self.iterations:
                responsibility = self.responsibilities(votes, posterior, distribution)

    def posterior(self, gathered: Gathered, distribution: ParentDistribution) -> NormalGamma:
        """Compute the optimal q(pi, mu, precision) for given responsibilities."""
        number, mean, variance = gathered
        kappa = self.kappa + number
        scatter = (
            number * (variance + distribution.noise) + self.kappa * number / kappa * mean.square()
        )
        return NormalGamma(
            self.alpha + number,
            number * mean / kappa,
            kappa,
            0.5 * (self.nu + number),
            0.5 * (self.psi + scatter),
        )

    def responsibilities(
        self, votes: Votes, posterior: NormalGamma, distribution: ParentDistribution
    ) -> Tensor:
        """Compute the optimal q(z), the responsibilities, for a given q(pi, mu, precision)."""
        precision = posterior.shape / posterior.rate
        constant = (
            math.log(2 * math.pi) - posterior.log_precision() + distribution.noise * precision
        )
        constant = constant.sum(3, keepdim=True) + votes.size / posterior.kappa
        density = -0.5 * (votes.distance(posterior.mean, precision) + constant)
        return votes.compete(self.power * (density + posterior.log_weight()))

    def bound(
        self, votes: Votes, responsibility: Tensor, distribution: ParentDistribution
    ) -> Tensor:
        """Compute a lower bound on the log evidence of the votes under the priors, in nats, (N,).

        At power=1 the bound never falls from one iteration to the next if every parent sees every
        child.
        """
        gathered = votes.gather(responsibility)
        q = self.posterior(gathered, distribution)
        fit = _expected_fit(gathered, q, distribution) + gathered.number * q.log_weight()
        entropy = -(votes.presence * torch.xlogy(responsibility, responsibility)).sum((1, 2, 3))
        half_nu, half_psi = (torch.full_like(q.rate, x / 2) for x in (self.nu, self.psi))
        precision, ratio = q.shape / q.rate, self.kappa / q.kappa
        means = ratio - 1 - ratio.log() + self.kappa * precision * q.mean.square()
        precisions = kl_divergence(dist.Gamma(q.shape, q.rate), dist.Gamma(half_nu, half_psi))
        weights = dist.Dirichlet(q.alpha.flatten(1))
        prior = dist.Dirichlet(torch.full_like(weights.concentration, self.alpha))
        apart = (precisions + 0.5 * means).sum((1, 2, 3)) + kl_divergence(weights, prior)
        return fit.sum((1, 2, 3)) + entropy - apart


def _expected_fit(
    gathered: Gathered, posterior: NormalGamma, distribution: ParentDistribution
) -> Tensor:
    """Compute sum_i w_i R_ij E ln N_ij, (N, positions, parents, 1)."""
    precision = posterior.shape / posterior.rate
    spread = gathered.variance + distribution.noise + (gathered.mean - posterior.mean).square()
    terms = math.log(2 * math.pi) - posterior.log_precision() + precision * spread
    return -0.5 * gathered.number * (terms + 1 / posterior.kappa).sum(3, keepdim=True)


@dataclass(frozen=True)
class LengthRouting(Routing):
    """The base class of routings in which the length of a parent's summed votes sets its presence.

    A parent's pose is the mean of its votes, which has the direction of the sum. A capsule here has
    both a pose and a presence, and the sum as its pose would count the presence twice. The
    distribution of the parents is not used: no joint distribution has these parents as its
    posterior.

    Attributes:
        iterations: number of times that the parents are inferred.
        fair: whether the sum of the votes is divided by a fair number n (`Votes.votes_per_parent`).
            Otherwise it saturates where there are many votes. False is n = 1, as in the papers.
    """

    fair: bool = True

    def parents(self, votes: Votes, distribution: ParentDistribution) -> tuple[Tensor, Tensor]:
        *_, (responsibility, total, logits) = self.points(votes, distribution)
        number = (votes.presence * responsibility).sum(3, keepdim=True)
        return total / number.clamp_min(_TINY), logits

    def beliefs(self, votes: Votes, distribution: ParentDistribution) -> Iterator[Belief]:
        for responsibility, total, logits in self.points(votes, distribution):
            number, _, variance = votes.gather(responsibility)
            mean = total / number.clamp_min(_TINY)
            yield Belief(responsibility, mean, variance + distribution.noise, logits)

    def points(
        self, votes: Votes, distribution: ParentDistribution
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield responsibilities R, the parents' summed votes and log-odds after each iteration."""
        raise NotImplementedError


@dataclass(frozen=True)
class DynamicRouting(LengthRouting):
    """The dynamic routing: children prefer parents v whose direction agrees with their votes.

    Joint distribution: none. The steps lower no free energy.
    """

    def points(
        self, votes: Votes, distribution: ParentDistribution
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        responsibility = votes.uniform()
        agreement = torch.zeros_like(responsibility)
        for iteration in range(self.iterations):
            total = votes.gather_sum(responsibility)
            shared = total / votes.votes_per_parent if self.fair else total
            square = shared.square().sum(3).clamp_min(_TINY)  # |v| = square / (1 + square)
            yield responsibility, total, square.log()
            if iteration + 1 < self.iterations:
                agreement = agreement + votes.agreement(squash(shared))
                responsibility = votes.compete(agreement)


class RoutedParents(Guide[SwitchableGaussians]):  # type: ignore[type-var]  # a layer, not a Model
    """The guide to `SwitchableGaussians` by a routing, with point masses at the means.

    Switches have a mean field. Their site holds their mean a with the log density -H(a), so that
    Pyro's ELBO is minus the free energy. Children are on with the given presences, by an enumerable
    Bernoulli site.

    Args:
        model: the layer.
        routing: any routing.
    """

    observes = "votes"
    covers = ("parent_presence", "parent_mean", "parent_variance", "child_presence")

    def __init__(self, model: SwitchableGaussians, routing: Routing) -> None:
        super().__init__(model)
        self.routing = routing

    def forward(self, votes: Tensor, presence: Tensor | None = None) -> Belief:
        self.model.check_votes(votes, presence)
        belief = self.routing(Votes.dense(votes, presence), self.model.distribution())
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
