"""A test that training starts for every entry: short runs compared with a constant answer.

An entry that draws images has started if its reconstructions of held-out images are nearer to them
than the mean of the training images, which is the best constant image. A classifier has started if
it is right more often than not.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyro

from capsule_zoo.data import Dataset, load_dataset
from capsule_zoo.experiments import Options, Result, experiment
from capsule_zoo.experiments.findings import mean_and_error, snake_case
from capsule_zoo.experiments.training import shortened, side_by_side, train
from capsule_zoo.inference.evaluation.ancestral import infer, mean_images
from capsule_zoo.inference.evaluation.classification import error_rate
from capsule_zoo.records import Metrics, Numbers
from capsule_zoo.registry import Entry, create, list_models

SEEDS, STEPS = 5, 200
HALF = 0.5  # the error rate under which a classifier has started


@dataclass(frozen=True)
class Job:
    """One entry's training from scratch, from its seed, for so many steps."""

    entry: str
    seed: int
    steps: int


def score(job: Job) -> float:
    """What the entry gets wrong after training, as a multiple of what it must be under.

    Of its squared error and the mean image's, or of its error rate and a half: started below 1.
    """
    pyro.set_rng_seed(job.seed)
    data = load_dataset("digits")
    entry = create(job.entry, image_shape=data.image_shape)
    options = Options(seed=job.seed, progress=False)
    train(entry, data.train, options, steps=job.steps)
    if entry.model.supervised:
        return error_rate(entry.model, data.test).value / HALF
    return relative_error(entry, data)


def relative_error(entry: Entry, data: Dataset) -> float:
    """Squared error of reconstructed test images, over that of the mean training image."""
    images = data.test.images
    drawn = infer(entry.guide, images)
    painted = mean_images(entry.model, len(images), drawn, images=images)
    constant = data.train.images.mean(0)
    return ((painted - images).square().sum() / (constant - images).square().sum()).item()


@experiment("zoo/starts", data="digits")
def starts(options: Options) -> Result:
    """Compare every entry after 200 steps with a constant answer, from five seeds (an hour).

    `relative_error_<entry>` is the mean over seeds, `worst_<entry>` the largest; below 1 a run has
    started. `not_started` counts the runs that have not.
    """
    options.refuse_run()
    steps = shortened(STEPS, (options.minutes or 60) / 60)
    names = list_models()
    seeds = range(options.seed, options.seed + SEEDS)
    jobs = [Job(name, seed, steps) for name in names for seed in seeds]
    options.say(f"Training {len(names)} entries from {SEEDS} seeds, {steps} steps each")
    scores = side_by_side(score, jobs)
    mean, worst = Numbers(), Numbers()
    for i, name in enumerate(names):
        own = scores[i * SEEDS : (i + 1) * SEEDS]
        mean[snake_case(name)] = mean_and_error(own)
        worst[snake_case(name)] = (max(own), None, len(own))
    late = float(sum(s >= 1 for s in scores)), None, len(scores)
    metrics: Metrics = {"not_started": late, "relative_error": mean, "worst": worst}
    return Result(metrics)
