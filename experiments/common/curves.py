"""Learning curves: the error at growing times of a training, and when it falls below a level."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from capsule_zoo.data import Dataset
from capsule_zoo.experiments.common.findings import mean_and_error, single
from capsule_zoo.experiments.options import Options
from capsule_zoo.experiments.training import train
from capsule_zoo.inference import Check, Checks
from capsule_zoo.records import Numbers
from capsule_zoo.registry import Entry

LONGER = 1.15  # the time of a measurement, as a multiple of the one before

Curve = list[tuple[float, int, float]]  # processor seconds, updates, error


def learning_curve(
    entry: Entry,
    data: Dataset,
    options: Options,
    error: Callable[[], float],
    *,
    every: int,
    longer: float = LONGER,
    **settings: Any,
) -> Curve:
    """Train an entry for the budget of the options, and return its errors at growing times.

    The time of the measurements is a part of the budget, and is taken off the times. Nothing is
    saved: an interrupted run starts again, because its processor time would be lost.

    Args:
        error: measures the error of the entry as it is.
        every: updates between two looks at the clock.
        longer: the time of a measurement, as a multiple of the one before.
        settings: further arguments of `train`.

    Raises:
        ValueError: the budget ends before the first update.
    """
    found: Curve = []
    measuring = 0.0

    def measure(check: Check) -> None:
        nonlocal measuring
        seconds = check.seconds - measuring
        if not found or seconds >= longer * found[-1][0]:
            began = time.process_time()
            found.append((seconds, check.step, error()))
            measuring += time.process_time() - began

    checks = Checks(every=every, callbacks=[measure], clock="processor")
    unchecked = replace(data, validation=data.validation[:1])  # `fit` measures its loss
    unsaved = replace(options, runs=None)
    train(entry, unchecked, unsaved, options.budget, checks=checks, **settings)
    if not found:
        raise ValueError(f"{options.budget} minutes end before the first update; give it more")
    return found


def times_of(curves: Sequence[Curve], levels: Mapping[str, float]) -> Numbers:
    """Return where the curves of all seeds end, and when they fall below levels, by their names.

    Seconds and updates to a level are given where all seeds get there; how many do is counted.
    """
    _, updates, errors = zip(*(curve[-1] for curve in curves), strict=True)
    found = {"error": mean_and_error(list(errors)), "updates": mean_and_error(list(updates))}
    for what, level in levels.items():
        below = [[point for point in curve if point[2] < level] for curve in curves]
        there = [points[0] for points in below if points]
        found[f"{what}_seeds"] = single(len(there), len(curves))
        if len(there) == len(curves):
            seconds, steps, _ = zip(*there, strict=True)
            found[f"{what}_seconds"] = mean_and_error(list(seconds))
            found[f"{what}_updates"] = mean_and_error(list(steps))
    return found
