"""A test that training starts for every entry: short runs compared with a constant answer.

An entry that draws images has started if its reconstructions of held-out images are nearer to them
than the mean of the training images, which is the best constant image. A classifier has started if
it is right more often than not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pyro

from capsule_zoo.data import Dataset, load_dataset
from capsule_zoo.experiments import Options, Result, experiment
from capsule_zoo.experiments.findings import mean_and_error, snake_case
from capsule_zoo.experiments.study import Job, Study
from capsule_zoo.experiments.training import train
from capsule_zoo.inference.evaluation.ancestral import infer, mean_images
from capsule_zoo.inference.evaluation.classification import error_rate
from capsule_zoo.records import Metrics, Numbers
from capsule_zoo.registry import Entry, create, list_models, small_sizes

HALF = 0.5  # the error rate under which a classifier has started


@dataclass(frozen=True)
class Task:
    """The training of one entry from scratch."""

    entry: str
    sizes: Mapping[str, Any]
    steps: int


def score(job: Job[Task]) -> float:
    """Train an entry and return its error, relative to the error that it must be under.

    The error of an entry that draws is its squared error, relative to the mean image's. The error
    of a classifier is its error rate, relative to a half. Below 1 training has started.
    """
    task, options = job.variant, job.options
    pyro.set_rng_seed(options.seed)
    data = load_dataset("digits")
    entry = create(task.entry, **{**task.sizes, "image_shape": data.image_shape})
    train(entry, data.train, options, name="run", steps=task.steps)
    if entry.model.supervised:
        return error_rate(entry.model, data.test).value / HALF
    return relative_error(entry, data)


def relative_error(entry: Entry, data: Dataset) -> float:
    """Return the squared error of reconstructions over the squared error of the mean image."""
    images = data.test.images
    drawn = infer(entry.guide, images)
    painted = mean_images(entry.model, len(images), drawn, images=images)
    constant = data.train.images.mean(0)
    return ((painted - images).square().sum() / (constant - images).square().sum()).item()


@experiment("zoo/starts", data="digits", minutes=60)
def starts(
    options: Options,
    *,
    seeds: int = 5,
    steps: int = 200,
    entries: tuple[str, ...] = (),
    small: bool = False,
) -> Result:
    """Compare every entry after 200 steps with a constant answer, from five seeds (an hour).

    `relative_error_<entry>` is the mean over seeds, `worst_<entry>` the largest; below 1 a run has
    started. `not_started` counts the runs that have not.

    Args:
        seeds: number of seeds for each entry.
        steps: updates of every run in a full run of an hour.
        entries: names of entries; by default all.
        small: whether entries have the sizes at which the tests run them.
    """
    options.refuse_run()
    limit = options.shortened(steps)
    names = list(entries) or list_models()
    sizes = {name: small_sizes(name) if small else {} for name in names}
    for own in sizes.values():
        own.pop("classes", None)  # digits have ten
    tasks = {name: Task(name, sizes[name], limit) for name in names}
    options.say(f"Training {len(names)} entries from {seeds} seeds, {limit} steps each")
    found = Study(tasks, seeds).run(score, replace(options, minutes=None))
    mean, worst = Numbers(), Numbers()
    for name in names:
        scores = [value for (entry, _), value in found.items() if entry == name]
        mean[snake_case(name)] = mean_and_error(scores)
        worst[snake_case(name)] = (max(scores), None, len(scores))
    late = float(sum(value >= 1 for value in found.values())), None, len(found)
    metrics: Metrics = {"not_started": late, "relative_error": mean, "worst": worst}
    return Result(metrics)
