"""One layer of matrix capsules as a density: a mixture of switchable transforming Gaussians.

Story. Every child casts a vote for the pose of each parent. It chooses one parent that sees it. If
that parent is present, the vote is a draw from the parent's Gaussian. If it is not, the vote is as
likely as any other. A parent therefore has a cost (beta_a), which is worth paying when the votes of
its children agree. Votes have a small noise, so that one child alone is not infinite evidence.

    s_j ~ Bernoulli(sigmoid(beta_a))                     # parents, (B, J)
    mu_j, sigma2_j: flat                                 # (B, J, D)
    w_i ~ Bernoulli(presence)                            # children, (B, I)
    z_i ~ uniform over parents                           # (B, I), enumerated
    factor w_i [s_z ln N_iz + (1 - s_z) beta_u]          # z = z_i

    ln N_ij = E ln Normal(V_ij + e; mu_j, sigma2_j),  e ~ Normal(0, noise)

With q(s_j = 1) = a_j and q(z_i = j) = R_ij the free energy at temperature 1 / lambda is

    -F = sum_ij w_i R_ij [a_j ln N_ij + (1 - a_j) beta_u - ln R_ij - ln(number of parents of i)]
         + sum_j [a_j beta_a - ln(1 + exp(beta_a)) + H(a_j) / lambda]

and each block of its arguments has its optimum in closed form. These optima are the steps of EM
routing (`capsule_zoo.guides.EMRouting`).

References:
    Hinton, Sabour & Frosst 2018, "Matrix capsules with EM routing" (ICLR), section 3 and appendix
    A.1. Their cost of a claimed child, (beta_u + ln sigma) for each number of the pose, leaves out
    the constants of the Gaussian: see `unclaimed_log_density`. The noise is the floor that their
    released code adds to the variance, defined here so that EM remains exact. Their floor is 5e-4.
    For poses of size 1 that is so little that chance settles assignments before anything is
    learned.
"""

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions import constraints
from pyro.ops.indexing import Vindex
from torch import Tensor

from capsule_zoo.models.base import NamedModule, Site
from capsule_zoo.models.checks import check_at_least, check_positive
from capsule_zoo.models.routing.parent_distribution import VOTE_NOISE, ParentDistribution


class Flat(dist.ImproperUniform):
    """The flat measure on the reals, with log density zero in the dtype of the value."""

    def log_prob(self, value: Tensor) -> Tensor:
        return super().log_prob(value).to(value)


class SwitchableGaussians(NamedModule):
    """The mixture of switchable Gaussians as a Pyro model, described at the top of this file.

    Args:
        children, parents: capsules of the two levels, I and J; every parent sees every child.
        size: numbers of a vote, D.
        beta_a: log-odds that a parent is present, in nats.
        beta_u: log density of the vote of a child whose parent is absent, in nats.
        noise: variance of a vote's own noise.

    Raises:
        ValueError: a number below 1, or noise that is not positive.

    Called as `model(votes, presence=None)` with votes (B, I, J, D) and the children's presences
    (B, I), all present by default. Means and variances are flat, so the model cannot be drawn from.
    """

    sites = (
        Site("parent_presence", ("images", "parents"), discrete=True),
        Site("parent_mean", ("images", "parents"), event_dim=1),
        Site("parent_variance", ("images", "parents"), event_dim=1),
        Site("child_presence", ("images", "children"), discrete=True),
        Site("child_parent", ("images", "children"), discrete=True, enumerated=True),
    )
    plate_dims = {"images": -2, "parents": -1, "children": -1}

    def __init__(
        self,
        children: int,
        parents: int,
        size: int = 16,
        *,
        beta_a: float = 0.5,
        beta_u: float = -14.7,
        noise: float = VOTE_NOISE,
    ) -> None:
        super().__init__()
        check_at_least(1, children=children, parents=parents, size=size)
        check_positive(noise=noise)
        self.shape = (children, parents, size)
        self.noise = noise
        self.beta_a = torch.nn.Parameter(torch.full((parents,), float(beta_a)))
        self.beta_u = torch.nn.Parameter(torch.full((parents,), float(beta_u)))

    def distribution(self, inverse_temperature: float = 1.0) -> ParentDistribution:
        """Return the prior of the parents in the form that routings use."""
        return ParentDistribution(self.beta_a, self.beta_u, inverse_temperature, self.noise)

    def check_votes(self, votes: Tensor, presence: Tensor | None = None) -> None:
        """Raise ValueError unless votes are (B, I, J, D) and presences (B, I)."""
        if votes.dim() != 4 or tuple(votes.shape[1:]) != self.shape:
            raise ValueError(
                f"votes must be (B, {', '.join(map(str, self.shape))}) for this layer, not "
                f"{tuple(votes.shape)}"
            )
        if presence is not None and presence.shape != votes.shape[:2]:
            raise ValueError(
                f"presence must be {tuple(votes.shape[:2])}, one for each child, not "
                f"{tuple(presence.shape)}"
            )

    def forward(self, votes: Tensor, presence: Tensor | None = None) -> None:
        self.check_votes(votes, presence)
        batch, children, parents, size = votes.shape
        presence = votes.new_ones(batch, children) if presence is None else presence
        real, positive = constraints.real_vector, constraints.independent(constraints.positive, 1)
        with pyro.plate("images", batch, dim=-2):
            with pyro.plate("parents", parents, dim=-1):
                # unvalidated, so that a mean field may pass a probability instead of a choice
                switch = dist.Bernoulli(logits=self.beta_a, validate_args=False)
                parent_presence = pyro.sample("parent_presence", switch)
                mean = pyro.sample("parent_mean", Flat(real, (), (size,)))
                variance = pyro.sample("parent_variance", Flat(positive, (), (size,)))
            density = self._log_density(votes, parent_presence, mean, variance)  # (*batch, I, J)
            with pyro.plate("children", children, dim=-1):
                child = pyro.sample("child_presence", dist.Bernoulli(presence))
                parent = pyro.sample(
                    "child_parent",
                    dist.Categorical(logits=votes.new_zeros(parents)),
                    infer={"enumerate": "parallel"},
                )
                pyro.factor("vote", child * Vindex(density)[..., parent])

    def _log_density(
        self, votes: Tensor, parent_presence: Tensor, mean: Tensor, variance: Tensor
    ) -> Tensor:
        """Compute the log density of each vote, s_j ln N_ij + (1 - s_j) beta_u, (*batch, I, J)."""
        mean, variance = mean[..., None, :, :], variance[..., None, :, :]
        parent_presence = parent_presence[..., None, :]
        claimed = dist.Normal(mean, variance.sqrt()).log_prob(votes) - 0.5 * self.noise / variance
        return parent_presence * claimed.sum(-1) + (1 - parent_presence) * self.beta_u
