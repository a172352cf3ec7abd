"""The votes of children for their parents' poses, and the competition of parents for children.

Every child i casts a vote V_ij, D numbers, for each parent j that sees it. Every kind of routing
uses the votes in only two ways. It gathers them by weight, sum_i r_ij V_ij and sum_i r_ij V_ij^2,
and it scores them, V_ij . a_j + V_ij^2 . b_j. `Votes` offers these two operations, so that a
routing is a few lines on tensors that are D times smaller than the votes.

Both operations are batched vector-matrix products over contiguous memory. No copy of the votes,
tiled transformation or one-hot assignment is ever formed. The gradient for the votes is a sum of
outer products, one for each operation. It is computed once, after the last of them (`_Gate`),
instead of once for each.

Parents lie on a grid of positions, each of which sees a window of the children's grid. A child
that is seen from several positions is claimed by the parents of all types at all these positions.
It chooses one among all of them (`compete`) and does not count once for each window.
"""

from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

_TINY = 1e-12  # a parent with smaller responsibilities counts as without votes


class Windows(NamedTuple):
    """The cells of the children's grid that each position of the parents' grid sees.

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
    def sliding(cls, height: int, width: int, kernel: int, stride: int) -> "Windows":
        """Return the windows of a convolution without padding.

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
        cells = cells.reshape(shape[0] * shape[1], -1)
        entries_by_cell: list[list[int]] = [[] for _ in range(height * width)]
        for entry, cell in enumerate(cells.flatten().tolist()):
            entries_by_cell[cell].append(entry)
        most = max(map(len, entries_by_cell))
        claims = [entries + [cells.numel()] * (most - len(entries)) for entries in entries_by_cell]
        return cls(cells, torch.tensor(claims, device=cells.device), shape)

    @classmethod
    def whole(cls, cells: int) -> "Windows":
        """Return the window of a single position that sees every cell."""
        every = torch.arange(cells, device="cpu")
        return cls(every[None], every[:, None], (1, 1))

    def to(self, device: torch.device) -> "Windows":
        return Windows(self.cells.to(device), self.claims.to(device), self.shape)

    def see(self, grid: Tensor) -> Tensor:
        """Extract each position's window of cells from a grid, (N, positions, window, ...)."""
        return grid.index_select(1, self.cells.flatten()).unflatten(1, self.cells.shape)

    def gather_claims(self, values: Tensor, fill: float) -> Tensor:
        """Gather, for each cell, its entries in all windows, (N, cells, claims, types).

        Args:
            values: one number for each seen child, (N, positions, window x types).
            fill: value for a cell that is in fewer windows than others.
        """
        entries = values.reshape(len(values), self.cells.numel(), -1)
        entries = torch.cat(
            [entries, entries.new_full((len(values), 1, entries.shape[2]), fill)], 1
        )
        return entries.index_select(1, self.claims.flatten()).unflatten(1, self.claims.shape)

    def num_claims(self) -> Tensor:
        """Count the positions that see each cell of each window, (positions, window)."""
        return (self.claims < self.cells.numel()).sum(1)[self.cells]

    def votes_per_parent(self) -> float:
        """Compute the average number of cells per position, with shared cells divided equally."""
        if len(self.cells) == 1:  # no cell is shared
            return self.cells.numel()
        return self.num_claims().reciprocal().sum().item() / len(self.cells)


