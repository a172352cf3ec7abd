"""Levels of part-whole capsules, and the learned relation between two levels.

Every child chooses a parent that is present, or the dummy; see `models.part_whole`. This needs
three distributions that Pyro lacks: a relaxed Bernoulli in logit space, the mixture over parents
that results when a child's choice is summed out, and poses about any of several rotations.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import pyro.distributions as dist
import torch
import torch.nn.functional as F
from pyro.distributions.torch_distribution import TorchDistributionMixin
from pyro.nn import PyroModule
from pyro.ops.indexing import Vindex
from torch import Tensor, nn
from torch.distributions import constraints
from torch.distributions.relaxed_bernoulli import LogitRelaxedBernoulli as _LogitRelaxedBernoulli
from torch.distributions.utils import clamp_probs

from capsule_zoo.data.registration import Settings
from capsule_zoo.models.checks import check_positive
from capsule_zoo.models.common.plates import per_image, refuse_enumeration
from capsule_zoo.models.parts import poses


class Level(NamedTuple):
    """A level of the hierarchy.

    Attributes:
        name: name of its capsules.
        size: number of its capsules.
        exchangeable: number of consecutive capsules that have one distribution given the level
            above.
    """

    name: str
    size: int
    exchangeable: int = 1

    @property
    def plate(self) -> str:
        return f"{self.name}s"

    @property
    def groups(self) -> int:
        """The number of groups of exchangeable capsules."""
        return -(-self.size // self.exchangeable)

    def spread(self, values: Tensor, dim: int) -> Tensor:
        """Return values of the groups, along the negative `dim`, as values of the capsules."""
        if self.exchangeable == 1:
            return values
        return values.repeat_interleave(self.exchangeable, dim).narrow(dim, 0, self.size)


class Capsules(NamedTuple):
    """The sampled presences and poses of one level.

    Attributes:
        presence: the value (B, capsules) of the presence site, a logit where presences are relaxed.
        pose: (B, capsules, 6).

    Plates outside the model add batch dims in front of B, here and in everything below.
    """

    presence: Tensor
    pose: Tensor

    @classmethod
    def from_sites(cls, level: Level, presence: Tensor, pose: Tensor) -> "Capsules":
        """Return the sampled values of a level's two sites, with equal batch dims.

        Raises:
            EnumeratedPresence: one of them varies along a dim of enumeration.
        """
        refuse_enumeration(f"{level.name}_presence", presence)
        refuse_enumeration(f"{level.name}_pose", pose[..., 0])
        if presence.shape != pose.shape[:-1]:  # a site was conditioned on values without outer dims
            shape = torch.broadcast_shapes(presence.shape, pose.shape[:-1])
            presence, pose = presence.expand(shape), pose.expand(*shape, pose.shape[-1])
        return cls(presence, pose)


class ChildDistribution(NamedTuple):
    """The distribution of a child for each choice of parent; column 0 is the dummy.

    Attributes:
        log_weights: unnormalized log p(s_i = j | t), (B, children, 1 + parents).
        presence_logits: logit of gamma_ij, (children, 1 + parents).
        vote: mean of the pose, (B, children, 1 + parents, 6).
        scale_on, scale_off: standard deviations of the pose when the child is present and when it
            is absent, (..., children, 1 + parents, 6), or 1 instead of 6 where they are all
            the same.
    """

    log_weights: Tensor
    presence_logits: Tensor
    vote: Tensor
    scale_on: Tensor
    scale_off: Tensor

    def scale(self, presence: Tensor) -> Tensor:
        """Return the standard deviation of a child's pose for each choice of parent."""
        presence = presence[..., None, None]
        return (
            presence * self.scale_on + (1 - presence) * self.scale_off
        )  # (B, n, 1 + parents, 6 or 1)

    def pose_distribution(self, presence: Tensor) -> dist.TorchDistribution:
        """Return the distribution of a child's pose for each choice of parent, given presence t."""
        return dist.Normal(self.vote, self.scale(presence)).to_event(1)

    def chosen_pose_distribution(self, parent: Tensor, presence: Tensor) -> dist.TorchDistribution:
        """Return the distribution of children's poses given their parents and presences t.

        Args:
            parent: choices that broadcast to (B, children); they may be enumerated.
            presence: t, (B, children).
        """
        presence = presence[..., None]
        scale_on = Vindex(self.scale_on)[..., parent, :]
        scale_off = Vindex(self.scale_off)[..., parent, :]
        scale = presence * scale_on + (1 - presence) * scale_off
        return dist.Normal(Vindex(self.vote)[..., parent, :], scale).to_event(1)


