"""Routings with learned connections: a weight of the layer, not only the vote, selects a parent.

None of them iterates. Each learns some numbers c for every connection of a child and a parent,
which the layer owns (`Routing.connections`):

    SelfAttentionRouting  R_ij = softmax_j(V_ij . sum_k w_k V_kj / sqrt(D)), s_j = sum_i (R + c) V
    SelfRouting           R_ij = softmax_j(c_ij . V_ij + b_ij), a_j = its fraction of the children
    UncertainRouting      c_ij ~ Normal(0, 1), R_ij = softmax_j(c_ij), then mu, sigma2 and a of EM

The softmax is over all parents that see the child, at all positions, as in every routing here.

References:
    Mazzia, Salvetti & Chiaberge 2021, "Efficient-CapsNet: capsule network with self-attention
    routing" (Scientific Reports 11:14634), equations 4 to 8.
    Hahn, Pyeon & Kim 2019, "Self-Routing Capsule Networks" (NeurIPS), section 3.
    De Sousa Ribeiro, Leontidis & Kollias 2020, "Introducing Routing Uncertainty in Capsule
    Networks" (NeurIPS). From it are the random connections that all images share, their
    variational posterior and its cost as a description length. The parents' distribution is ours.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from capsule_zoo.guides.routing import LengthRouting
from capsule_zoo.models.checks import check_positive
from capsule_zoo.models.routing.parent_distribution import (
    Belief,
    ParentDistribution,
    Routing,
    best_belief,
)
from capsule_zoo.models.routing.votes import Votes

_TINY = 1e-6
_FIRST_SCALE = 0.1  # first standard deviation of an uncertain connection


@dataclass(frozen=True)
class LearnedRouting(Routing):
    """The base class of routings with learned connections.

    Attributes:
        iterations: 1, because the parents are inferred once.

    Raises:
        ValueError: `iterations` other than 1.
    """

    iterations: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.iterations != 1:
            raise ValueError(
                f"iterations must be 1 for {type(self).__name__}, which infers its parents once, "
                f"not {self.iterations!r}"
            )

    def layer_connections(self, votes: Votes, distribution: ParentDistribution) -> Tensor:
        """Return the layer's learned connections, or zeros if it has none."""
        if distribution.connections is not None:
            return distribution.connections
        first = self.connections(votes.children, votes.shape[2], votes.size)
        assert first is not None
        return torch.zeros_like(first).to(votes.values)


@dataclass(frozen=True)
class SelfAttentionRouting(LearnedRouting, LengthRouting):
    """The routing by self-attention, with a learned bias added to every coupling.

    Joint distribution: none. R would be the E step of a mixture whose parents have the mean of all
    votes and unit variance, but for the means' own lengths; and the added numbers c, no
    responsibilities, take the parents away from any M step.

    Attributes:
        iterations: 1.
        fair: as for `LengthRouting`; True also takes the mean of the votes instead of their sum.
    """

    def connections(self, children: int, parents: int, size: int) -> Tensor:
        return torch.zeros(1, parents, children)

    def points(
        self, votes: Votes, distribution: ParentDistribution
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        every = torch.ones_like(votes.uniform())
        attended = votes.gather_sum(every) / (votes.children if self.fair else 1.0)
        responsibility = votes.compete(votes.agreement(attended) / votes.size**0.5)
        total = votes.gather_sum(responsibility + self.layer_connections(votes, distribution)[0])
        shared = total / votes.votes_per_parent if self.fair else total
        length = shared.square().sum(3).clamp_min(_TINY**2).sqrt()  # a = 1 - exp(-|s|)
        yield responsibility, total, length + (-torch.expm1(-length)).log()


@dataclass(frozen=True)
class SelfRouting(LearnedRouting):
    """The routing in which every child selects its parent from the child's pose alone.

    Votes are linear in the child's pose, so that a linear distribution of the choice given the vote
    is one given the pose.

    Joint distribution: z_i ~ Categorical(softmax(c_i . V_i + b_i)), the gate of a mixture of
    experts. Nothing is observed that would change it, so that the couplings are this distribution
    itself,
    exactly, and not a posterior: no parent is inferred from agreement.
    """

    def connections(self, children: int, parents: int, size: int) -> Tensor:
        return 0.1 * torch.randn(size + 1, parents, children)  # no ties between classes

    def beliefs(self, votes: Votes, distribution: ParentDistribution) -> Iterator[Belief]:
        *weights, bias = self.layer_connections(votes, distribution)
        responsibility = votes.compete(votes.read(torch.stack(weights)) + bias)
        number, mean, variance = votes.gather(responsibility)
        most = votes.presence.sum(3, keepdim=True).clamp_min(_TINY)
        fraction = (number / most)[..., 0].clamp(_TINY, 1 - _TINY)
        yield Belief(responsibility, mean, variance + distribution.noise, fraction.logit())


@dataclass(frozen=True)
class UncertainRouting(LearnedRouting):
    """The routing by random connections, which are equal for all images.

    Joint distribution: c_ij ~ Normal(0, 1) once, and for every image the mixture of switchable
    Gaussians with z_i ~ Categorical(softmax(c_i)), where the votes are the likelihood. q(c) is
    Normal(m, s^2) for each connection, q(z | c) is the prior of z, and the parents are at their
    optimum. In training c is drawn once an update, and KL(q(c) || p(c)) / images is paid for every
    image: the description length of the connections, in nats. Afterwards c is at its mean.

    Attributes:
        iterations: 1.
        images: number of training images, over which the cost of the connections is divided.

    Raises:
        ValueError: `images` is not positive.
    """

    images: int = 60_000

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(images=self.images)

    def connections(self, children: int, parents: int, size: int) -> Tensor:
        mean = torch.zeros(parents, children)  # and the log standard deviation
        return torch.stack([mean, torch.full_like(mean, _FIRST_SCALE).log()])

    def draw_connections(self, connections: Tensor) -> Tensor:
        mean, log_scale = connections
        return (mean + log_scale.exp() * torch.randn_like(mean))[None]

    def cost(self, connections: Tensor) -> Tensor:
        mean, log_scale = connections
        nats = 0.5 * (mean.square() + (2 * log_scale).exp() - 1) - log_scale
        return nats.sum() / self.images

    def beliefs(self, votes: Votes, distribution: ParentDistribution) -> Iterator[Belief]:
        logits = self.layer_connections(votes, distribution)[0].expand(*votes.shape, votes.children)
        yield best_belief(votes, votes.compete(logits), distribution)


LEARNED: dict[str, type[LearnedRouting]] = {
    "attention": SelfAttentionRouting,
    "self": SelfRouting,
    "uncertain": UncertainRouting,
}
