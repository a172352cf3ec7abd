"""Votes of child capsules for the poses of their parents, and who competes for whom.

Every child i casts a vote V_ij, D numbers, for each parent j that sees it. Routing, of whatever
kind, looks at the votes in two ways only: it gathers them by weight, sum_i r_ij V_ij and
sum_i r_ij V_ij^2, and it scores them, V_ij . a_j + V_ij^2 . b_j. `Votes` offers these two, so that
a routing is a few lines on tensors that are D times smaller than the votes.

Both passes are batched vector-matrix products over contiguous memory: no copy of the votes, tiled
transformation or one-hot assignment is ever formed. Their gradient for the votes is a sum of outer
products, one for each pass. It is composed once, after the last of them (`_Gate`), instead of once
a pass.

Parents lie on a grid of positions, each of which sees a window of the children's grid. A child
seen from several positions is claimed by all parents there, of all types: it chooses one among
them all (`compete`), and does not count once for each window.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

_TINY = 1e-12  # of a child: a parent that gets less has no votes at all


class Windows(NamedTuple):
    """Which cells of the children's grid each position of the parents' grid sees.

    Attributes:
        cells: row-major index of the seen cells, (positions, cells in a window).
        claims: for each cell the entries of `cells.flatten()` that point to it, padded with
            `cells.numel()`, (cells of the grid, most windows that a cell is in).
        shape: height and width of the parents' grid.
    """

    cells: Tensor
    claims: Tensor
    shape: tuple[int, int]

    @classmethod
    def sliding(cls, height: int, width: int, kernel: int, stride: int) -> Windows:
        """The windows of a convolution without padding.

        Raises:
            ValueError: the grid is smaller than the kernel.
        """
        if min(height, width) < kernel:
            raise ValueError(
                f"a {height}x{width} grid of capsules is smaller than the kernel, {kernel}; "
                "use larger images, a smaller kernel or fewer strides"
            )
        grid = torch.arange(height * width).view(height, width)
        cells = grid.unfold(0, kernel, stride).unfold(1, kernel, stride)
        shape = cells.shape[0], cells.shape[1]
        return cls._of(cells.reshape(shape[0] * shape[1], -1), height * width, shape)

    @classmethod
    def whole(cls, cells: int) -> Windows:
        """A single position that sees every cell."""
        return cls._of(torch.arange(cells)[None], cells, (1, 1))

    @classmethod
    def _of(cls, cells: Tensor, number: int, shape: tuple[int, int]) -> Windows:
        found: list[list[int]] = [[] for _ in range(number)]
        for entry, cell in enumerate(cells.flatten().tolist()):
            found[cell].append(entry)
        most = max(map(len, found))
        claims = [entries + [cells.numel()] * (most - len(entries)) for entries in found]
        return cls(cells, torch.tensor(claims), shape)

    def to(self, device: torch.device) -> Windows:
        return Windows(self.cells.to(device), self.claims.to(device), self.shape)

    def see(self, grid: Tensor) -> Tensor:
        """What each position sees of a grid (N, cells, ...): (N, positions, window, ...)."""
        return grid.index_select(1, self.cells.flatten()).unflatten(1, self.cells.shape)

    def gather_claims(self, seen: Tensor, fill: float) -> Tensor:
        """All windows' entries for each cell, (N, cells, claims, types).

        Args:
            seen: one number for each seen child, (N, positions, window x types).
            fill: where a cell is in fewer windows than the others.
        """
        entries = seen.reshape(len(seen), self.cells.numel(), -1)
        entries = torch.cat([entries, entries.new_full((len(seen), 1, entries.shape[2]), fill)], 1)
        return entries.index_select(1, self.claims.flatten()).unflatten(1, self.claims.shape)

    def num_claims(self) -> Tensor:
        """How many positions see each cell that is seen from a position, (positions, window)."""
        return (self.claims < self.cells.numel()).sum(1)[self.cells]

    def fair_share(self) -> float:
        """Cells that a position has on average, where each is shared equally among its windows."""
        return self.num_claims().reciprocal().sum().item() / len(self.cells)


class _Compete(torch.autograd.Function):
    """Softmax over all parents of each child: over types, and over the windows it lies in."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, windows: Windows) -> Tensor:
        here = logits.logsumexp(2)  # (N, positions, children)
        everywhere = windows.gather_claims(here, -torch.inf).logsumexp(2)  # (N, cells, types)
        share = (logits - windows.see(everywhere).flatten(2)[:, :, None]).exp_()
        ctx.windows = windows
        ctx.save_for_backward(share)
        return share

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (share,) = ctx.saved_tensors
        slope = share * grad
        total = ctx.windows.gather_claims(slope.sum(2), 0.0).sum(2)
        return slope.addcmul_(share, ctx.windows.see(total).flatten(2)[:, :, None], value=-1), None


