"""A test that training starts at every seed: first losses, and the bound on digits at ten seeds.

A pair that does not start draws nothing: its parts lie outside the image, and its loss stays at the
loss of a blank canvas.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, NamedTuple

import pyro
import torch
from torch import Tensor
from torch.distributions import Normal

from capsule_zoo.data import load_dataset
from capsule_zoo.experiments import Options, Result, experiment
from capsule_zoo.experiments.common.findings import by_quantity, held_out_bounds, mean_and_error
from capsule_zoo.experiments.part_whole.headline import (
    DIGITS_STEPS,
    JITTER,
    TIGHTENING_STEPS,
    learn_digits,
    tighten,
)
from capsule_zoo.experiments.study import Job, Study
from capsule_zoo.experiments.training import checkpoints
from capsule_zoo.guides import AmortizedPartWhole
from capsule_zoo.inference import Inputs, fit
from capsule_zoo.models import PartWholeCapsules
from capsule_zoo.records import Number, Numbers

SETS_OF_SIZES: Mapping[str, Mapping[str, Any]] = {  # "few" as in the README and `part-whole/digits`
    "few": dict(objects=16, parts=12),
    "entry": {},
}


@dataclass(frozen=True)
class Task:
    """A training from scratch.

    Attributes:
        data: the data set's name.
        sizes: arguments of `PartWholeCapsules`.
        steps: number of updates.
        threads: threads of torch.
    """

    data: str
    sizes: Mapping[str, Any]
    steps: int
    threads: int = 1


class Start(NamedTuple):
    """The losses of all steps, and the loss of a blank canvas (nats per training image)."""

    losses: list[float]
    blank: float

    @property
    def step(self) -> int:
        """The first step under half of the blank canvas's loss; one more than all steps if none."""
        under = (i for i, loss in enumerate(self.losses, start=1) if loss < self.blank / 2)
        return next(under, len(self.losses) + 1)

    @property
    def loss(self) -> float:
        """The mean of ten steps, because a batch's noise is as large as some seeds' differences."""
        return mean_and_error(self.losses[-10:])[0]


def start(job: Job[Task]) -> list:
    """Train constructors' defaults by plain `fit`; return the losses, and a blank canvas's loss."""
    with threads(job.variant.threads):
        return train_constructed(job)


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Use this many threads of torch, and as many as before at the end."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def train_constructed(job: Job[Task]) -> list:
    """Train a model and a guide that no entry made, with the current number of threads."""
    task, options = job.variant, job.options
    pyro.set_rng_seed(options.seed)
    data = load_dataset(task.data, root=options.data_root)
    model = PartWholeCapsules(data.image_shape, **task.sizes)
    guide = AmortizedPartWhole(model)
    saved = checkpoints(options, "")  # a job shows no progress
    run = fit(model, guide, data.train, steps=task.steps, seed=options.seed, checks=saved)
    return [run.history["loss"].tolist(), blank_loss(model, data.train.images)]


def blank_loss(model: PartWholeCapsules, images: Tensor) -> float:
    """Return the loss of images on a blank canvas, in nats per image."""
    law = Normal(torch.zeros(()), model.sigma_image)
    return -law.log_prob(images).sum((1, 2, 3)).mean().item()


def summary(starts: list[Start]) -> Numbers:
    """Return the metrics of runs that differ in their seed only."""
    losses, steps = [s.loss for s in starts], [float(s.step) for s in starts]
    blank = sum(s.step > len(s.losses) for s in starts)
    return {
        "loss": mean_and_error(losses),
        "worst_loss": (max(losses), None, len(losses)),
        "step": mean_and_error(steps),
        "latest_step": (max(steps), None, len(steps)),
        "blank": (float(blank), None, len(starts)),
    }


