"""What a guide has computed, handed to a model that would compute the very same again.

Under SVI's objectives the guide runs first, and the model is replayed on its draws. Where the guide
had to run a part of the model to make them, the model need not run it a second time.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

_updates = [0]  # steps that optimizers have taken


def _count(*arguments: object) -> None:
    _updates[0] += 1


# Optimizers that are one kernel (`fused`) change tensors, and leave their versions as they were.
register_optimizer_step_post_hook(_count)


class Handover:
    """One value that a guide leaves, and that a model takes where nothing it rests on has changed.

    It rests on tensors: they must be the same objects when the value is taken, of the same
    contents, with gradients recorded or not as before. It is taken once, for autograd walks a graph
    but once. Copies and files hold nothing.

        handover.leave(value, [*codes, *model.parameters()])        # in the guide
        value = handover.take([*codes, *model.parameters()])        # in the model; None: no such
    """

    def __init__(self) -> None:
        self._left: tuple[Any, list[Tensor], list[int]] | None = None

    def leave(self, value: Any, rests_on: Iterable[Tensor]) -> None:
        """Leave a value; the one before is forgotten."""
        tensors = list(rests_on)
        self._left = value, tensors, _state(tensors)

    def take(self, rests_on: Iterable[Tensor]) -> Any:
        """What was left, if it rests on these tensors as they are now; otherwise None."""
        left, self._left = self._left, None
        if left is None:
            return None
        value, then, state = left
        now = list(rests_on)
        same = len(now) == len(then) and all(map(operator.is_, now, then))
        return value if same and _state(now) == state else None

    def __reduce__(self) -> tuple[type[Handover], tuple[()]]:
        return Handover, ()


def _state(tensors: list[Tensor]) -> list[int]:
    """What differs once tensors have new contents, or gradients are recorded or are no more."""
    return [torch.is_grad_enabled(), _updates[0], *(tensor._version for tensor in tensors)]