class _Compete(torch.autograd.Function):
    """The autograd function of the softmax over all parents of a child in all its windows."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, windows: Windows) -> Tensor:
        here = logits.logsumexp(2)  # (N, positions, children)
        everywhere = windows.gather_claims(here, -torch.inf).logsumexp(2)  # (N, cells, types)
        responsibility = (logits - windows.see(everywhere).flatten(2)[:, :, None]).exp_()
        ctx.windows = windows
        ctx.save_for_backward(responsibility)
        return responsibility

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (responsibility,) = ctx.saved_tensors
        slope = responsibility * grad
        total = ctx.windows.gather_claims(slope.sum(2), 0.0).sum(2)
        return slope.addcmul_(
            responsibility, ctx.windows.see(total).flatten(2)[:, :, None], value=-1
        ), None


def compete(logits: Tensor, windows: Windows) -> Tensor:
    """Compute responsibilities of parents for children, which sum to one over all positions.

    Args:
        logits: (N, positions, parents, children); children are window x types, types innermost.
    """
    if len(windows.cells) == 1:  # no child is seen twice
        return logits.softmax(2)
    return _Compete.apply(logits, windows)


class _Ledger:
    """The gradients for the votes in one backward sweep, stored as rows of outer products."""

    def __init__(self) -> None:
        self.sweep = -1
        self.entries: list[tuple[Tensor, Tensor, Tensor | None, Tensor]] = []

    def add(self, row: Tensor, linear: Tensor, square: Tensor | None, values: Tensor) -> None:
        """Add linear x row to dV and square x row to d(V^2); (G, 1, I), (G, 1, D), (G, 1, D).

        Args:
            values: the V, (G, D, I), whose squares are used, the same for all entries with squares.
        """
        sweep = torch._C._current_graph_task_id()
        if sweep != self.sweep:  # entries of an earlier sweep that did not reach the votes
            self.sweep = sweep
            self.entries = []
        self.entries.append((row, linear, square, values))

    def settle(self) -> Tensor:
        """Compute the gradient (G, D, I) of all entries with respect to the votes."""
        entries, self.entries = self.entries, []
        squares = [(row, square, v) for row, _, square, v in entries if square is not None]
        rows = torch.cat([row for row, *_ in entries], 1)
        total = torch.bmm(torch.cat([linear for _, linear, *_ in entries], 1).mT, rows)
        if squares:
            if len(squares) < len(entries):
                rows = torch.cat([row for row, *_ in squares], 1)
            slope = torch.bmm(torch.cat([square for _, square, _ in squares], 1).mT, rows)
            total.addcmul_(slope, squares[0][2], value=2)
        return total


class _Gate(torch.autograd.Function):
    """The autograd function of an empty token, whose backward pass settles the ledger.

    Every use of the votes takes the token, so that the gate's backward pass comes after theirs.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, ledger: _Ledger) -> Tensor:
        ctx.ledger = ledger
        ctx.set_materialize_grads(False)
        return values.new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor, None]:
        return ctx.ledger.settle(), None


