"""The learned relation of parts to objects of several kinds with shape codes.

Every kind has its own arrangement of the parts, which the object's code c deforms. The code says
which parts are present, and where they are in the object's frame.
"""

import math

import pyro.distributions as dist
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import constraints

from capsule_zoo.models.parts import poses
from capsule_zoo.models.parts.parent_selection import (
    Belonging,
    ChildDistribution,
    Relation,
    first_transform,
)

_INITIAL_CODES = 0.05  # size of the first deformations, in units of the object's frame
_NEAR_LEAST = 0.01  # first distance of a scale from the least scale, in units of the least
_DUMMY_FRACTION = 1e-3  # fraction of parts of the dummy, in kinds set to distributions


class ShapeKinds(Relation):
    """The arrangements of parts in objects of every kind, and their deformation by codes.

    Parameters: `log_affinity` (log rho, (K, P)), `presence_logits` (g, (K, P)), `presence_codes`
    (w, (K, P, d)), `transform` (M = N - I, (K, P, 6)), `pose_codes` (U, (K, P, 6, d)) and
    `raw_scale` (sigma = sigma_min + softplus, (K, P, 6)).

    Args:
        kinds, parts, codes: K, P and d.
        belonging: weights and standard deviations.
    """

    def __init__(self, kinds: int, parts: int, codes: int, belonging: Belonging) -> None:
        super().__init__(belonging)
        self.log_affinity = nn.Parameter(torch.zeros(kinds, parts))
        self.presence_logits = nn.Parameter(torch.zeros(kinds, parts))
        self.presence_codes = nn.Parameter(_INITIAL_CODES * torch.randn(kinds, parts, codes))
        self.transform = nn.Parameter(first_transform((1, parts), (kinds, parts), 0.3))
        self.pose_codes = nn.Parameter(_INITIAL_CODES * torch.randn(kinds, parts, 6, codes))
        self.raw_scale = nn.Parameter(torch.full((kinds, parts, 6), -1.0))

    @property
    def place(self) -> Tensor:
        """The mean arrangement N of the parts in every kind, (K, P, 6)."""
        return poses.identity_like(self.transform) + self.transform

    @property
    def scale(self) -> Tensor:
        """The standard deviations sigma of the parts' poses, (K, P, 6)."""
        return self.sigma_min + F.softplus(self.raw_scale)

    def forward(self, kind: Tensor, pose: Tensor, code: Tensor) -> ChildDistribution:
        """Return the distribution of the parts given S objects.

        Args:
            kind: integers that broadcast to (B, S); they may be enumerated.
            pose: A, (B, S, 6).
            code: c, (B, S, d).

        Returns:
            The distribution, with batch (B, parts, 1 + S).
        """
        vote, logits = self.votes(kind, pose, code)
        vote = vote.movedim(-3, -2)  # (B, P, S, 6)
        logits = logits.movedim(-2, -1)
        scale = self.scale[kind].movedim(-3, -2).expand_as(vote)
        affinity = self.log_affinity[kind].movedim(-2, -1).expand_as(logits)
        first = vote[..., :1, :]
        dummy_vote = poses.identity_like(vote).expand_as(first)
        dummy_scale = torch.full_like(first, self.sigma_dummy)
        return ChildDistribution(
            F.pad(affinity, (1, 0), value=math.log(self.epsilon)),
            F.pad(logits, (1, 0), value=self.dummy_logit),
            torch.cat([dummy_vote, vote], dim=-2),
            torch.cat([dummy_scale, scale], dim=-2),
            torch.cat([dummy_scale, torch.full_like(scale, self.sigma_off)], dim=-2),
        )

    def votes(self, kind: Tensor, pose: Tensor, code: Tensor) -> tuple[Tensor, Tensor]:
        """Return each object's votes for poses (B, S, P, 6) and presence logits (B, S, P) of parts.

        Args: as for `forward`.
        """
        bent = torch.einsum("...pid,...d->...pi", self.pose_codes[kind], code)
        shift = torch.einsum("...pd,...d->...p", self.presence_codes[kind], code)
        return compose_votes(pose, self.place[kind] + bent), self.presence_logits[kind] + shift

    def part_distribution(self, kind: Tensor, pose: Tensor, code: Tensor) -> "PartDistribution":
        """Return the distribution of observed parts, with the parent selection summed out.

        Args: as for `forward`.
        """
        vote, logits = self.votes(kind, pose, code)
        scale, affinity = self.scale[kind].movedim(-3, -2), self.log_affinity[kind].mT
        clutter = dist.Bernoulli(logits=vote.new_tensor(self.dummy_logit))
        dummy = dist.Normal(poses.identity_like(vote), self.sigma_dummy)
        log_odds = affinity - math.log(self.epsilon)
        return PartDistribution(vote.movedim(-3, -2), logits.mT, scale, log_odds, clutter, dummy)

    @torch.no_grad()
    def start_from(
        self, presence: Tensor, mean: Tensor, loadings: Tensor, std: Tensor, mask: Tensor
    ) -> None:
        """Initialize the kinds by distributions of their parts, for objects at the identity.

        Presences do not depend on codes at first, and hardly any part belongs to the dummy.

        Args:
            presence: probabilities, (K, P).
            mean, std: mean and standard deviation of the poses, (K, P, 6).
            loadings: derivative of the poses by the codes, (K, P, 6, d).
            mask: whether a part's poses are known, (P,); other parts keep their arrangement.
        """
        mask = mask[:, None]
        self.transform.copy_(torch.where(mask, mean - poses.identity_like(mean), self.transform))
        self.pose_codes.copy_(torch.where(mask[..., None], loadings, self.pose_codes))
        least = _NEAR_LEAST * self.sigma_min
        raw = (std - self.sigma_min).clamp(min=least).expm1().log()
        self.raw_scale.copy_(torch.where(mask, raw, self.raw_scale))
        self.presence_logits.copy_(presence.logit())
        self.presence_codes.zero_()
        self.log_affinity.fill_(math.log(self.epsilon / _DUMMY_FRACTION))


