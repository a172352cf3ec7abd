"""Presences that relax, and children that choose a parent.

The distributions of the part-whole story that Pyro does not ship: a relaxed Bernoulli in logit
space, the mixture over parents that is left when a child's choice is summed out, and poses about
any of several rotations.
"""

from __future__ import annotations

import math

import pyro.distributions as dist
import torch
import torch.nn.functional as F
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor
from torch.distributions import constraints
from torch.distributions.relaxed_bernoulli import LogitRelaxedBernoulli as _LogitRelaxedBernoulli
from torch.distributions.utils import clamp_probs

from capsule_zoo.models.blocks import poses

_NO_SHAPE = torch.Size()


class LogitRelaxedBernoulli(_LogitRelaxedBernoulli, TorchDistributionMixin):
    """The logit of a Concrete (relaxed Bernoulli) variable; `sigmoid` of a draw is the presence.

    In logit space neither a draw nor its density saturates in float32, at any temperature.

    References: Maddison, Mnih & Teh 2017, "The Concrete Distribution" (arXiv 1611.00712).
    """

    has_rsample = True  # torch forgets to say so, and Pyro would fall back on the score function

    def rsample(self, sample_shape: torch.Size = _NO_SHAPE) -> Tensor:
        """A logit; torch's form goes through probabilities, which saturate at 16 in float32."""
        logits = self.logits.expand(self._extended_shape(sample_shape))
        uniform = clamp_probs(torch.rand_like(logits))
        return (uniform.log() - (-uniform).log1p() + logits) / self.temperature

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density of the logit, in nats, by softplus: torch's form overflows in the tails."""
        difference = self.logits - value * self.temperature
        return self.temperature.log() + difference - 2 * F.softplus(difference)


class ParentMixture(dist.MixtureSameFamily):
    """The law of a child when its choice of a parent, the mixture component, is summed out."""

    @property
    def support(self) -> constraints.Constraint:
        """That of the components; torch's own answer is one that no AutoGuide can transform to."""
        return self.component_distribution.support

    def responsibilities(self, value: Tensor) -> Tensor:
        """Posterior over the choice given the child's value, (..., 1 + parents); column 0: dummy.

        Args:
            value: (..., *event_shape), as the distribution draws it.
        """
        per_parent = self.component_distribution.log_prob(self._pad(value))
        return (per_parent + self.mixture_distribution.logits).softmax(-1)


def pose_about_rotations(rotations: int, scale: Tensor) -> dist.TorchDistribution:
    """The law of a pose that is normal about a turn, one of several that are summed out.

    Args:
        rotations: turns, spread evenly over the circle from the identity on, equally likely.
        scale: deviation of each of the six numbers, (6,).
    """
    turns = scale.new_tensor(range(rotations)) / rotations
    centre = poses.rotation(2 * math.pi * turns)  # (rotations, 6)
    if rotations == 1:
        return dist.Normal(centre[0], scale).to_event(1)
    about = dist.Normal(centre, scale).to_event(1)
    return ParentMixture(dist.Categorical(logits=torch.zeros_like(turns)), about)


def parent_log_weights(log_presence: Tensor, log_affinity: Tensor, epsilon: float) -> Tensor:
    """Unnormalised log p(s_i = j | t): `log epsilon` for the dummy, then `log(t_j rho_ij)`.

    Args:
        log_presence: (B, parents), log t; minus infinity for a parent that is off.
        log_affinity: (children, parents), log rho.
        epsilon: the dummy's weight.

    Returns:
        (B, children, 1 + parents).
    """
    weights = log_presence[..., None, :] + log_affinity  # (B, children, parents)
    return F.pad(weights, (1, 0), value=math.log(epsilon))


def log_presence(value: Tensor, relaxed: bool) -> Tensor:
    """log t of a presence site's value: a logit where presences are relaxed, else 0 or 1."""
    return F.logsigmoid(value) if relaxed else value.log()


def as_presence(value: Tensor, relaxed: bool) -> Tensor:
    """t in [0, 1] of a presence site's value: a logit where presences are relaxed, else 0 or 1."""
    return value.sigmoid() if relaxed else value
