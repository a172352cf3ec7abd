"""Diagnosis of a loss that is not finite: the first site at which it occurs."""

import os
from dataclasses import dataclass

import pyro
import torch
from pyro import poutine
from pyro.poutine import Trace
from torch import Tensor, nn

from capsule_zoo.inference.log_weight import call_arguments


@dataclass(eq=False)
class NonFiniteLoss(RuntimeError):
    """The error raised when the loss or its gradient is not finite.

    Model and guide have the parameters of the last check, or of the start of the run, at which the
    loss was finite.

    Attributes:
        step: the step that was not taken.
        site: the first site, guide before model, whose value or log density is not finite, or None
            if all are finite (the gradient overflowed).
        checkpoint: the last good one, if any.
        restored: the step whose parameters model and guide have again; None if there is no such
            step, and they were left as they are.
    """

    step: int
    site: str | None
    checkpoint: str | os.PathLike | None
    restored: int | None = None

    def __str__(self) -> str:
        if self.site is None:
            where = "every site's value and log density is finite, so the gradient overflowed"
        else:
            where = f"the first site with a value or log density that is not is {self.site!r}"
        remark = (
            "" if self.checkpoint is None else f"; the last good checkpoint is {self.checkpoint}"
        )
        if self.restored is not None:
            remark = f"; model and guide are as they were after step {self.restored}{remark}"
        return (
            f"the loss or its gradient is not finite at step {self.step}: {where}. "
            f"Lower lr, or clip gradients, in Python by pace=Pace(clip=...){remark}"
        )


def first_bad_site(
    model: nn.Module, guide: nn.Module, images: Tensor, labels: Tensor | None = None
) -> str | None:
    """Return the first site, guide before model, whose value or log density is not finite."""
    arguments = call_arguments(images, labels)
    with poutine.block(), torch.no_grad(), pyro.validation_enabled(False):
        guide_trace = poutine.trace(guide).get_trace(*arguments)
        if name := _first_bad(guide_trace):
            return name
        replayed = poutine.replay(model, trace=guide_trace)
        return _first_bad(poutine.trace(replayed).get_trace(*arguments))


def _first_bad(trace: Trace) -> str | None:
    trace.compute_log_prob()
    for name, site in trace.nodes.items():
        if site["type"] != "sample":
            continue
        if not (_finite(site["value"]) and _finite(site["log_prob"])):
            return name
    return None


def _finite(value: object) -> bool:
    return not isinstance(value, Tensor) or bool(torch.isfinite(value).all())