def compose_votes(pose: Tensor, arrangement: Tensor) -> Tensor:
    """Compose one pose (*batch, 6) with many poses (*batch, P, 6), as `poses.compose` does.

    It does equal sums in fewer passes over memory.
    """
    outer = pose.unflatten(-1, (2, 3)).unsqueeze(-3)  # (*batch, 1, 2, 3)
    inner = arrangement.unflatten(-1, (2, 3))  # (*batch, P, 2, 3)
    rotated = outer[..., :1] * inner[..., :1, :] + outer[..., 1:2] * inner[..., 1:, :]
    return (rotated + F.pad(outer[..., 2:], (2, 0))).flatten(-2)


class PartDistribution(dist.TorchDistribution):
    """The distribution of parts with observed presences and poses, event (7,): t, then A.

    The choice among the dummy and S objects is summed out. The pose of a part that is off is not
    seen, and is summed out too.

    Args:
        vote: means of the poses, (*batch, S, 6).
        logits: logits of the presences, (*batch, S).
        scale: standard deviations of the poses, broadcasts to `vote`.
        log_odds: log weights of the objects compared with the dummy, broadcasts to `logits`.
        dummy_presence, dummy_pose: the distributions of a part of the dummy.
    """

    arg_constraints = {}
    support = constraints.independent(constraints.real, 1)

    def __init__(
        self,
        vote: Tensor,
        logits: Tensor,
        scale: Tensor,
        log_odds: Tensor,
        dummy_presence: dist.Bernoulli,
        dummy_pose: dist.Normal,
    ) -> None:
        self.vote = vote
        self.logits = logits
        self.scale = scale
        self.log_odds = log_odds
        self.dummy_presence = dummy_presence
        self.dummy_pose = dummy_pose
        super().__init__(vote.shape[:-2], torch.Size([7]), validate_args=False)

    @property
    def choice(self) -> dist.Categorical:
        """The distribution of the parent of each part, (*batch); 0 is the dummy."""
        weights = F.pad(self.log_odds, (1, 0))
        return dist.Categorical(logits=weights.expand(*self.batch_shape, -1))

    def log_prob(self, value: Tensor) -> Tensor:
        """Compute the log density of parts (*batch, 7), in nats."""
        part_presence, pose = value[..., :1], value[..., None, 1:]
        distance = ((pose - self.vote) * self.scale.reciprocal()).square().sum(-1)
        constant = self.scale.log().sum(-1) + 3 * math.log(2 * math.pi)
        presence = part_presence * self.logits - F.softplus(self.logits)
        parent_terms = self.log_odds + presence - part_presence * (0.5 * distance + constant)
        clutter = self.dummy_presence.log_prob(part_presence)
        clutter = clutter + part_presence * self.dummy_pose.log_prob(pose).sum(-1)
        total = F.pad(self.log_odds, (1, 0)).logsumexp(-1)
        return torch.logaddexp(parent_terms.logsumexp(-1), clutter.squeeze(-1)) - total

    def sample(self, sample_shape: torch.Size = torch.Size()) -> Tensor:
        """Sample parts (*sample_shape, *batch, 7)."""
        component = self.choice.sample(sample_shape)[..., None]
        clutter, parent = component == 0, (component - 1).clamp(min=0)
        shape = (*component.shape[:-1], self.logits.shape[-1])
        logits = self.logits.expand(shape).gather(-1, parent)
        logits = torch.where(clutter, self.dummy_presence.logits, logits)
        vote, scale = (
            x.expand(*shape, 6)
            .gather(-2, parent[..., None].expand(*component.shape, 6))
            .squeeze(-2)
            for x in (self.vote, self.scale)
        )
        mean = torch.where(clutter, self.dummy_pose.mean, vote)
        std = torch.where(clutter, self.dummy_pose.stddev, scale)
        pose = mean + std * torch.randn_like(mean)
        return torch.cat([torch.bernoulli(logits.sigmoid()), pose], dim=-1)
