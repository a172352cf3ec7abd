"""Layers of matrix capsules: a 4x4 pose and a presence each, routed from layer to layer.

Parents on a grid see the children, on another grid, through windows, as in a convolution. Child i,
with pose M_i, casts the vote V_ij = M_i W_ij for parent j. The learned W_ij depends on the types of
both and on the child's position in the window. A routing infers the parents from the votes.

Scales. Poses and transformations start near the identity, so that poses keep their size from layer
to layer, for any number of children whose mean they are. Transformations start closer to the
identity than their noise is wide. From a distance of .3, as in the released code, pilots needed
twice as many digits, perhaps because routing assigns children by chance before anything is learned.
The gain of a parent grows with the number of its votes, n_j, which differs between layers by orders
of magnitude. The gain is therefore divided by a fair number n, the number of votes that a parent
gets if all children are present and shared equally:

    a_j = sigmoid(lambda [beta_a - n_j / n (beta_u + mean of ln sigma)])

This is the mixture's distribution with n D beta_a and lambda / (n D), for poses of D numbers. The
paper's lambda, .01, corresponds to .75 and .36 here in the convolutional layers of its full
network.

Votes take much memory. They are computed and routed for a few images at a time, so that they stay
in the cache. Where a batch has many, none is kept, and they are computed again in the backward
pass.

References:
    Hinton, Sabour & Frosst 2018, "Matrix capsules with EM routing" (ICLR), sections 4 and 5.
"""

import math
from typing import Any, NamedTuple

import torch
from pyro.nn import PyroModule
from torch import Tensor, nn

from capsule_zoo.models.checks import check_at_least, check_positive
from capsule_zoo.models.common.chunks import map_in_chunks
from capsule_zoo.models.routing.parent_distribution import (
    VOTE_NOISE,
    Belief,
    ParentDistribution,
    Routed,
    Routing,
    unclaimed_log_density,
)
from capsule_zoo.models.routing.votes import Votes, Windows

POSE = 4  # a pose is a 4x4 matrix
POSE_SPREAD = 0.3  # standard deviation of the first poses from the identity
SPREAD = 0.1  # standard deviation of the first transformations from the identity
_IN_CACHE = 2**18  # numbers of votes of a chunk, which stay in a cache
RIGHT_COLUMN = ((0, 3), (1, 3))  # the paper's "first two elements of the right-hand column"


class CapsuleGrid(NamedTuple):
    """Poses and presences of capsules of several types at every cell of a grid, row by row.

    Attributes:
        pose: (N, cells, types, 4, 4).
        logits: log-odds of the presences, (N, cells, types).
        shape: height and width of the grid, in cells.
    """

    pose: Tensor
    logits: Tensor
    shape: tuple[int, int]

    @property
    def presence(self) -> Tensor:
        """The presences (N, cells, types)."""
        return self.logits.sigmoid()


class PrimaryCapsules(PyroModule):
    """The primary capsules: poses and presences by a 1x1 convolution of a feature map.

    Where features have a mean square of 1, the first poses deviate by .3 from the identity.

    Called on features (N, channels, H, W) it returns a `CapsuleGrid` of H x W cells.
    """

    def __init__(self, channels: int, capsules: int) -> None:
        super().__init__()
        check_at_least(1, channels=channels, capsules=capsules)
        self.capsules = capsules
        self.read = PyroModule[nn.Conv2d](channels, capsules * (POSE * POSE + 1), 1)
        nn.init.normal_(self.read.weight, std=POSE_SPREAD / math.sqrt(channels))
        pose = torch.eye(POSE).flatten()
        start = torch.cat([pose.new_zeros(1), pose]).repeat(capsules)  # log-odds 0, pose identity
        self.read.bias = nn.Parameter(start)

    def forward(self, features: Tensor) -> CapsuleGrid:
        maps = self.read(features).flatten(2).mT.unflatten(2, (self.capsules, -1))
        pose = maps[..., 1:].unflatten(3, (POSE, POSE))  # (N, cells, types, 4, 4)
        return CapsuleGrid(pose, maps[..., 0], (features.shape[2], features.shape[3]))


