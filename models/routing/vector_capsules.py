"""Vector capsules: the direction of a vector is a pose and its length is a presence.

A network computes maps from its input, and primary capsules compute vectors from the maps. One
capsule for each class is inferred from their votes by routing:

    maps = network(input)                                     # (B, channels, H, W)
    u_i = squash(conv9x9 stride 2(maps))                      # primary capsules, (B, I, 8)
    V_ij = W_ij u_i                                           # votes, (B, I, J, 16)
    v_j = |v_j| direction_j, inferred from V_.j by routing    # class capsules, (B, J, 16)

A length is the presence that the routing infers, so it lies in [0, 1). The margin loss is zero if
the length is over .9 for a class that is present and under .1 for a class that is absent.

References:
    Sabour, Frosst & Hinton 2017, "Dynamic Routing Between Capsules" (arXiv 1710.09829): squash is
    equation 1, the margin loss equation 4, sizes are from section 4. The initial
    transformations are our own. They give class capsules about half the greatest length, at any
    size.
"""

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from pyro.nn import PyroModule, pyro_method
from torch import Tensor, nn

from capsule_zoo.models.base import NamedModule
from capsule_zoo.models.checks import check_at_least
from capsule_zoo.models.common.chunks import map_in_chunks
from capsule_zoo.models.networks.convolutional import Conv2d
from capsule_zoo.models.networks.leading import over_leading
from capsule_zoo.models.routing.parent_distribution import (
    ParentDistribution,
    Routed,
    Routing,
    unclaimed_log_density,
)
from capsule_zoo.models.routing.votes import Votes

PRIMARY, CLASS = 8, 16  # numbers in a primary and in a class capsule
KERNEL = 9  # kernel of the primary capsules' convolution
_TINY = 1e-12


def squash(vectors: Tensor) -> Tensor:
    """Squash vectors of the last dim: s |s| / (1 + |s|^2), of unchanged direction, length below 1.

    Its value and gradient are finite everywhere, and zero (up to 1e-6) at s = 0.
    """
    square = vectors.square().sum(-1, keepdim=True).clamp_min(_TINY)
    return vectors * (square.sqrt() / (1 + square))


def primary_capsules(maps: Tensor) -> Tensor:
    """Return maps (B, types x 8, height, width) as primary capsules (B, types x cells, 8)."""
    vectors = maps.flatten(2).unflatten(1, (-1, PRIMARY)).transpose(2, 3)  # (B, types, cells, 8)
    return squash(vectors.flatten(1, 2))


def margin_loss(length: Tensor, presence: Tensor) -> Tensor:
    """Compute the margin loss of lengths l of class capsules, (*batch,).

    It is sum_k T_k max(0, .9 - l_k)^2 + .5 (1 - T_k) max(0, l_k - .1)^2.

    Args:
        length: lengths of the class capsules, (*batch, classes).
        presence: T, 1 for classes that are in the image and 0 for others, (*batch, classes).
    """
    missed, imagined = (0.9 - length).clamp_min(0), (length - 0.1).clamp_min(0)
    return (presence * missed.square() + 0.5 * (1 - presence) * imagined.square()).sum(-1)


class ClassVectors(Routed):
    """The layer from child capsules (B, children, 8) to class capsules (B, classes, 16).

    Args:
        children, classes: numbers of capsules; every class sees every child.
        routing: infers the classes from the votes, such as `DynamicRouting(3, fair=False)` of
            `capsule_zoo.guides`; None for a linear layer and squash, without votes. The costs of a
            parent, which only EM routing reads, are fixed: a parent is present where votes lie
            closer together than draws of a standard normal.
    """

    def __init__(self, children: int, classes: int, routing: Routing | None) -> None:
        super().__init__()
        self.classes = classes
        self.mixes = routing is None
        if routing is None:
            self.mix = PyroModule[nn.Linear](children * PRIMARY, classes * CLASS)
        else:
            self.transform = nn.Parameter(first_transforms(children, classes))  # W
            self.route_by(routing, children, classes, CLASS)

    def forward(self, children: Tensor) -> Tensor:
        if self.mixes:
            return squash(self.mix(children.flatten(1)).unflatten(1, (self.classes, CLASS)))
        learned = self.transform, self.routing, self.routing_connections()
        logits, direction = route_classes(children, *learned)
        return logits.sigmoid()[..., None] * direction


def first_transforms(children: int, classes: int) -> Tensor:
    """Initialize transformations W, (children, 8, classes x 16), for `route_classes`."""
    spread = classes / math.sqrt(children * CLASS)
    return spread * torch.randn(children, PRIMARY, classes * CLASS)


