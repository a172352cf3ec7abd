"""Test-time inference: scheduled steps compared with plain Adam, and probes after more steps."""

import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from capsule_zoo.data import load_dataset
from capsule_zoo.experiments import Options, Result, experiment, load_or_train
from capsule_zoo.experiments.common.findings import group_by_quantity, single
from capsule_zoo.experiments.part_whole.transformations import refine_objects
from capsule_zoo.figures.curves import curves_on_log_scale
from capsule_zoo.inference import fit_guide
from capsule_zoo.inference.probes import linear_probe
from capsule_zoo.records import Numbers, Table
from capsule_zoo.registry import Entry

NEAR = 1.0  # nats below the best objective at which a race ends
PLAIN_RATES, RATES = (3e-3, 1e-2, 3e-2), (0.03, 0.06)  # largest learning rates of both methods
SMOOTHED = 10  # steps over which the objective, which is noisy, is averaged


@experiment("part-whole/refine", data="mnist", minutes=30, of_runs=True)
def race_refinements(
    options: Options,
    *,
    images: int = 128,
    plain_steps: int = 1000,
    budgets: tuple[int, ...] = (30, 60, 120, 240),
) -> Result:
    """Compare the speed of scheduled test-time inference with plain Adam on MNIST digits.

    Both methods are run at several rates, and the scheduled one, whose rate falls to zero, at
    several lengths. The goal of the race is one nat below the best objective that any run ends
    with. Each method counts at its best: the least time in which one of its runs gets there. A
    method that never gets there counts with the time of its longest run, and `..._arrived` is 0;
    `speedup` is then a lower bound.

    Args:
        images: number of test images, upright and then rotated by a quarter.
        plain_steps: steps of plain Adam.
        budgets: numbers of scheduled steps.
    """
    data = load_dataset("mnist", root=options.data_root)
    entry = load_or_train("part-whole", data, options)
    subset = data.test.images[-images:]  # the schedule was chosen on other images
    races: dict[str, Numbers] = {}
    paths: dict[str, Tensor] = {}
    for name, digits in (("upright", subset), ("rotated", subset.rot90(1, (2, 3)))):
        options.say(f"{name} digits")
        runs = {
            "plain": [race(entry, digits, options, plain_steps, r, "adam") for r in PLAIN_RATES],
            "scheduled": [
                race(entry, digits, options, n, r, "scheduled") for n in budgets for r in RATES
            ],
        }
        goal = max(run.end for group in runs.values() for run in group) - NEAR
        start = single(runs["plain"][0].begin, images)
        row = races[name] = {"goal": single(goal, images), "start": start}
        for method, group in runs.items():
            first = fastest(group, goal)
            row |= {f"{method}_{key}": number for key, number in first.numbers(goal).items()}
            paths[f"{name}, {method}"] = first.path
        plain, ours = (row[f"{method}_seconds"][0] for method in runs)
        row["speedup"] = single(plain / ours)
    table = group_by_quantity(races)
    names = {**dict.fromkeys(table, "{variant}_{quantity}"), "speedup": "{quantity}_{variant}"}
    climbs = {name: (range(1, len(path) + 1), path) for name, path in paths.items()}
    figure = curves_on_log_scale(climbs, "steps + 1", "objective (nats per image)", marker="")
    return Result({"digits": Table(table, names)}, {"": figure}, None, entry)


@experiment("part-whole/free-form", data="mnist", minutes=60, of_runs=True)
def probe_refined(
    options: Options,
    *,
    steps: tuple[int, ...] = (100, 300, 1000),
    fitted: int = 1000,
    tested: int = 500,
) -> Result:
    """Probe objects that are inferred for every digit apart, in more and more steps (an hour).

    Presences and poses of objects and parts start where the guide infers them, and are optimized
    for each image. `probe_presence_...` is the accuracy of a linear probe on the objects'
    presences, `probe_presence_pose_...` also on their poses. A probe is fitted on training images
    that are refined in as many steps as its test images.

    Args:
        steps: numbers of steps, each from the start.
        fitted: number of training images.
        tested: number of test images.
    """
    data = load_dataset("mnist", root=options.data_root)
    entry = load_or_train("part-whole", data, options)
    objects, splits = len(entry.model.presence_logits), (data.train[:fitted], data.test[:tested])
    numbers: dict[str, Numbers] = {"probe_presence": {}, "probe_presence_pose": {}}
    for count in (0, *steps):
        options.say(f"Refining {fitted + tested:,} images in {count} steps")
        rows = [refine_objects(entry.guide, s.images, count, options.seed) for s in splits]
        labels = [split.labels for split in splits]
        for quantity, width in (("probe_presence", objects), ("probe_presence_pose", None)):
            fitted_rows, tested_rows = (row[:, :width] for row in rows)
            accuracy = linear_probe(fitted_rows, labels[0], tested_rows, labels[1])
            numbers[quantity][str(count)] = accuracy
    return Result({"steps": Table(numbers)}, entry=entry)


class Race(NamedTuple):
    """One run of test-time inference.

    Attributes:
        path: mean objective of the images at each step, nats.
        begin, end: the objective before and after the run, under noise that it was not fitted to.
        seconds: time of the run.
        rate: largest learning rate.
    """

    path: Tensor
    begin: float
    end: float
    seconds: float
    rate: float

    def arrival(self, goal: float) -> float:
        """Return the seconds until the smoothed objective reaches the goal; infinite if never."""
        steps = len(self.path) - 1
        smooth = self.path.unfold(0, min(SMOOTHED, steps + 1), 1).mean(-1)
        hits = (smooth >= goal).nonzero()
        if len(hits):
            return self.seconds * (int(hits[0]) + len(self.path) - len(smooth)) / steps
        return self.seconds if self.end >= goal else math.inf

    def numbers(self, goal: float) -> Numbers:
        """Return the run's numbers: time and steps to the goal, rate, and final objective."""
        arrival = self.arrival(goal)
        seconds, steps = min(arrival, self.seconds), len(self.path) - 1
        return {
            "arrived": single(math.isfinite(arrival)),
            "seconds": single(seconds),
            "steps": single(round(steps * seconds / self.seconds)),
            "rate": single(self.rate),
            "end": single(self.end),
        }


def fastest(runs: Sequence[Race], goal: float) -> Race:
    """Return the run that reaches the goal first, or else the run that comes nearest."""
    return min(runs, key=lambda run: (run.arrival(goal), -run.end))


def race(
    entry: Entry, images: Tensor, options: Options, steps: int, rate: float, method: str
) -> Race:
    """Refine the poses of images, and evaluate them with independent noise."""
    model, seed = entry.model, options.seed
    began = time.perf_counter()
    settings: dict[str, Any] = dict(distribution="delta", lr=rate, method=method)
    guide = fit_guide("free_form", model, entry.guide, images, steps=steps, seed=seed, **settings)
    seconds = time.perf_counter() - began
    again = fit_guide(
        "free_form", model, guide, images, steps=0, seed=seed + 1, distribution="delta"
    )
    fresh, refined = again.refinement.start.mean().item(), guide.refinement
    options.say(f"{method}, {steps} steps at {rate}: {fresh:.1f} nats in {seconds:.0f} seconds")
    return Race(refined.path.detach(), refined.start.mean().item(), fresh, seconds, rate)