def compete(logits: Tensor, windows: Windows) -> Tensor:
    """What share of each child goes to each of its parents, positions included: they sum to one.

    Args:
        logits: (N, positions, parents, children); children are window x types, types innermost.
    """
    return _Compete.apply(logits, windows)


class _Ledger:
    """What the passes of one backward sweep ask of the votes, as rows of outer products."""

    def __init__(self) -> None:
        self.sweep = -1
        self.entries: list[tuple[Tensor, Tensor, Tensor]] = []

    def add(self, row: Tensor, linear: Tensor, square: Tensor) -> None:
        """dV += linear x row and d(V^2) += square x row; (G, 1, I), (G, 1, D), (G, 1, D)."""
        sweep = torch._C._current_graph_task_id()
        if sweep != self.sweep:  # what an earlier sweep left, that did not reach the votes
            self.sweep, self.entries = sweep, []
        self.entries.append((row, linear, square))

    def settle(self, values: Tensor) -> Tensor:
        """The gradient of all entries with respect to the votes, (G, D, I)."""
        rows, linear, square = (torch.cat(part, 1) for part in zip(*self.entries, strict=True))
        self.entries = []
        slope = torch.bmm(square.mT, rows)
        return torch.bmm(linear.mT, rows).addcmul_(slope, values, value=2)


class _Gate(torch.autograd.Function):
    """The votes themselves; in the backward sweep, where the ledger is settled."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, centre: Tensor, ledger: _Ledger) -> Tensor:
        centred = values - centre
        ctx.ledger = ledger
        ctx.save_for_backward(centred)
        ctx.set_materialize_grads(False)
        return centred

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor, None, None]:
        (centred,) = ctx.saved_tensors
        settled = ctx.ledger.settle(centred)
        return settled if grad is None else settled + grad, None, None


class _Gather(torch.autograd.Function):
    """sum_i r_i V_i and sum_i r_i V_i^2; r (G, 1, I), V (G, D, I)."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, values: Tensor, squares: Tensor, ledger: _Ledger
    ) -> tuple[Tensor, Tensor]:
        ctx.ledger = ledger
        ctx.save_for_backward(weight, values, squares)
        return torch.bmm(weight, values.mT), torch.bmm(weight, squares.mT)

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> tuple:
        weight, values, squares = ctx.saved_tensors
        ctx.ledger.add(weight, first, second)
        return torch.bmm(first, values).baddbmm_(second, squares), None, None, None


class _Score(torch.autograd.Function):
    """V_i . linear + V_i^2 . square; both (G, 1, D), V (G, D, I)."""

    @staticmethod
    def forward(
        ctx: Any, linear: Tensor, square: Tensor, values: Tensor, squares: Tensor, ledger: _Ledger
    ) -> Tensor:
        ctx.ledger = ledger
        ctx.save_for_backward(linear, square, values, squares)
        return torch.bmm(linear, values).baddbmm_(square, squares)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        linear, square, values, squares = ctx.saved_tensors
        ctx.ledger.add(grad, linear, square)
        return torch.bmm(grad, values.mT), torch.bmm(grad, squares.mT), None, None, None


