"""Votes of objects for the poses of their parts, which depend on a feature of the object.

    OP_km = affine(static_km + dynamic_km(c_k))             # part m in the frame of object k
    v_km  = OV_k OP_km                                      # the vote, in the frame of the image
    a_km, lambda_km = heads(c_k)                            # presence and scale of the vote

`c_k` is the feature of object k. All networks are one small perceptron for each object. Objects
that vote, and the dummy, are the components of a mixture for the pose of each part.

References:
    Kosiorek, Sabour, Teh & Hinton 2019 (arXiv 1906.06818), section 2.1. Widths, the floor of the
    standard deviation and the weight of the dummy are from the authors' public program.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple, Self

import pyro.distributions as dist
import torch
import torch.nn.functional as F
from pyro.nn import PyroModule
from torch import Tensor, nn

from capsule_zoo.data.registration import Settings
from capsule_zoo.models.checks import check_at_least
from capsule_zoo.models.parts import poses
from capsule_zoo.models.parts.parent_selection import Capsules, Level, ParentMixture, log_presence

_SMALLEST_SCALE = 0.01  # smallest standard deviation of a vote


class FeaturedCapsules(NamedTuple):
    """The sampled presences, poses and features of one level.

    Attributes:
        presence: the value (B, capsules) of the presence site, a logit where presences are relaxed.
        pose: (B, capsules, 6).
        feature: (B, capsules, features).

    Plates outside the model add batch dims in front of B, here and in everything below.
    """

    presence: Tensor
    pose: Tensor
    feature: Tensor

    @classmethod
    def from_sites(cls, level: Level, presence: Tensor, pose: Tensor, feature: Tensor) -> Self:
        """Return the sampled values of a level's three sites, with equal batch dims.

        Raises:
            EnumeratedPresence: one of them varies along a dim of enumeration.
        """
        presence, pose = Capsules.from_sites(level, presence, pose)
        shape = torch.broadcast_shapes(presence.shape, feature.shape[:-1])
        return cls(
            presence.expand(shape),
            pose.expand(*shape, pose.shape[-1]),
            feature.expand(*shape, feature.shape[-1]),
        )


class PartRelation(NamedTuple):
    """The relation of objects to their parts, in the frames of the objects.

    Attributes:
        pose: OP, the poses of the parts in the frames of the objects, (B, objects, parts, 6).
        presence_logits: logits of a_km, (B, objects, parts).
        scale: lambda_km, (B, objects, parts).
        dynamic: the part of the raw relation that depends on the feature, (B, objects, parts, 6).
    """

    pose: Tensor
    presence_logits: Tensor
    scale: Tensor
    dynamic: Tensor


class ObjectVotes(NamedTuple):
    """The votes of all objects for every part, in the frame of the image.

    Attributes:
        pose: v_km, (B, parts, objects, 6).
        log_presence: log(a_k a_km), (B, parts, objects); minus infinity where an object is off.
        scale: lambda_km, (B, parts, objects).
        dynamic: as in `PartRelation`.
    """

    pose: Tensor
    log_presence: Tensor
    scale: Tensor
    dynamic: Tensor


@dataclass(frozen=True)
class VoteSizes(Settings):
    """The sizes of the networks by which objects vote for their parts.

    Args:
        object_features: size of an object's feature vector.
        hidden: hidden units of each object's perceptron.
        deformable: whether an object's feature bends the constellation of its parts.

    Raises:
        ValueError: a size below 1.
    """

    object_features: int = 32
    hidden: int = 128
    deformable: bool = True

    def __post_init__(self) -> None:
        check_at_least(1, object_features=self.object_features, hidden=self.hidden)


class VoteNetwork(PyroModule):
    """The networks that compute the relation of every object to its parts from its feature.

    Called on features (B, objects, F) it returns a `PartRelation`.

    Args:
        objects, parts: numbers of capsules.
        sizes: sizes of an object's feature and of its perceptron.
    """

    def __init__(self, objects: int, parts: int, sizes: VoteSizes) -> None:
        super().__init__()
        self.parts = parts
        self.deformable = sizes.deformable
        features, hidden = sizes.object_features, sizes.hidden
        numbers = (8 if sizes.deformable else 2) * parts
        self.hidden_weight = nn.Parameter(torch.randn(objects, features, hidden) / features**0.5)
        self.hidden_bias = nn.Parameter(torch.zeros(objects, hidden))
        # small at first, so that the static relation is learned before it is deformed
        self.read_weight = nn.Parameter(0.3 * torch.randn(objects, hidden, numbers) / hidden**0.5)
        self.static = nn.Parameter(0.1 * torch.randn(objects, parts, 6))
        self.presence_bias = nn.Parameter(torch.zeros(objects, parts))
        self.scale_bias = nn.Parameter(torch.zeros(objects, parts))

    def forward(self, feature: Tensor) -> PartRelation:
        hidden = torch.einsum("...kf,kfh->...kh", feature, self.hidden_weight) + self.hidden_bias
        read = torch.einsum("...kh,kho->...ko", hidden.relu(), self.read_weight)
        read = read.unflatten(-1, (self.parts, -1))  # (B, objects, parts, 8 or 2)
        presence, scale, dynamic = read[..., 0], read[..., 1], read[..., 2:]
        if not self.deformable:
            dynamic = torch.zeros_like(self.static).expand(*read.shape[:-1], 6)
        return PartRelation(
            poses.from_parameters(self.static + dynamic),
            presence + self.presence_bias,
            F.softplus(scale + self.scale_bias + 0.5) + _SMALLEST_SCALE,
            dynamic,
        )


def place_votes(
    relation: PartRelation, pose: Tensor, log_presence: Tensor, noise: Tensor | None = None
) -> ObjectVotes:
    """Return the votes of objects with poses (B, objects, 6) and log presences (B, objects).

    Args:
        noise: numbers (B, objects, parts) that are added to the logits of the votes' presences.
    """
    logits = relation.presence_logits if noise is None else relation.presence_logits + noise
    votes = poses.compose(pose[..., None, :], relation.pose)
    present = log_presence[..., None] + F.logsigmoid(logits)
    return ObjectVotes(votes.transpose(-3, -2), present.mT, relation.scale.mT, relation.dynamic)


def mixing_logits(votes: ObjectVotes, epsilon: float, normalized: bool = True) -> Tensor:
    """Return the log mixing weights of dummy (column 0) and objects, (B, parts, 1 + K).

    Args:
        epsilon: the weight of the dummy, compared with a_k a_km.
        normalized: whether the weights sum to one.
    """
    weights = F.pad(votes.log_presence, (1, 0), value=math.log(epsilon))
    return weights.log_softmax(-1) if normalized else weights


def component_distribution(votes: ObjectVotes, sigma_dummy: float) -> dist.TorchDistribution:
    """Return the distribution of a part's pose for each parent, batch shape (B, parts, 1 + K)."""
    center = F.pad(votes.pose, (0, 0, 1, 0))
    scale = F.pad(votes.scale, (1, 0), value=sigma_dummy)
    return dist.Normal(center, scale[..., None]).to_event(1)


