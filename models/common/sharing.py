"""A context in which a model reuses the computations of its guide.

Under an objective the guide runs first, and the model is replayed on the guide's draws. If the
guide had to run a part of the model for its draws, the model need not run that part a second time:

    with sharing():                       # opened around one evaluation of a loss
        guide(images)                     # calls: share(value, [*codes, *model.parameters()])
        replayed_model(images)            # calls: find_value([*codes, *model.parameters()])

`capsule_zoo.inference.loss_per_image` (and so `fit`) and `log_weights` (and so `evaluate`) open the
context. Outside it nothing is shared, and nothing is kept.
"""

import operator
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from capsule_zoo.models.common.modes import PYRO_LOCK


class _Value(NamedTuple):
    """A shared value, the tensors it was computed from, and torch's modes at that time."""

    value: Any
    rests_on: list[Tensor]
    modes: tuple[bool, bool]


_open: ContextVar[list[_Value] | None] = ContextVar("shared values", default=None)


@contextmanager
def sharing() -> Iterator[None]:
    """Let guides and models share values in the context, where parameters must not change."""
    with PYRO_LOCK:
        token = _open.set([])
        try:
            yield
        finally:
            _open.reset(token)


def share(value: Any, rests_on: Iterable[Tensor]) -> None:
    """Store a value for `find_value`, and drop the value before it.

    Outside `sharing` the function does nothing.

    Args:
        value: anything; it may be part of an autograd graph.
        rests_on: every tensor that the value was computed from.
    """
    values = _open.get()
    if values is not None:
        tensors = list(rests_on)
        values[:] = [_Value(value, tensors, _modes(tensors))]


def find_value(rests_on: Iterable[Tensor]) -> Any:
    """Return the stored value if it was computed from exactly these tensors, else None.

    The tensors must be the same objects, not equal ones: a draw that was expanded or moved in
    between is another tensor. Gradients and autocast must be as they were. A value is returned
    once, because a backward pass frees its graph.
    """
    values = _open.get()
    if not values:
        return None
    value, then, modes = values.pop()
    now = list(rests_on)
    same = len(now) == len(then) and all(map(operator.is_, now, then))
    return value if same and modes == _modes(now) else None


def _modes(tensors: list[Tensor]) -> tuple[bool, bool]:
    autocast = torch.is_autocast_enabled(tensors[0].device.type) if tensors else False
    return torch.is_grad_enabled(), autocast