def first_steps(
    data: str, options: Options, seeds: int, steps: int, sets_of_sizes: Mapping[str, Mapping]
) -> tuple[dict[str, Numbers], Number]:
    """Train all sizes from all seeds on one data set, each run on one thread.

    Returns:
        The metrics of each size, and the loss of a blank canvas.
    """
    limit = options.shortened(steps)
    study = Study({name: Task(data, s, limit) for name, s in sets_of_sizes.items()}, seeds)
    options.say(f"Training {seeds * len(sets_of_sizes)} pairs on {data}, {limit} steps each")
    found = study.run(start, replace(options, minutes=None))
    starts = {run: Start(*outcome) for run, outcome in found.items()}
    rows = {
        name: summary([begun for (sizes, _), begun in starts.items() if sizes == name])
        for name in sets_of_sizes
    }
    return rows, (next(iter(starts.values())).blank, None, 1)


@experiment("part-whole/starts", data="digits", minutes=20)
def starts(
    options: Options,
    *,
    seeds: int = 10,
    steps: int = 200,
    sizes: Mapping[str, Mapping] = SETS_OF_SIZES,
) -> Result:
    """Measure the loss after 200 steps on digits, and when training starts, at ten seeds.

    Args:
        seeds: number of seeds.
        steps: updates of every run in a full run of 20 minutes.
        sizes: sets of sizes by name, "few" among them; it is also trained on two threads.
    """
    options.refuse_run()
    rows, blank = first_steps("digits", options, seeds, steps, sizes)
    options.say("The same of the smaller sizes on two threads")
    task = Task("digits", sizes["few"], options.shortened(steps), threads=2)
    again = Study({"few-two-threads": task}, seeds)
    in_turn = replace(options, minutes=None, processes=1)
    found = again.run(start, in_turn)
    rows["few_two_threads"] = summary([Start(*outcome) for outcome in found.values()])
    return Result({"blank_canvas": blank, **by_quantity(rows)})


@experiment("part-whole/starts-mnist", data="mnist", minutes=20)
def starts_mnist(
    options: Options,
    *,
    seeds: int = 10,
    steps: int = 200,
    sizes: Mapping[str, Mapping] = SETS_OF_SIZES,
) -> Result:
    """Measure the loss after 200 steps on MNIST, and when training starts, at ten seeds.

    Args:
        seeds: number of seeds.
        steps: updates of every run in a full run of 20 minutes.
        sizes: sets of sizes by name.
    """
    options.refuse_run()
    rows, blank = first_steps("mnist", options, seeds, steps, sizes)
    return Result({"blank_canvas": blank, **by_quantity(rows)})


@dataclass(frozen=True)
class Demo:
    """The steps of training and tightening in `part-whole/digits`, and the draws of its bound."""

    steps: int
    tightening: int
    particles: int


@experiment("part-whole/demo-seeds", data="digits", minutes=30)
def demo_seeds(
    options: Options,
    *,
    seeds: int = 10,
    steps: int = DIGITS_STEPS,
    tightening: int = TIGHTENING_STEPS,
    particles: int = 50,
) -> Result:
    """Measure the bound on held-out digits at ten seeds: median, largest distance (30 minutes).

    Args:
        seeds: number of seeds.
        steps: updates of the pair; these and the next shrink with minutes.
        tightening: updates of the guide with normal poses.
        particles: number of draws of the IWAE bound.
    """
    options.refuse_run()
    demo = Demo(options.shortened(steps), options.shortened(tightening), particles)
    options.say(f"Training the pair {seeds} times")
    found = Study({"demo": demo}, seeds).run(demo_bound, replace(options, minutes=None))
    bounds = list(found.values())
    middle = median(bounds)
    return Result(
        {
            "elbo_median": (middle, None, seeds),
            "elbo_mean": mean_and_error(bounds),
            "elbo_lowest": (min(bounds), None, seeds),
            "elbo_highest": (max(bounds), None, seeds),
            "largest_distance": (max(abs(b - middle) for b in bounds), None, seeds),
        }
    )


def demo_bound(job: Job[Demo]) -> float:
    """Return the `elbo` of `part-whole/digits` from one seed."""
    demo, options = job.variant, job.options
    pyro.set_rng_seed(options.seed)
    data = load_dataset("digits")
    entry = learn_digits(data, options, steps=demo.steps)
    normal = tighten(entry, data, options, steps=demo.tightening, inputs=Inputs(JITTER))
    return held_out_bounds(normal, data.test, demo.particles, options.seed)["elbo"][0]