@dataclass(frozen=True)
class Belonging(Settings):
    """The settings of the relation of children to their parents, or to the dummy.

    Args:
        epsilon: weight of the dummy, compared with the parents' rho.
        dummy_presence: probability that a child of the dummy is present.
        sigma_min: least standard deviation of a child's pose from its parent's vote.
        sigma_off: standard deviation of a child's pose when the child is absent.
        sigma_dummy: standard deviation of a child's pose when the dummy is its parent: it belongs
            to no object.

    Raises:
        ValueError: a weight or a standard deviation is not positive, or the probability is not in
        (0, 1).
    """

    epsilon: float = 0.02
    dummy_presence: float = 0.01
    sigma_min: float = 0.02
    sigma_off: float = 1.0
    sigma_dummy: float = 1.0

    def __post_init__(self) -> None:
        check_positive(epsilon=self.epsilon, sigma_min=self.sigma_min)
        check_positive(sigma_off=self.sigma_off, sigma_dummy=self.sigma_dummy)
        if not 0 < self.dummy_presence < 1:
            raise ValueError(f"dummy_presence must lie inside (0, 1), not {self.dummy_presence!r}")


class Relation(PyroModule):
    """The base class of learned relations between children and parents, including the dummy.

    Args:
        belonging: weights and standard deviations.
    """

    def __init__(self, belonging: Belonging) -> None:
        super().__init__()
        self.epsilon = belonging.epsilon
        self.sigma_min = belonging.sigma_min
        self.sigma_off = belonging.sigma_off
        self.sigma_dummy = belonging.sigma_dummy
        self.dummy_logit = math.log(belonging.dummy_presence / (1 - belonging.dummy_presence))


def first_transform(alike: tuple[int, ...], size: tuple[int, ...], scale: float) -> Tensor:
    """Initialize transformations M, (*size, 6), of children of `scale` times their parents' size.

    Parents start nearly alike and become different as they learn. If they started far apart, the
    first parent with a good fit would keep a child forever.

    Args:
        alike: the size along which they are nearly alike, 1 in the dim of the parents.
        size: numbers of children and parents, in either order, and of types if there are any.
    """
    place = torch.tensor([0.05, 0.05, 0.4, 0.05, 0.05, 0.4]) * torch.randn(*alike, 6)
    apart = torch.tensor([0.05, 0.05, 0.1, 0.05, 0.05, 0.1]) * torch.randn(*size, 6)
    return torch.tensor(poses.IDENTITY) * (scale - 1) + place + apart


