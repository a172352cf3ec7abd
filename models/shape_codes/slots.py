"""The law of observed parts of several objects, with the choice of a parent summed out."""

from __future__ import annotations

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import constraints

from capsule_zoo.models.shape_codes.kinds import ShapedLaw


class SlotsLaw(dist.TorchDistribution):
    """The law of parts whose presences and poses are observed, event shape (7,): t, then A.

    The choice among the dummy and the objects is summed out. The pose of a part that is off is not
    seen, and is summed out too. With one object it is `PartLaw`.

    Args:
        law: of a part for each choice, with batch (*batch, 1 + S).
    """

    arg_constraints = {}
    support = constraints.independent(constraints.real, 1)

    def __init__(self, law: ShapedLaw) -> None:
        self.choice = dist.Categorical(logits=law.log_weights)
        self.presence = dist.Bernoulli(logits=law.presence_logits)
        self.pose = dist.Normal(law.vote, law.scale_on).to_event(1)
        super().__init__(law.vote.shape[:-2], torch.Size([7]), validate_args=False)

    def expand(self, batch_shape: torch.Size, _instance: None = None) -> SlotsLaw:
        """Return the same law with more batch dims."""
        shape = torch.Size(batch_shape)
        twin = SlotsLaw.__new__(SlotsLaw)
        columns = self.choice.logits.shape[-1]
        twin.choice = self.choice.expand(shape)
        twin.presence = self.presence.expand((*shape, columns))
        twin.pose = self.pose.expand((*shape, columns))
        dist.TorchDistribution.__init__(twin, shape, torch.Size([7]), validate_args=False)
        return twin

    def log_prob(self, value: Tensor) -> Tensor:
        """Compute the log density of parts (*batch, 7), in nats."""
        there, pose = value[..., :1], value[..., None, 1:]
        below = self.presence.log_prob(there) + there * self.pose.log_prob(pose)
        return (self.choice.logits + below).logsumexp(-1)

    def sample(self, sample_shape: torch.Size = torch.Size()) -> Tensor:  # noqa: B008
        """Draw parts (*sample_shape, *batch, 7)."""
        chosen = self.choice.sample(sample_shape)[..., None]
        there = self.presence.sample(sample_shape).gather(-1, chosen)
        pose = self.pose.sample(sample_shape)
        pose = pose.gather(-2, chosen[..., None].expand(*chosen.shape, 6)).squeeze(-2)
        return torch.cat([there, pose], dim=-1)
