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

    The value is valid only for the tensors that it was computed from: `take` returns it if they are
    the same objects, unchanged, with gradients and autocast as before. So it holds for particles
    in a plate on the left as well, unless codes were expanded or moved in between. It can be taken
    once, because a backward pass frees the graph. Copies and pickles are empty.

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
    """Return what differs once tensors have new contents, or results another graph or precision."""
    autocast = torch.is_autocast_enabled(tensors[0].device.type) if tensors else False
    versions = (tensor._version for tensor in tensors)
    return [torch.is_grad_enabled(), autocast, _updates[0], *versions]