class Gathered(NamedTuple):
    """The votes that each parent gathers.

    Attributes:
        number: n_j = sum_i r_ij, in children, (N, positions, parents, 1).
        mean, variance: of the weighted votes, (N, positions, parents, D); zero without votes.
    """

    number: Tensor
    mean: Tensor
    variance: Tensor


class Votes:
    """The votes of one layer for a batch of images.

    Inside they are kept about their plain mean over the children, so that squares lose no digits.

    Args:
        values: V, (N, positions, parents, D, children).
        presence: w, of the children, (N, positions, children).
        windows: who sees whom; by default all parents see all children.

    `Votes.dense` makes them from (N, children, parents, D).
    """

    def __init__(self, values: Tensor, presence: Tensor, windows: Windows | None = None) -> None:
        *self.shape, self.size, self.children = values.shape
        flat = values.flatten(0, 2)  # (G, D, I)
        centre = flat.detach().mean(2, keepdim=True)
        self.centre = centre[..., 0].unflatten(0, self.shape)
        self.ledger = _Ledger()
        self.values = _Gate.apply(flat, centre, self.ledger)
        self.squares = self.values.detach().square()
        self.presence = presence[:, :, None]  # (N, positions, 1, children)
        self.windows = (
            Windows.whole(self.children).to(values.device) if windows is None else windows
        )

    @classmethod
    def dense(cls, values: Tensor, presence: Tensor | None = None) -> Votes:
        """Votes (N, children, parents, D) where every parent sees every child (N, children)."""
        if presence is None:
            presence = values.new_ones(values.shape[:2])
        return cls(values.permute(0, 2, 3, 1)[:, None].contiguous(), presence[:, None])

    @property
    def fair_share(self) -> float:
        """Children that a parent has on average where all are there, and shared equally."""
        types = self.children / self.windows.cells.shape[1]
        return self.windows.fair_share() * types / self.shape[2]

    def uniform(self) -> Tensor:
        """Each child shared equally among its parents, (N, positions, parents, children)."""
        claims = self.windows.num_claims() * self.shape[2]  # (positions, window)
        types = self.children // claims.shape[1]
        share = claims.to(self.values).reciprocal().repeat_interleave(types, 1)
        return share[None, :, None].expand(*self.shape, self.children)

    def compete(self, logits: Tensor) -> Tensor:
        """Each child shared by the softmax of `logits` over all its parents, of the same shape."""
        return compete(logits, self.windows)

    def gather(self, share: Tensor) -> Gathered:
        """Mean and variance of the votes under r_ij = w_i R_ij, for shares R."""
        weight = (self.presence * share).flatten(0, 2)[:, None]
        number = weight.sum(2).unflatten(0, self.shape)
        sums = _Gather.apply(weight, self.values, self.squares, self.ledger)
        some = torch.where(number > _TINY, number, 1.0)
        first, second = (total[:, 0].unflatten(0, self.shape) / some for total in sums)
        here = (number > _TINY).to(first)
        variance = (second - first.square()).clamp_min(0)
        return Gathered(number, here * self.centre + first, variance)

    def agreement(self, vector: Tensor) -> Tensor:
        """V_ij . vector_j, (N, positions, parents, children)."""
        own = (self.centre * vector).sum(3, keepdim=True)
        return self._score(vector, torch.zeros_like(vector)) + own

    def distance(self, mean: Tensor, precision: Tensor) -> Tensor:
        """sum_d precision_jd (V_ijd - mean_jd)^2, (N, positions, parents, children)."""
        apart = mean - self.centre
        own = (precision * apart.square()).sum(3, keepdim=True)
        return self._score(-2 * precision * apart, precision) + own

    def _score(self, linear: Tensor, square: Tensor) -> Tensor:
        rows = (part.flatten(0, 2)[:, None] for part in (linear, square))
        score = _Score.apply(*rows, self.values, self.squares, self.ledger)
        return score[:, 0].unflatten(0, self.shape)
