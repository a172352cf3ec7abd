"""The distributions of relaxed presences and of children that choose a parent.

Part-whole capsules need three distributions that Pyro lacks: a relaxed Bernoulli in logit space,
the mixture over parents that results when a child's choice is summed out, and poses about any of
several rotations.
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

from capsule_zoo.models.parts import poses

_NO_SHAPE = torch.Size()


class LogitRelaxedBernoulli(_LogitRelaxedBernoulli, TorchDistributionMixin):
    """The law of the logit of a Concrete variable (a relaxed Bernoulli).

    The `sigmoid` of a draw is the presence. In logit space neither a draw nor its density saturates
    in float32, at any temperature.

    References: Maddison, Mnih & Teh 2017, "The Concrete Distribution" (arXiv 1611.00712).
    """

    has_rsample = True  # torch does not declare it, and Pyro would use the score function

    def rsample(self, sample_shape: torch.Size = _NO_SHAPE) -> Tensor:
        """Draw a logit directly, because torch's probabilities saturate at 16 in float32."""
        logits = self.logits.expand(self._extended_shape(sample_shape))
        uniform = clamp_probs(torch.rand_like(logits))
        return (uniform.log() - (-uniform).log1p() + logits) / self.temperature

    def log_prob(self, value: Tensor) -> Tensor:
        """Compute the log density of the logit, in nats, by softplus, which never overflows."""
        difference = self.logits - value * self.temperature
        return self.temperature.log() + difference - 2 * F.softplus(difference)


class ParentMixture(dist.MixtureSameFamily):
    """The law of a child when its choice of a parent, the mixture component, is summed out."""

    @property
    def support(self) -> constraints.Constraint:
        """The support of the components, because no AutoGuide can transform to torch's answer."""
        return self.component_distribution.support

    def responsibilities(self, value: Tensor) -> Tensor:
        """Compute the posterior of the choice given a value, (..., 1 + parents); column 0: dummy.

        Args:
            value: (..., *event_shape), as the distribution draws it.
        """
        per_parent = self.component_distribution.log_prob(self._pad(value))
        return (per_parent + self.mixture_distribution.logits).softmax(-1)


def pose_about_rotations(rotations: int, scale: Tensor) -> dist.TorchDistribution:
    """Return the law of a pose that is normal about one of several rotations, summed out.

    Args:
        rotations: number of rotations, spread evenly over the circle from the identity on and
            equally likely.
        scale: deviation of each of the six numbers, (6,).
    """
    turns = scale.new_tensor(range(rotations)) / rotations
    center = poses.rotation(2 * math.pi * turns)  # (rotations, 6)
    if rotations == 1:
        return dist.Normal(center[0], scale).to_event(1)
    about = dist.Normal(center, scale).to_event(1)
    return ParentMixture(dist.Categorical(logits=torch.zeros_like(turns)), about)


def parent_log_weights(log_presence: Tensor, log_affinity: Tensor, epsilon: float) -> Tensor:
    """Compute log p(s_i = j | t), unnormalized: `log epsilon`, then `log(t_j rho_ij)`.

    Args:
        log_presence: (B, parents), log t; minus infinity for a parent that is off.
        log_affinity: (children, parents), log rho.
        epsilon: the weight of the dummy, which comes first.

    Returns:
        (B, children, 1 + parents).
    """
    weights = log_presence[..., None, :] + log_affinity  # (B, children, parents)
    return F.pad(weights, (1, 0), value=math.log(epsilon))


def log_presence(value: Tensor, relaxed: bool) -> Tensor:
    """Compute log t from a presence site's value, a logit if `relaxed`, else 0 or 1."""
    return F.logsigmoid(value) if relaxed else value.log()


def as_presence(value: Tensor, relaxed: bool) -> Tensor:
    """Compute t in [0, 1] from a presence site's value, a logit if `relaxed`, else 0 or 1."""
    return value.sigmoid() if relaxed else value
