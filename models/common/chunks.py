"""Functions of a batch computed for a few rows at a time, which saves memory.

The intermediate results of a layer, such as votes, then stay in the cache. If they are computed
again in the backward pass, none of them is kept.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

AT_ONCE = 2**22  # numbers to compute at a time; a chunk with its gradient fits in a cache
MAX_SAVED_NUMBERS = 2**25  # numbers to keep for the backward pass
LARGER = 2**4  # factor of both on an accelerator, where every chunk costs the start of its kernels


class _InChunks(torch.autograd.Function):
    """The autograd function that saves only inputs, and recomputes outputs for its gradient."""

    @staticmethod
    def forward(ctx: Any, function: Callable, size: int, count: int, *tensors: Tensor) -> tuple:
        ctx.function = function
        ctx.size = size
        ctx.count = count
        ctx.save_for_backward(*tensors)
        return _apply_in_chunks(function, tensors[:count], tensors[count:], size)

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
                (x[chunk] if k < ctx.count else x).detach().requires_grad_(wanted[k])
                for k, x in enumerate(ctx.saved_tensors)
            ]
            with torch.enable_grad():
                outputs = ctx.function(*inputs)
            leaves = [x for x in inputs if x.requires_grad]
            slopes = [g[chunk] for g in grads]
            gradients = iter(torch.autograd.grad(outputs, leaves, slopes, allow_unused=True))
            for k, total in enumerate(totals):
                if total is not None and (slope := next(gradients)) is not None:
                    (total[chunk] if k < ctx.count else total).add_(slope)
        return None, None, None, *totals


def _apply_in_chunks(
    function: Callable, inputs: tuple[Tensor, ...], shared: tuple[Tensor, ...], size: int
) -> tuple[Tensor, ...]:
    chunks = zip(*(x.split(size) for x in inputs), strict=True)
    outputs = zip(*(function(*chunk, *shared) for chunk in chunks), strict=True)
    return tuple(torch.cat(output) for output in outputs)


def map_in_chunks(
    function: Callable,
    inputs: tuple[Tensor, ...],
    shared: tuple[Tensor, ...],
    numbers: int,
    recompute: bool | None = None,
) -> tuple[Tensor, ...]:
    """Apply a function to a few rows of a batch at a time, and join its outputs.

    Under autocast the whole computation has the precision of the shared tensors, or of the first
    tensor of the batch where none is shared. A routing takes differences of large sums. Autocast
    does not change the backward pass, which must repeat the same computation.

    Args:
        function: takes tensors and returns a tuple of tensors, row by row.
        inputs: tensors of the batch, rows first.
        shared: tensors that all rows use.
        numbers: size of the largest intermediate result of one row. A chunk has 2^22 numbers, or
            2^26 on an accelerator.
        recompute: keep only the inputs, and compute each chunk again in the backward pass. This
            takes less memory and more time. By default it is done where the largest intermediate
            result of the batch has more than 2^25 numbers, or 2^29 on an accelerator.
    """
    first = (*shared, *inputs)[0]
    device = first.device.type
    larger = 1 if device == "cpu" else LARGER
    if recompute is None:
        recompute = len(inputs[0]) * numbers > MAX_SAVED_NUMBERS * larger
    if torch.is_autocast_enabled(device):
        inputs = tuple(x.to(first.dtype) for x in inputs)
        with torch.autocast(device, enabled=False):
            return map_in_chunks(function, inputs, shared, numbers, recompute)
    size = max(1, AT_ONCE * larger // numbers)
    if recompute and torch.is_grad_enabled():
        return _InChunks.apply(function, size, len(inputs), *inputs, *shared)
    return _apply_in_chunks(function, inputs, shared, size)
