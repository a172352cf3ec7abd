"""Callbacks: user functions that `fit` calls after every check, to log or to stop the run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import nn


@dataclass(frozen=True, eq=False)
class Check:
    """The state of a run at a check, just after its checkpoint (if any) has been written.

    Attributes:
        model, guide: the modules that are trained, in evaluation mode.
        step: optimizer steps taken.
        epoch: number of the epoch of the last step, from 0.
        seconds: time of the run by the `clock` of `Checks`, time before a resume included.
        loss: mean training loss of the last 50 steps, in nats per image; NaN before the first.
        held_out: held-out loss in nats per image; NaN where it was not computed.
    """

    model: nn.Module
    guide: nn.Module
    step: int
    epoch: int
    seconds: float
    loss: float
    held_out: float


Callback = Callable[[Check], bool | None]


def check_callbacks(callbacks: Sequence[Callback]) -> None:
    """Raise ValueError unless `callbacks` is a list or tuple of functions."""
    if not isinstance(callbacks, list | tuple) or not all(map(callable, callbacks)):
        raise ValueError(
            f"callbacks must be a list of functions of one Check, such as [print], not "
            f"{callbacks!r}"
        )


def call_back(callbacks: Sequence[Callback], check: Check) -> str | None:
    """Call every callback and return the name of the first one that requests a stop, or None."""
    stopping = None
    for callback in callbacks:
        answer = callback(check)
        if isinstance(answer, bool | np.bool_) and answer and stopping is None:
            stopping = getattr(callback, "__name__", type(callback).__name__)
    return stopping