class _Gather(torch.autograd.Function):
    """The autograd function of sum_i r_i V_i and, given V^2, sum_i r_i V_i^2."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        token: Tensor,
        values: Tensor,
        squares: Tensor | None,
        ledger: _Ledger,
    ) -> tuple[Tensor, ...]:
        ctx.ledger = ledger
        ctx.save_for_backward(weight, values, squares)
        return _sums(weight, values, squares)

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor | None = None) -> tuple:
        weight, values, squares = ctx.saved_tensors
        ctx.ledger.add(weight, first, second, values)
        return _scores(first, second, values, squares), None, None, None, None


def _sums(weight: Tensor, values: Tensor, squares: Tensor | None) -> tuple[Tensor, ...]:
    """Return sum_i weight_i V_i and, given V^2, sum_i weight_i V_i^2; weight @ V.mT is slower."""
    powers = (values,) if squares is None else (values, squares)
    return tuple(torch.bmm(x, weight.mT).mT for x in powers)


class _Score(torch.autograd.Function):
    """The autograd function of scores V_i . linear + V_i^2 . square, for V (G, D, I)."""

    @staticmethod
    def forward(
        ctx: Any,
        linear: Tensor,
        square: Tensor | None,
        token: Tensor,
        values: Tensor,
        squares: Tensor | None,
        ledger: _Ledger,
    ) -> Tensor:
        ctx.ledger = ledger
        ctx.save_for_backward(linear, square, values, squares)
        return _scores(linear, square, values, squares)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        linear, square, values, squares = ctx.saved_tensors
        ctx.ledger.add(grad, linear, square, values)
        first, *second = _sums(grad, values, squares)
        return first, second[0] if second else None, None, None, None, None


def _scores(
    linear: Tensor, square: Tensor | None, values: Tensor, squares: Tensor | None
) -> Tensor:
    scores = torch.bmm(linear, values)
    return scores if square is None or squares is None else scores.baddbmm_(square, squares)


class Gathered(NamedTuple):
    """Mean and variance of the votes that each parent gathers.

    Attributes:
        number: n_j = sum_i r_ij, in children, (N, positions, parents, 1).
        mean, variance: mean and variance of the weighted votes, (N, positions, parents, D); zero
            without votes.
    """

    number: Tensor
    mean: Tensor
    variance: Tensor


class Votes:
    """The votes of children for parents in one layer, for a batch of images.

    Squares are of differences from the votes' plain mean over the children, so that they lose no
    digits.

    Args:
        values: V, (N, positions, parents, D, children).
        presence: presences w of the children, (N, positions, children).
        windows: the children that each parent sees; by default all parents see all children.

    `Votes.dense` makes votes from values (N, children, parents, D).
    """

    def __init__(self, values: Tensor, presence: Tensor, windows: Windows | None = None) -> None:
        *self.shape, self.size, self.children = values.shape
        flat = values.flatten(0, 2)  # (G, D, I)
        self.flat = flat
        self.values = flat.detach()
        self.ledger = _Ledger()
        self.exported = torch.compiler.is_exporting()  # without gradients, and with no ledger
        self.token = None if self.exported else _Gate.apply(flat, self.ledger)
        self.presence = presence[:, :, None]  # (N, positions, 1, children)
        self.windows = (
            Windows.whole(self.children).to(values.device) if windows is None else windows
        )

    @classmethod
    def dense(cls, values: Tensor, presence: Tensor | None = None) -> "Votes":
        """Return votes (N, children, parents, D) where every parent sees every child."""
        if values.dim() != 4:
            raise ValueError(f"votes are (N, children, parents, D), not {tuple(values.shape)}")
        if presence is None:
            presence = values.new_ones(values.shape[:2])
        return cls(values.permute(0, 2, 3, 1)[:, None].contiguous(), presence[:, None])

    @cached_property
    def center(self) -> Tensor:
        """The unweighted mean of each parent's votes, (N, positions, parents, D)."""
        return self.values.mean(2).unflatten(0, self.shape)

    @cached_property
    def centered_votes(self) -> tuple[Tensor, Tensor]:
        """The votes minus their center, and the squares of the differences, (G, D, I) each."""
        differences = self.values - self.center.flatten(0, 2)[..., None]
        return differences, differences.square()

    @property
    def votes_per_parent(self) -> float:
        """The average number of children of a parent if all are present and shared equally."""
        types = self.children / self.windows.cells.shape[1]
        return self.windows.votes_per_parent() * types / self.shape[2]

    def uniform(self) -> Tensor:
        """Return equal responsibilities, (N, positions, parents, children)."""
        claims = self.windows.num_claims() * self.shape[2]  # (positions, window)
        types = self.children // claims.shape[1]
        responsibility = claims.to(self.values).reciprocal().repeat_interleave(types, 1)
        return responsibility[None, :, None].expand(*self.shape, self.children)

    def compete(self, logits: Tensor) -> Tensor:
        """Compute responsibilities, shaped as `logits`: a softmax over all parents of a child."""
        return compete(logits, self.windows)

    def gather(self, responsibility: Tensor) -> Gathered:
        """Compute the mean and variance of the votes under r_ij = w_i R_ij; R is given."""
        weight = self._weight(responsibility)
        number = weight.sum(2).unflatten(0, self.shape)
        some = torch.where(number > _TINY, number, 1.0)
        sums = self._gather(weight, *self.centered_votes)
        first, second = (total[:, 0].unflatten(0, self.shape) / some for total in sums)
        has_votes = (number > _TINY).to(first)
        variance = (second - first.square()).clamp_min(0)
        return Gathered(number, has_votes * self.center + first, variance)

    def gather_sum(self, responsibility: Tensor) -> Tensor:
        """Compute only sum_i r_ij V_ij, (N, positions, parents, D), twice as fast as `gather`."""
        weight = self._weight(responsibility)
        (total,) = self._gather(weight, self.values, None)
        return total[:, 0].unflatten(0, self.shape)

    def _gather(self, weight: Tensor, values: Tensor, squares: Tensor | None) -> tuple[Tensor, ...]:
        if self.exported:
            return _sums(weight, values, squares)
        return _Gather.apply(weight, self.token, values, squares, self.ledger)

    def _weight(self, responsibility: Tensor) -> Tensor:
        """Return the weights w_i R_ij as rows, (G, 1, I)."""
        return (self.presence * responsibility).flatten(0, 2)[:, None]

    def agreement(self, vector: Tensor) -> Tensor:
        """Compute the products V_ij . vector_j, (N, positions, parents, children)."""
        return self._score(vector, None, self.values)

    def read(self, weights: Tensor) -> Tensor:
        """Compute V_ij . weights_ij, (N, positions, parents, children), weights equal at positions.

        Args:
            weights: (D, parents, children).
        """
        values = self.flat.unflatten(0, self.shape)  # (N, positions, parents, D, children)
        return (values * weights.transpose(0, 1)).sum(3)

    def distance(self, mean: Tensor, precision: Tensor) -> Tensor:
        """Compute sum_d precision_jd (V_ijd - mean_jd)^2, (N, positions, parents, children)."""
        apart = mean - self.center
        mean_term = (precision * apart.square()).sum(3, keepdim=True)
        return self._score(-2 * precision * apart, precision, *self.centered_votes) + mean_term

    def _score(
        self, linear: Tensor, square: Tensor | None, values: Tensor, squares: Tensor | None = None
    ) -> Tensor:
        first = linear.flatten(0, 2)[:, None]
        second = None if square is None else square.flatten(0, 2)[:, None]
        if self.exported:
            score = _scores(first, second, values, squares)
        else:
            score = _Score.apply(first, second, self.token, values, squares, self.ledger)
        return score[:, 0].unflatten(0, self.shape)