class ParentSelection(Relation):
    """The learned relation between a level of children and the level of their parents.

    Parameters: `log_affinity` (log rho), `presence_logits` (gamma), `transform` (M, six numbers
    row by row) and `raw_scale` (sigma = sigma_min + softplus), one entry for each child and parent.
    With types there is one entry for each group of exchangeable children, parent and type. Every
    pair of a parent and a type is then a choice in the `ChildDistribution`, types of a parent next
    to one another.

    Args:
        children: level of the children.
        parents: number of parents.
        belonging: weights and standard deviations.
        child_scale: size of a child in the frame of its parent, at first.
        types: number of types that a child of a parent may have.
    """

    def __init__(
        self,
        children: Level,
        parents: int,
        belonging: Belonging,
        child_scale: float,
        types: int = 1,
    ) -> None:
        super().__init__(belonging)
        self.children_level = children
        self.types = types
        size = children.groups, parents * types
        self.log_affinity = nn.Parameter(torch.full(size, -math.log(types)))
        self.presence_logits = nn.Parameter(torch.zeros(size))
        self.raw_scale = nn.Parameter(torch.full(size, -1.0))
        groups = children.groups
        start = first_transform((groups, 1, types), (groups, parents, types), child_scale)
        self.transform = nn.Parameter(start.flatten(1, 2))

    def forward(self, parents: Capsules, relaxed: bool) -> ChildDistribution:
        identity = poses.identity_like(parents.pose)
        transform = per_image(self.transform, 3)
        pose = parents.pose.repeat_interleave(self.types, -2)
        votes = poses.compose(pose[..., None, :, :], identity + transform)
        dummy_vote = identity.expand_as(votes[..., :1, :])
        scale = self.sigma_min + F.softplus(per_image(self.raw_scale, 2))
        scale_off = torch.full_like(scale, self.sigma_off)
        log_t = log_presence(parents.presence, relaxed).repeat_interleave(self.types, -1)
        spread = self.children_level.spread
        return ChildDistribution(
            spread(parent_log_weights(log_t, per_image(self.log_affinity, 2), self.epsilon), -2),
            spread(F.pad(per_image(self.presence_logits, 2), (1, 0), value=self.dummy_logit), -2),
            spread(torch.cat([dummy_vote, votes], dim=-2), -3),
            spread(F.pad(scale, (1, 0), value=self.sigma_dummy), -2)[..., None],
            spread(F.pad(scale_off, (1, 0), value=self.sigma_dummy), -2)[..., None],
        )

    def sum_types(self, choices: Tensor) -> Tensor:
        """Return the probability of each parent, (..., 1 + parents), summed over its types.

        Args:
            choices: probability of each choice, (..., 1 + parents * types); column 0 is the dummy.
        """
        dummy, others = choices.split([1, choices.shape[-1] - 1], -1)
        return torch.cat([dummy, others.unflatten(-1, (-1, self.types)).sum(-1)], -1)


class LogitRelaxedBernoulli(_LogitRelaxedBernoulli, TorchDistributionMixin):
    """The distribution of the logit of a relaxed Bernoulli (Concrete) variable.

    The `sigmoid` of a draw is the presence. In logit space neither a draw nor its density saturates
    in float32, at any temperature.

    References: Maddison, Mnih & Teh 2017, "The Concrete Distribution" (arXiv 1611.00712).
    """

    has_rsample = True  # torch does not declare it, and Pyro would use the score function

    def rsample(self, sample_shape: torch.Size = torch.Size()) -> Tensor:
        """Sample a logit directly, because torch's probabilities saturate at 16 in float32."""
        logits = self.logits.expand(self._extended_shape(sample_shape))
        uniform = clamp_probs(torch.rand_like(logits))
        return (uniform.log() - (-uniform).log1p() + logits) / self.temperature

    def log_prob(self, value: Tensor) -> Tensor:
        """Compute the log density of the logit, in nats, by softplus, which never overflows."""
        difference = self.logits - value * self.temperature
        return self.temperature.log() + difference - 2 * F.softplus(difference)


class ParentMixture(dist.MixtureSameFamily):
    """The distribution of a child, a mixture over its choice of parent."""

    @property
    def support(self) -> constraints.Constraint:
        """The support of the components; AutoGuides cannot use torch's support of a mixture."""
        return self.component_distribution.support

    def responsibilities(self, value: Tensor) -> Tensor:
        """Compute the posterior of the parent given a child, (..., 1 + parents); column 0: dummy.

        Args:
            value: (..., *event_shape), as the distribution draws it.
        """
        per_parent = self.component_distribution.log_prob(self._pad(value))
        return (per_parent + self.mixture_distribution.logits).softmax(-1)


def pose_about_rotations(rotations: int, scale: Tensor) -> dist.TorchDistribution:
    """Return the mixture of normal distributions of a pose about several rotations.

    Args:
        rotations: number of rotations, spread evenly over the circle from the identity on and
            equally likely.
        scale: standard deviation of each of the six numbers, (6,).
    """
    steps = scale.new_tensor(range(rotations)) / rotations
    center = poses.rotation(2 * math.pi * steps)  # (rotations, 6)
    if rotations == 1:
        return dist.Normal(center[0], scale).to_event(1)
    about = dist.Normal(center, scale).to_event(1)
    return ParentMixture(dist.Categorical(logits=torch.zeros_like(steps)), about)


def parent_log_weights(log_presence: Tensor, log_affinity: Tensor, epsilon: float) -> Tensor:
    """Compute unnormalized log p(s_i = j | t): log epsilon of the dummy, then log(t_j rho_ij).

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
