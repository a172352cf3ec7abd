"""Groups of settings of `fit`: pace, inputs, and checks between steps.

>>> how = dict(pace=Pace("cosine", warmup=50), inputs=Inputs(labels=True))
>>> fit(model, guide, data, steps=900, checks=Checks(checkpoint="run.safetensors"), **how)
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from capsule_zoo.data.readable import Data
from capsule_zoo.inference.training.progress import Before

P = ParamSpec("P")
R = TypeVar("R")


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
CheckpointPlace = str | os.PathLike | Callable[[dict], None]


@dataclass(frozen=True)
class Group:
    """A group of settings, whose repr shows those that differ from their defaults."""

    @property
    def overrides(self) -> dict[str, Any]:
        """The fields that differ from their defaults."""
        values = {
            member.name: (getattr(self, member.name), member.default) for member in fields(self)
        }
        return {name: value for name, (value, default) in values.items() if value != default}

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.overrides.items())
        return f"{type(self).__name__}({arguments})"


@dataclass(frozen=True, repr=False)
class Pace(Group):
    """Learning-rate schedule, warm-up and gradient clipping.

    A field that is None is taken from the guide's `fit_settings`, else it is "constant", 0 or no
    clipping.

    Attributes:
        schedule: "constant", "cosine" or "linear"; the latter two end at zero.
        warmup: steps over which the rates rise to their full size, from the first one on.
        clip: largest norm of the gradient; `math.inf` for none.
    """

    schedule: str | None = None
    warmup: int | None = None
    clip: float | None = None


@dataclass(frozen=True, repr=False)
class Inputs(Group):
    """Transform, labels, validation data and device.

    Attributes:
        transform: called on the images of each batch, see `capsule_zoo.data.Batches`.
        labels: pass the labels to model and guide too, which a supervised model needs.
        validation: held-out images that replace the validation split of a `Dataset`, of any kind
            that the data may be; at most 1,000 are kept in memory.
        device: the device of the batches, to which model and guide are moved.
    """

    transform: Callable[..., Tensor] | None = None
    labels: bool = False
    validation: Data | None = None
    device: str | torch.device = "cpu"

    def __post_init__(self) -> None:
        if not isinstance(self.labels, bool):
            raise ValueError("labels is True or False; pass TensorDataset(images, labels) as data")


@dataclass(frozen=True, repr=False)
class Checks(Group):
    """Callbacks between the steps of a run: checks, checkpoints, progress.

    Attributes:
        every: steps between two checks (held-out value, checkpoint, callbacks); default an epoch,
            but at least 100 steps.
        patience: stop after this many checks without a lower value, and restore the best state.
        callbacks: functions called with a `Check` after every check, when the checkpoint has been
            written, also at the end and after Ctrl-C or SIGTERM, by the first process only. True
            stops the run. Their random draws do not change the run.
        checkpoint: safetensors file, replaced whole at every check, after five minutes without one
            and at the end; or a function that is called with the tree to save, in the first process
            only.
        resume: checkpoint from which to continue, with the results of an uninterrupted run.
        progress: show a progress bar.
        clock: "wall", or "processor" for the minutes and seconds that all threads of the process
            compute, which other work on the machine does not shorten.
        before: the earlier stages of the run, as `fit_stages` gives them.
    """

    every: int | None = None
    patience: int | None = None
    callbacks: Sequence[Callback] = ()
    checkpoint: CheckpointPlace | None = None
    resume: str | os.PathLike | None = None
    progress: bool = True
    clock: str = "wall"
    before: Before = Before()

    def __post_init__(self) -> None:
        if bool in (type(self.checkpoint), type(self.resume)):
            raise ValueError("checkpoint and resume are paths of a checkpoint, not True or False")
        callbacks = self.callbacks
        if not isinstance(callbacks, list | tuple) or not all(map(callable, callbacks)):
            raise ValueError(
                f"callbacks must be a list of functions of one Check, such as [print], not "
                f"{callbacks!r}"
            )


_GROUPS: dict[str, type[Group]] = {"pace": Pace, "inputs": Inputs, "checks": Checks}
_PLACES = {member.name: group for group, kind in _GROUPS.items() for member in fields(kind)}


def combine_settings(*settings: Mapping[str, Any]) -> dict[str, Any]:
    """Merge several mappings of arguments of `fit`; later ones replace earlier ones.

    Of a group, only the fields that differ from their defaults are replaced.
    """
    result: dict[str, Any] = {}
    for name, value in (item for mapping in settings for item in mapping.items()):
        earlier = result.get(name)
        if isinstance(value, Group) and isinstance(earlier, Group):
            value = replace(earlier, **value.overrides)
        result[name] = value
    return result


def pace_arguments(fit_settings: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a guide's `fit_settings` (lr, schedule, warmup and clip) to arguments of `fit`."""
    rate = {name: value for name, value in fit_settings.items() if name == "lr"}
    return rate | {"pace": Pace(**{k: v for k, v in fit_settings.items() if k != "lr"})}


def with_groups(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that a misplaced argument raises ValueError with its group."""

    @wraps(function)
    def wrapper(*args: P.args, **settings: P.kwargs) -> R:
        for name, value in settings.items():
            if name in _GROUPS and not isinstance(value, _GROUPS[name]):
                kind = _GROUPS[name].__name__
                raise ValueError(f"{name} must be a {kind} of capsule_zoo.inference, not {value!r}")
            if group := _PLACES.get(name):
                kind = _GROUPS[group].__name__
                raise ValueError(
                    f"{function.__name__} takes {name} as {group}={kind}({name}=...); import "
                    f"{kind} from capsule_zoo.inference"
                )
        return function(*args, **settings)

    return wrapper


def call_back(callbacks: Sequence[Callback], check: Check) -> str | None:
    """Call every callback and return the name of the first one that requests a stop, or None."""
    stopping = None
    for callback in callbacks:
        answer = callback(check)
        if isinstance(answer, bool | np.bool_) and answer and stopping is None:
            stopping = getattr(callback, "__name__", type(callback).__name__)
    return stopping
