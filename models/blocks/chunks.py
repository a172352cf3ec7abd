"""Functions of a batch, a few rows at a time: less memory at once, and less of it kept.

What a layer computes on its way, such as votes, then stays in the cache; and where it is computed
anew in the backward pass, none of it is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _InChunks(torch.autograd.Function):
    """Keeps nothing but the inputs, and applies the function again for its gradient."""

    @staticmethod
    def forward(ctx: Any, function: Callable, size: int, each: int, *tensors: Tensor) -> tuple:
        ctx.function, ctx.size, ctx.each = function, size, each
        ctx.save_for_backward(*tensors)
        return _apply_in_chunks(function, tensors[:each], tensors[each:], size)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        wanted = ctx.needs_input_grad[3:]
        totals = [
            torch.zeros_like(x) if needed else None
            for x, needed in zip(ctx.saved_tensors, wanted, strict=True)
        ]
        for begin in range(0, len(grads[0]), ctx.size):
            chunk = slice(begin, begin + ctx.size)
            inputs = [
                (x[chunk] if k < ctx.each else x).detach().requires_grad_(wanted[k])
                for k, x in enumerate(ctx.saved_tensors)
            ]
            with torch.enable_grad():
                outputs = ctx.function(*inputs)
            leaves = [x for x in inputs if x.requires_grad]
            slopes = [g[chunk] for g in grads]
            found = iter(torch.autograd.grad(outputs, leaves, slopes, allow_unused=True))
            for k, total in enumerate(totals):
                if total is not None and (slope := next(found)) is not None:
                    (total[chunk] if k < ctx.each else total).add_(slope)
        return None, None, None, *totals


def _apply_in_chunks(
    function: Callable, each: tuple[Tensor, ...], shared: tuple[Tensor, ...], size: int
) -> tuple[Tensor, ...]:
    chunks = zip(*(x.split(size) for x in each), strict=True)
    outputs = zip(*(function(*chunk, *shared) for chunk in chunks), strict=True)
    return tuple(torch.cat(output) for output in outputs)


def in_chunks(
    function: Callable,
    each: tuple[Tensor, ...],
    shared: tuple[Tensor, ...],
    size: int,
    recompute: bool = True,
) -> tuple[Tensor, ...]:
    """`function(*each, *shared)`, computed for `size` rows of a batch at a time.

    Under autocast all of it has the precision of the shared tensors: a routing takes differences
    of large sums, and the backward pass, which autocast leaves alone, has to repeat the same.

    Args:
        function: takes tensors and gives a tuple of them, row by row.
        each: tensors of the batch, rows first.
        shared: tensors that all rows use.
        recompute: keep nothing but the inputs, and repeat each chunk in the backward pass.
    """
    device = shared[0].device.type
    if torch.is_autocast_enabled(device):
        each = tuple(x.to(shared[0].dtype) for x in each)
        with torch.autocast(device, enabled=False):
            return in_chunks(function, each, shared, size, recompute)
    if recompute and torch.is_grad_enabled():
        return _InChunks.apply(function, size, len(each), *each, *shared)
    return _apply_in_chunks(function, each, shared, size)