def route_classes(
    children: Tensor, transform: Tensor, routing: Routing, connections: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Infer class capsules from children (B, children, 8) by routing.

    Args:
        transform: W, (children, 8, classes x 16).
        routing: infers the classes from the votes W_ij u_i.
        connections: learned connections of the routing, (numbers, classes, children).

    Returns:
        Log-odds of the classes' presences, (B, classes), and the directions of their capsules,
        (B, classes, 16), of length 1.
    """
    votes_of_one = transform.shape[0] * transform.shape[2]
    shared = (transform,) if connections is None else (transform, connections)
    route = partial(_route, routing)
    logits, direction = map_in_chunks(route, (children,), shared, votes_of_one)
    return logits, direction


def votes_for_classes(
    children: Tensor, transform: Tensor, connections: Tensor | None = None
) -> tuple[Votes, ParentDistribution]:
    """Return the votes of children (B, children, 8) for classes, and the prior of the classes."""
    values = _Cast.apply(children, transform).unflatten(1, (-1, CLASS))[:, None]
    none = values.new_zeros(values.shape[2])
    beta_u = unclaimed_log_density(none, CLASS)
    distribution = ParentDistribution(
        none, beta_u, inverse_temperature=0.01, connections=connections
    )
    return Votes(values, values.new_ones(len(children), 1, values.shape[4])), distribution


def _route(routing: Routing, children: Tensor, *learned: Tensor) -> tuple[Tensor, Tensor]:
    mean, logits = routing.parents(*votes_for_classes(children, *learned))
    return logits[:, 0], F.normalize(mean, dim=-1)[:, 0]


class _Cast(torch.autograd.Function):
    """The autograd function of votes (B, classes x 16, children) from children (B, children, 8).

    Their transpose is written image by image, which is faster to transpose than child by child.
    """

    @staticmethod
    def forward(ctx: Any, children: Tensor, transform: Tensor) -> Tensor:
        ctx.save_for_backward(children, transform)
        votes = children.new_empty(*children.shape[:2], transform.shape[2])
        torch.bmm(children.transpose(0, 1), transform, out=votes.transpose(0, 1))
        return votes.mT.contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        children, transform = ctx.saved_tensors
        grad = grad.mT.contiguous().transpose(0, 1)
        return (
            torch.bmm(grad, transform.mT).transpose(0, 1),
            torch.bmm(children.transpose(0, 1).mT, grad),
        )


class VectorCapsules(NamedModule):
    """A convolutional network with primary capsules, and a capsule for each class by routing.

    Args:
        network: returns maps of `channels` channels.
        channels: number of maps.
        grid: height and width of the maps, 9 or more.
        types: number of types of primary capsules at each position.
        classes, routing: as for `ClassVectors`.

    Raises:
        ValueError: a number below 1, or maps that are too small.

    Called on inputs (*batch, channels, height, width) of the network it returns the class capsules,
    (*batch, classes, 16).
    """

    def __init__(
        self,
        network: nn.Module,
        channels: int,
        grid: tuple[int, int],
        types: int,
        classes: int,
        routing: Routing | None,
    ) -> None:
        super().__init__()
        check_at_least(1, types=types, classes=classes)
        check_at_least(KERNEL, grid=grid)
        cells = math.prod((n - KERNEL) // 2 + 1 for n in grid)
        self.network = network
        self.primary = Conv2d(channels, types * PRIMARY, KERNEL, stride=2)
        keep_scale(self.primary, channels * KERNEL**2)
        self.classes = ClassVectors(types * cells, classes, routing)

    def forward(self, inputs: Tensor) -> Tensor:
        return over_leading(self._infer, inputs, event_dim=3)

    @pyro_method
    def scores(self, inputs: Tensor) -> Tensor:
        """Compute the scores: the lengths of the class capsules, (*batch, classes)."""
        return self(inputs).norm(dim=-1)

    def _infer(self, inputs: Tensor) -> Tensor:
        """Compute the class capsules (B, classes, 16) from inputs (B, channels, height, width)."""
        return self.classes(primary_capsules(self.primary(self.network(inputs))))


def keep_scale(layer: nn.Conv2d | nn.ConvTranspose2d, fan_in: float) -> None:
    """Initialize weights that keep the scale of inputs before an activation such as ReLU.

    Args:
        fan_in: number of inputs of an output, on average.
    """
    nn.init.normal_(layer.weight, std=math.sqrt(2 / fan_in))
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