def log_parents(
    votes: ObjectVotes, pose: Tensor, epsilon: float, sigma_dummy: float, normalized: bool = True
) -> Tensor:
    """Compute log p(parent) + log p(x_m | parent), (B, parts, 1 + objects); column 0: dummy.

    Args:
        pose: x_m, (B, parts, 6).
        epsilon, sigma_dummy: weight and standard deviation of the dummy.
        normalized: whether p(parent) sums to one.
    """
    density = component_distribution(votes, sigma_dummy).log_prob(pose[..., None, :])
    return mixing_logits(votes, epsilon, normalized) + density


def part_pose_distribution(
    votes: ObjectVotes, presence: Tensor, relaxed: bool, epsilon: float, sigma_dummy: float
) -> ParentMixture:
    """Return p(pose | t) of parts: a mixture over parents if present, the dummy's if absent.

    Args:
        presence: values (B, parts) of the presence site of the parts.
        relaxed: whether they are logits.
    """
    absent = F.logsigmoid(-presence) if relaxed else (-presence).log1p()
    weights = mixing_logits(votes, epsilon) + log_presence(presence, relaxed)[..., None]
    dummy, objects = weights.split([1, weights.shape[-1] - 1], dim=-1)
    logits = torch.cat([torch.logaddexp(dummy, absent[..., None]), objects], dim=-1)
    return ParentMixture(
        dist.Categorical(logits=logits), component_distribution(votes, sigma_dummy)
    )


def noisy_or(votes: ObjectVotes, leak: float) -> Tensor:
    """Compute presence logits (B, parts) by noisy-or: 1 - (1 - leak) prod_k (1 - a_k a_km).

    Each vote may switch the part on by itself, and so may the leak.
    """
    # the log of zero occurs for a present object with a certain vote
    silent = torch.log1p(-votes.log_presence.exp().clamp(max=1 - 1e-6)).sum(-1)
    silent = silent + math.log1p(-leak)  # log p(part is off), below zero
    return (-silent.expm1()).log() - silent
