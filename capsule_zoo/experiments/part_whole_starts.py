"""A test that training starts at every seed: first losses, and the demo's bound on ten seeds.

A pair that does not start draws nothing: its parts lie off the image, and its loss stays at the
loss of a blank canvas.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import pyro
import torch
from torch import Tensor
from torch.distributions import Normal

from capsule_zoo.data import load_dataset
from capsule_zoo.experiments import Options, Result, experiment
from capsule_zoo.experiments.findings import by_quantity, held_out_bounds, mean_and_error
from capsule_zoo.experiments.part_whole import (
    DIGITS_STEPS,
    JITTER,
    TIGHTENING_STEPS,
    learn_digits,
    tighten,
)
from capsule_zoo.experiments.training import shortened, side_by_side
from capsule_zoo.guides import AmortizedPartWhole
from capsule_zoo.inference import fit
from capsule_zoo.models import PartWholeCapsules
from capsule_zoo.records import Number, Numbers

SEEDS, STEPS, PARTICLES = 10, 200, 50
SETS_OF_SIZES: dict[str, dict[str, Any]] = {  # the README and the demo have few objects and parts
    "few": dict(objects=16, parts=12),
    "entry": {},
}


@dataclass(frozen=True)
class Job:
    """One training from scratch: on what, at which sizes, from which seed, for how long."""

    data: str
    sizes: str
    seed: int
    steps: int
    threads: int = 1
    root: str | Path | None = None


class Start(NamedTuple):
    """Losses of every step, and that of a blank canvas on the training images (nats per image)."""

    losses: list[float]
    blank: float

    @property
    def step(self) -> int:
        """The first step at under half of the blank canvas's loss; one more than all if none."""
        under = (i for i, loss in enumerate(self.losses, start=1) if loss < self.blank / 2)
        return next(under, len(self.losses) + 1)

    @property
    def loss(self) -> float:
        """Mean of the last ten steps: one batch's noise is as large as some seeds' differences."""
        return mean_and_error(self.losses[-10:])[0]


def start(job: Job) -> Start:
    """Train constructors' defaults by plain `fit`: the entry's own law, as a test makes sure."""
    with threads(job.threads):
        return train_constructed(job)


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Torch on so many threads, and on as many as before at the end."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def train_constructed(job: Job) -> Start:
    """Train a model and a guide that no entry made, on the threads that there are."""
    pyro.set_rng_seed(job.seed)
    data = load_dataset(job.data, root=job.root)
    model = PartWholeCapsules(image_size=data.image_shape[1], **SETS_OF_SIZES[job.sizes])
    guide = AmortizedPartWhole(model)
    run = fit(model, guide, data.train, steps=job.steps, seed=job.seed, progress=False)
    return Start(run.history["loss"].tolist(), blank_loss(model, data.train.images))


def blank_loss(model: PartWholeCapsules, images: Tensor) -> float:
    """What images cost on a canvas without paint, nats per image."""
    law = Normal(torch.zeros(()), model.sigma_image)
    return -law.log_prob(images).sum((1, 2, 3)).mean().item()


def summary(starts: list[Start]) -> Numbers:
    """Metrics of one set of runs that differ in their seed."""
    losses, steps = [s.loss for s in starts], [float(s.step) for s in starts]
    blank = sum(s.step > len(s.losses) for s in starts)
    return {
        "loss": mean_and_error(losses),
        "worst_loss": (max(losses), None, len(losses)),
        "step": mean_and_error(steps),
        "latest_step": (max(steps), None, len(steps)),
        "blank": (float(blank), None, len(starts)),
    }


def first_steps(data: str, options: Options) -> tuple[dict[str, Numbers], Number]:
    """All seeds and both sizes on one data set, each run on one thread; and a blank canvas."""
    steps = shortened(STEPS, (options.minutes or 20) / 20)
    seeds = range(options.seed, options.seed + SEEDS)
    root = options.data_root
    jobs = [Job(data, sizes, seed, steps, 1, root) for sizes in SETS_OF_SIZES for seed in seeds]
    options.say(f"Training {len(jobs)} pairs on {data}, {steps} steps each")
    found = side_by_side(start, jobs)
    rows = {
        sizes: summary(found[i * SEEDS : (i + 1) * SEEDS]) for i, sizes in enumerate(SETS_OF_SIZES)
    }
    return rows, (found[0].blank, None, 1)


@experiment("part-whole/starts", data="digits")
def starts(options: Options) -> Result:
    """Ten seeds on digits: the loss after 200 steps, and when the canvas is no longer blank."""
    options.refuse_run()
    rows, blank = first_steps("digits", options)
    steps = shortened(STEPS, (options.minutes or 20) / 20)
    options.say("The same of the smaller sizes on two threads")
    seeds = range(options.seed, options.seed + SEEDS)
    found = [start(Job("digits", "few", seed, steps, threads=2)) for seed in seeds]
    rows["few_two_threads"] = summary(found)
    return Result({"blank_canvas": blank, **by_quantity(rows)})


@experiment("part-whole/starts-mnist", data="mnist")
def starts_mnist(options: Options) -> Result:
    """Ten seeds on MNIST: the loss after 200 steps, and when the canvas is no longer blank."""
    options.refuse_run()
    rows, blank = first_steps("mnist", options)
    return Result({"blank_canvas": blank, **by_quantity(rows)})


@experiment("part-whole/demo-seeds", data="digits")
def demo_seeds(options: Options) -> Result:
    """The demo's held-out bound at ten seeds: its median, and the farthest from it (30 minutes)."""
    options.refuse_run()
    length = (options.minutes or 3 * SEEDS) / (3 * SEEDS)
    seeds = range(options.seed, options.seed + SEEDS)
    jobs = [(seed, length) for seed in seeds]
    options.say(f"Training the demo's pair {SEEDS} times")
    bounds = side_by_side(demo_bound, jobs)
    middle = median(bounds)
    return Result(
        {
            "elbo_median": (middle, None, SEEDS),
            "elbo_mean": mean_and_error(bounds),
            "elbo_lowest": (min(bounds), None, SEEDS),
            "elbo_highest": (max(bounds), None, SEEDS),
            "largest_distance": (max(abs(b - middle) for b in bounds), None, SEEDS),
        }
    )


def demo_bound(job: tuple[int, float]) -> float:
    """The demo's `elbo`, from its seed and the length of its run (1: all of it)."""
    seed, length = job
    pyro.set_rng_seed(seed)
    options = Options(seed=seed, progress=False)
    data = load_dataset("digits")
    entry = learn_digits(data, options, steps=shortened(DIGITS_STEPS, length))
    steps = shortened(TIGHTENING_STEPS, length)
    normal = tighten(entry, data, options, steps=steps, transform=JITTER)
    return held_out_bounds(normal, data.test, PARTICLES, seed)["elbo"][0]