class _Cast(torch.autograd.Function):
    """The autograd function of votes (N, parents x c, r x i) from poses and transformations.

    They are V = sum_k M_k W_k, with k as an in-place loop, for a few rows at a time. Their gradient
    is rotated once, and both sums over it are then matrix products for each child.
    """

    @staticmethod
    def forward(ctx: Any, pose: Tensor, transform: Tensor) -> Tensor:
        ctx.save_for_backward(pose, transform)
        wide = transform[:, :, None].expand(-1, -1, POSE, -1).flatten(2)  # a copy for every row r
        votes = pose.new_empty(len(pose), len(wide), wide.shape[2])
        rows = max(1, _IN_CACHE // votes[0].numel())
        for chunk, part in zip(pose.split(rows), votes.split(rows), strict=True):
            torch.mul(chunk[:, None, 0], wide[:, 0], out=part)
            for k in range(1, POSE):
                part.addcmul_(chunk[:, None, k], wide[:, k])
        return votes

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        pose, transform = ctx.saved_tensors
        shape = len(pose), POSE, POSE, transform.shape[2]  # N, k, r, i
        rotated = grad.mT.contiguous().view(len(pose) * POSE, shape[3], -1).transpose(0, 1)
        rows = pose.view(shape).permute(3, 1, 0, 2).flatten(2)  # (i, k, N x r)
        matrices = transform.permute(2, 1, 0).contiguous()  # (i, k, parents x c)
        to_pose = torch.bmm(matrices, rotated.mT).unflatten(2, (-1, POSE))  # (i, k, N, r)
        to_transform = torch.bmm(rows, rotated)  # (i, k, parents x c)
        return to_pose.permute(2, 1, 3, 0).flatten(2), to_transform.permute(2, 1, 0)


def cast_votes(pose: Tensor, transform: Tensor) -> Tensor:
    """Compute the votes V_ij = M_i W_ij, by column, (N, positions, parents, 16, children).

    Args:
        pose: M of the children that are seen, (N, positions, children, 4, 4).
        transform: W, (children, parents, 4, 4).
    """
    images, positions, children = pose.shape[:3]
    rows = pose.permute(0, 1, 4, 3, 2).reshape(images * positions, POSE, POSE * children)
    columns = transform.permute(1, 3, 2, 0).flatten(0, 1).contiguous()  # (parents x c, k, children)
    votes = _Cast.apply(rows, columns)  # (images x positions, parents x c, r x i)
    return votes.view(images, positions, -1, POSE * POSE, children)


class CapsuleLayer(Routed):
    """A capsule layer: parents see children through windows, and a routing infers them.

    Args:
        windows: the children that each parent sees.
        children, parents: types of capsules.
        routing: infers the parents, such as `EMRouting(3)` of `capsule_zoo.guides`.
        tied: whether all cells of a window share one transformation; otherwise each has its own.
        spread: standard deviation of the first transformations from the identity.
        inverse_temperature: lambda, the inverse temperature of the parents' presences, for the
            average gain with each number of the votes, of which a parent has n.
        noise: variance that is added to the parents' variances.
        recompute: compute the votes again in the backward pass instead of keeping them; by default
            where there are many, see `map_in_chunks`.

    Raises:
        ValueError: a number below 1, or one that must be positive and is not.

    Called on the `CapsuleGrid` of the children it returns the `CapsuleGrid` of the parents.
    """

    cells: Tensor
    claims: Tensor

    def __init__(
        self,
        windows: Windows,
        children: int,
        parents: int,
        routing: Routing,
        *,
        tied: bool = False,
        spread: float = SPREAD,
        inverse_temperature: float = 16.0,
        noise: float = VOTE_NOISE,
        recompute: bool | None = None,
    ) -> None:
        super().__init__()
        check_at_least(1, children=children, parents=parents)
        check_positive(spread=spread, inverse_temperature=inverse_temperature, noise=noise)
        self.recompute = recompute
        self.inverse_temperature = inverse_temperature
        self.noise = noise
        self.shape = windows.shape
        self.register_buffer("cells", windows.cells, persistent=False)
        self.register_buffer("claims", windows.claims, persistent=False)
        places = 1 if tied else windows.cells.shape[1]
        apart = spread * torch.randn(places, children, parents, POSE, POSE)
        self.route_by(routing, places * children, parents, POSE * POSE)
        self.votes_per_parent = windows.votes_per_parent() * children / parents
        self.transform = nn.Parameter(torch.eye(POSE) + apart)  # W
        self.beta_a = nn.Parameter(torch.full((parents,), -0.5))  # not 0: all would be on
        self.beta_u = nn.Parameter(torch.zeros(parents))

    @property
    def windows(self) -> Windows:
        return Windows(self.cells, self.claims, self.shape)

    def distribution(self) -> ParentDistribution:
        """Return the prior of the parents, before any vote."""
        fair = POSE * POSE * self.votes_per_parent
        beta_u = unclaimed_log_density(self.beta_u, POSE * POSE)
        temperature = self.inverse_temperature / fair
        return ParentDistribution(
            fair * self.beta_a, beta_u, temperature, self.noise, self.routing_connections()
        )

    def routing_connections(self) -> Tensor | None:
        """Return the connections of a window's children, (numbers, parents, window x types)."""
        connections = super().routing_connections()
        if connections is None:
            return None
        return connections.repeat(1, 1, self.cells.shape[1] // len(self.transform))

    def transforms(self) -> Tensor:
        """Return the transformations W_ij of a window, (window x types, parents, 4, 4)."""
        return self.transform.expand(self.cells.shape[1], -1, -1, -1, -1).flatten(0, 1)

    def votes(self, children: CapsuleGrid, transforms: Tensor | None = None) -> Votes:
        """Compute the children's votes for a routing, with poses stored column by column."""
        transforms = self.transforms() if transforms is None else transforms
        windows = self.windows
        values = cast_votes(windows.see(children.pose).flatten(2, 3), transforms)
        return Votes(self.place(values), windows.see(children.presence).flatten(2), windows)

    def place(self, values: Tensor) -> Tensor:
        """Add the positions of the children to their votes; here nothing is added."""
        return values

    def belief(self, children: CapsuleGrid) -> Belief:
        """Return the belief of the routing about the parents, with responsibilities."""
        return self.routing(self.votes(children), self.distribution())

    def forward(self, children: CapsuleGrid) -> CapsuleGrid:
        transforms, distribution = self.transforms(), self.distribution()

        def route(
            pose: Tensor, logits: Tensor, transforms: Tensor, *learned: Tensor
        ) -> tuple[Tensor, Tensor]:
            votes = self.votes(CapsuleGrid(pose, logits, children.shape), transforms)
            beta_a, beta_u, *extras = learned
            connections = extras[0] if extras else None
            here = distribution._replace(beta_a=beta_a, beta_u=beta_u, connections=connections)
            return self.routing.parents(votes, here)

        votes_of_one = len(self.cells) * transforms.numel()
        batch = (children.pose, children.logits)
        shared: tuple[Tensor, ...] = (transforms, distribution.beta_a, distribution.beta_u)
        if distribution.connections is not None:
            shared += (distribution.connections,)
        mean, logits = map_in_chunks(route, batch, shared, votes_of_one, self.recompute)
        return CapsuleGrid(mean.unflatten(3, (POSE, POSE)).mT, logits, self.shape)


class ClassCapsules(CapsuleLayer):
    """The class capsules: one parent per class sees all cells by a shared transformation.

    This would lose the position of a child, so the position is added to its votes: the center of
    its cell, from 0 to 1 down and across, is added to two elements of the vote ("coordinate
    addition").

    Classes start nearly alike, so that they share the children and become different as they learn.
    From transformations as different as in the layers below, each class keeps the children that it
    got by chance.

    Args:
        children: types of capsules.
        classes: one parent for each.
        grid: height and width of the children's grid, in cells.
        routing, spread, options: as for `CapsuleLayer`.
        coordinates: (row, column) of the two elements of the pose to which the vertical and
            horizontal position of a cell are added; None adds nothing.

    Raises:
        ValueError: `coordinates` are not two different elements of the pose.
    """

    offset: Tensor

    def __init__(
        self,
        children: int,
        classes: int,
        grid: tuple[int, int],
        routing: Routing,
        coordinates: tuple[tuple[int, int], tuple[int, int]] | None = RIGHT_COLUMN,
        spread: float = 0.01,
        **options: Any,
    ) -> None:
        windows = Windows.whole(grid[0] * grid[1])
        super().__init__(windows, children, classes, routing, tied=True, spread=spread, **options)
        offset = _coordinates(grid, coordinates)  # (16, cells)
        self.register_buffer("offset", offset.repeat_interleave(children, 1), persistent=False)

    def place(self, values: Tensor) -> Tensor:
        return values + self.offset


def _coordinates(grid: tuple[int, int], elements: tuple | None) -> Tensor:
    """Return the coordinates that each cell of a grid adds to a pose, by column, (16, cells)."""
    height, width = grid
    offset = torch.zeros(POSE, POSE, height, width)
    if elements is not None:
        inside = all(len(e) == 2 and set(e) <= set(range(POSE)) for e in elements)
        if len(set(elements)) != 2 or not inside:
            raise ValueError(
                f"coordinates must be two different (row, column) of a {POSE}x{POSE} pose, such "
                f"as {RIGHT_COLUMN}, or None, not {elements!r}"
            )
        (down, across) = elements
        offset[down] += ((torch.arange(height) + 0.5) / height)[:, None]
        offset[across] += (torch.arange(width) + 0.5) / width
    return offset.transpose(0, 1).reshape(POSE * POSE, height * width)
