"""Stacked capsule autoencoders: classes found by clusters of their capsules, and probes."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from pyro import poutine
from torch import Tensor

from capsule_zoo.data import Dataset, load_dataset
from capsule_zoo.experiments import Job, Options, Result, Study, create_untrained, experiment, train
from capsule_zoo.experiments.common.findings import (
    group_by_quantity,
    over_seeds,
    pictures,
    single,
    snake_case,
    squared_error,
)
from capsule_zoo.experiments.part_whole.transformations import LARGE
from capsule_zoo.experiments.shape_codes.affnist import center_ink
from capsule_zoo.inference import Checks, reconstruct
from capsule_zoo.inference.objectives.stacked_capsules import drawn_capsules
from capsule_zoo.inference.probes import cluster_accuracy, latents, linear_probe
from capsule_zoo.models.common.modes import eval_mode, use_seed
from capsule_zoo.records import Numbers, Table
from capsule_zoo.registry import Entry, load, read_recipe

SITES = {
    "presence": ["object_presence"],
    "presence_pose": ["object_presence", "object_pose"],
    "part_presence_pose": ["part_presence", "part_pose"],
}
PROBED = TEST_IMAGES = 10_000  # images that probes and clusters are fitted on, and test images
BATCH_SIZE = 32  # batch size of both models; larger batches learn less in equal time
STACKED = "stacked-capsule-autoencoder"
SIZES: dict[str, Mapping[str, Any]] = {  # on 40x40 pixels digits are as large as on 28x28
    STACKED: {"guide": dict(reader=dict(max_scale=0.8 * 28 / 40, coordinates=True))},
    "part-whole": LARGE,
}
WEIGHTS = f"{STACKED}-mnist"
RUNS = (WEIGHTS, f"runs/{WEIGHTS}-1", f"runs/{WEIGHTS}-2")


def explained_fractions(entry: Entry, images: Tensor, batch_size: int = 500) -> np.ndarray:
    """Return the expected fraction of the parts that each object explains, (N, objects)."""
    guide, fractions = entry.guide, []
    quiet = guide.with_switches(noise="none") if hasattr(guide, "with_switches") else guide
    with torch.no_grad(), eval_mode(guide), use_seed(0):
        for batch in images.split(batch_size):
            trace = poutine.trace(quiet).get_trace(batch)
            objects, parts = (drawn_capsules(trace, level.name) for level in entry.model.levels)
            fractions.append(entry.model.responsibilities(objects, parts)[..., 1:].mean(-2))
    return torch.cat(fractions).cpu().numpy()


def compute_features(entry: Entry, images: Tensor) -> dict[str, np.ndarray]:
    """Return the features of probes and clusters: presences, poses, and explained fractions."""
    features = {name: latents(entry.guide, images, sites) for name, sites in SITES.items()}
    if entry.name == STACKED:
        features["explained"] = explained_fractions(entry, images)
    return features


def measure(entry: Entry, data: Dataset) -> Numbers:
    """Measure probes and matched clusters on latents, and the error of reconstructions."""
    train_images, labels = data.train.images[:PROBED], data.train.labels[:PROBED]
    images, answers = data.test.images[:TEST_IMAGES], data.test.labels[:TEST_IMAGES]
    train_features, features = (compute_features(entry, x) for x in (train_images, images))
    numbers: Numbers = {}
    for name, rows in train_features.items():
        numbers[f"probe_{name}"] = linear_probe(rows, labels, features[name], answers)
        if name in ("presence", "explained"):
            accuracy = cluster_accuracy(rows, labels, features[name], answers)
            numbers[f"clusters_{name}"] = accuracy
    painted = reconstruct(entry.model, entry.guide, images)
    return {**numbers, "squared_error": squared_error(painted, images)}


@experiment("stacked-capsule-autoencoder/affnist", data="affnist", minutes=120)
def affnist(options: Options, *, seeds: int = 1) -> Result:
    """Train both models on shifted digits, and classify digits under affine maps (two hours).

    Images have 40x40 pixels, and every image is seen with its ink in the middle. Models, probes
    and clusters see shifted training digits only. `probe_...` are linear probes and `clusters_...`
    clusters that are matched with the classes, on presences, poses, and explained fractions.

    Args:
        seeds: number of seeds, among which the minutes are divided.
    """
    timed = replace(options, minutes=options.budget)
    study = Study(dict.fromkeys(SIZES), seeds)
    outcomes = study.run(learn, timed)
    numbers = {snake_case(name): over_seeds(rows) for name, rows in outcomes.items()}
    entry = load(study.folders(timed)[STACKED])
    images = load_centered(options).test.images
    return Result(group_by_quantity(numbers), pictures(entry, images), None, entry)


def load_centered(options: Options) -> Dataset:
    """Load affNIST with all ink in the middle."""
    return load_dataset("affnist", root=options.data_root).transform_images(center_ink)


def learn(job: Job) -> Numbers:
    """Train the entry of the job's name and measure it."""
    data = load_centered(job.options)
    entry = create_untrained(job.name, data, job.options, **SIZES[job.name])
    facts = train_in_time(entry, data, job.options)
    return measure(entry, data) | facts


def train_in_time(entry: Entry, data: Dataset, options: Options, **arguments: Any) -> Numbers:
    """Train an entry for the options' minutes of the processor; return its updates and minutes."""
    arguments |= dict(in_stages=True, batch_size=BATCH_SIZE, checks=Checks(clock="processor"))
    run = train(entry, data, options, options.budget, **arguments)
    return {"steps": single(run.steps), "core_minutes": single(run.seconds / 60)}


@experiment("stacked-capsule-autoencoder/seeds", data="mnist")
def seeds(options: Options) -> Result:
    """Measure the published weights and runs from other seeds (2 minutes).

    The quantities are defined at `affnist`. The other runs are trained first, each by the command
    on the card of the weights with another seed: `capsule-zoo train stacked-capsule-autoencoder
    --data mnist --batch-size 32 --steps 60000 --seed 1`. Rows are seeds; `mean` is over the seeds,
    with the standard error of the mean. The pictures are of the first run.
    """
    data = load_dataset("mnist", root=options.data_root)
    rows: dict[str, Numbers] = {}
    for run in RUNS:
        options.say(f"Measuring {run}")
        rows[f"seed_{read_recipe(run)['seed']}"] = measure(load(run), data)
    rows["mean"] = over_seeds(list(rows.values()))
    figures = pictures(load(RUNS[0]), data.test.images)
    return Result({"weights": Table(group_by_quantity(rows))}, figures)
