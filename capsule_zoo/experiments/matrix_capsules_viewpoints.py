"""Novel viewpoints, and an attack: matrix capsules against a convolutional network.

The paper (Hinton et al. 2018, section 5.1) trains on a third of smallNORB's azimuths, or the lowest
third of its elevations, and asks about the others. A capsule network and a convolutional one are
compared where they do equally well on familiar viewpoints. Here both are trained for a given time
and measured several times on the way; the one that gets further is judged where it came closest to
the best of the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import pyro
import torch
from matplotlib.figure import Figure

from capsule_zoo.data import SmallNORB, Split, Toys3D, Views
from capsule_zoo.data.seeds import seeded_generator
from capsule_zoo.data.sources import data_folder
from capsule_zoo.data.viewpoints import CATEGORIES
from capsule_zoo.experiments import Metrics, Number, Options, Result, experiment
from capsule_zoo.experiments.findings import mean_and_error
from capsule_zoo.experiments.training import side_by_side, train
from capsule_zoo.inference.evaluation.classification import Share, error_rate, fgsm
from capsule_zoo.registry import Entry, create

SIZE = 32  # pixels
SEEDS = 3
CHECKS = 5  # measurements on the way of one training
MEASURED = 2000  # views, of either kind
FAMILIAR = {"azimuth": (15, 16, 17, 0, 1, 2), "elevation": (0, 1, 2)}
ENTRIES = {"capsules": "matrix-capsules", "cnn": "cnn"}
COSTS = {"capsules": 5.0, "cnn": 1.0}  # of a step, beside the other's; their shares of the time
EPSILONS = (0.0, 0.01, 0.02, 0.04, 0.08)
ATTACKED = 500  # familiar views

Run = tuple[str, str, int]  # network, factor, seed


class Point(NamedTuple):
    """Error rates of a network at one time of its training."""

    familiar: float
    novel: float


@dataclass(frozen=True)
class Job:
    """What a process needs to train one network.

    Attributes:
        network: one of `ENTRIES`.
        factor: what is novel about the views that are held out.
    """

    network: str
    factor: str
    seed: int
    minutes: float
    source: str
    options: Options


class Outcome(NamedTuple):
    """A trained network's errors.

    Attributes:
        path: on the way.
        attacked: at the end, by the size of the attack.
    """

    path: list[Point]
    attacked: dict[float, Share]


def views(source: str, options: Options) -> tuple[Views, Views]:
    """Training and test views of "toys3d" or "smallnorb"."""
    data = Toys3D(SIZE) if source == "toys3d" else SmallNORB(data_folder(options.data_root))
    return data.train, data.test


def novel_values(seen: Views, factor: str) -> list[int]:
    """Of a factor, those that are not familiar."""
    return sorted(set(getattr(seen, factor).tolist()) - set(FAMILIAR[factor]))


def some(split: Split, number: int) -> Split:
    """So many of the images, or all, the same ones on every call."""
    return split[torch.randperm(len(split), generator=seeded_generator(5))[:number]]


def train_and_measure(job: Job) -> Outcome:
    """Train one network on familiar views, and measure it on the way and under attack."""
    train_views, test_views = views(job.source, job.options)
    familiar = {job.factor: FAMILIAR[job.factor]}
    novel = {job.factor: novel_values(test_views, job.factor)}
    seen = train_views.select(**familiar).split(SIZE)
    asked = [some(test_views.select(**kind).split(SIZE), MEASURED) for kind in (familiar, novel)]
    pyro.set_rng_seed(job.seed)
    shape = tuple(seen.images.shape[1:])
    entry = create(ENTRIES[job.network], image_shape=shape, classes=len(CATEGORIES))
    path = []
    with TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "run.safetensors"
        for check in range(1, CHECKS + 1):
            settings: dict[str, Any] = dict(schedule="constant", checkpoint=checkpoint)
            settings["resume"] = checkpoint if checkpoint.is_file() else None
            options = replace(job.options, seed=job.seed)
            train(entry, seen, options, job.minutes * check / CHECKS, **settings)
            path.append(Point(*(error_rate(entry.model, split).value for split in asked)))
    return Outcome(path, attack(entry, asked[0][:ATTACKED]))


def attack(entry: Entry, split: Split) -> dict[float, Share]:
    """Error rates under FGSM of each size."""
    return {size: error_rate(entry.model, fgsm(entry.model, split, size)) for size in EPSILONS}


def matched(paths: Mapping[str, list[Point]]) -> dict[str, Point]:
    """Where each network comes closest to the familiar error that all of them reach."""
    reached = max(min(point.familiar for point in path) for path in paths.values())
    return {
        name: min(path, key=lambda point: abs(point.familiar - reached))
        for name, path in paths.items()
    }


def compared(source: str, options: Options) -> Result:
    """Train every network on every factor with every seed, and set them side by side."""
    options.refuse_run()
    views(source, options)  # rendered or downloaded once, before several processes want them
    runs = list(product(ENTRIES, FAMILIAR, range(options.seed, options.seed + SEEDS)))
    share = (options.minutes or 240) / sum(COSTS[network] for network, _, _ in runs)
    quiet = replace(options, progress=False)
    options.say(f"Training {len(runs)} networks")
    jobs = [Job(*run, share * COSTS[run[0]], source, quiet) for run in runs]
    found = dict(zip(runs, side_by_side(train_and_measure, jobs), strict=True))
    attacks = errors_under_attack(found)
    metrics = errors_where_matched(found)
    for (network, size), error in attacks.items():
        metrics[f"fgsm_{round(1000 * size)}_error_{network}"] = error
    return Result(metrics, {"": paths_figure(found), "attack": attack_figure(attacks)})


def errors_where_matched(found: Mapping[Run, Outcome]) -> Metrics:
    """Over the seeds, by factor, kind of view and network."""
    points: dict[str, list[float]] = {}
    seeds = sorted({seed for _, _, seed in found})
    for factor, seed in product(FAMILIAR, seeds):
        paths = {network: found[network, factor, seed].path for network in ENTRIES}
        for network, point in matched(paths).items():
            points.setdefault(f"{factor}_error_{network}", []).append(point.novel)
            points.setdefault(f"{factor}_familiar_error_{network}", []).append(point.familiar)
    return {name: mean_and_error(errors) for name, errors in points.items()}


def errors_under_attack(found: Mapping[Run, Outcome]) -> dict[tuple[str, float], Number]:
    """Over the seeds, by network and size of the attack, of those trained on a few azimuths."""
    errors: dict[tuple[str, float], list[float]] = {}
    for (network, factor, _), outcome in found.items():
        if factor == "azimuth":
            for size, error in outcome.attacked.items():
                errors.setdefault((network, size), []).append(error.value)
    return {key: mean_and_error(values) for key, values in errors.items()}


@experiment("matrix-capsules/viewpoints", data="toys3d")
def viewpoints(options: Options) -> Result:
    """Capsules against a CNN on novel azimuths and elevations of rendered toys (4 core-hours).

    `minutes` are those of all twelve trainings together, which go side by side where there are
    cores; measuring on the way takes some twenty more. Errors are means over three seeds at
    matched familiar errors, with the standard error over seeds; `fgsm_40_...` are errors on
    familiar views under a white-box attack that changes pixels by .040.
    """
    return compared("toys3d", options)


@experiment("matrix-capsules/viewpoints-smallnorb", data="smallnorb")
def viewpoints_smallnorb(options: Options) -> Result:
    """The same on smallNORB's photographs, whose files must be given or downloaded."""
    return compared("smallnorb", options)


def paths_figure(found: Mapping[Run, Outcome]) -> Figure:
    """Novel against familiar error on the way of every training, a panel for each factor."""
    figure, axes = plt.subplots(1, len(FAMILIAR), figsize=(8, 3.5), squeeze=False)
    colours = dict(zip(ENTRIES, ("C0", "C1"), strict=True))
    for (network, factor, _), outcome in found.items():
        axis = axes[0, list(FAMILIAR).index(factor)]
        familiar, novel = zip(*outcome.path, strict=True)
        axis.plot(familiar, novel, ".-", color=colours[network])
    for axis, factor in zip(axes[0], FAMILIAR, strict=True):
        axis.set_xlabel("error on familiar viewpoints")
        axis.set_title(f"novel {factor}s")
    axes[0, 0].set_ylabel("error on novel viewpoints")
    for network, colour in colours.items():
        axes[0, 0].plot([], [], color=colour, label=network)
    axes[0, 0].legend()
    figure.set_layout_engine("constrained")
    return figure


def attack_figure(attacks: Mapping[tuple[str, float], Number]) -> Figure:
    """Error under attack by its size, with the standard error over seeds."""
    figure, axis = plt.subplots(figsize=(5, 3.5))
    for network in ENTRIES:
        values, errors, _ = zip(*(attacks[network, size] for size in EPSILONS), strict=True)
        axis.errorbar(EPSILONS, values, errors, fmt=".-", capsize=3, label=network)
    axis.set_xlabel("largest change of a pixel")
    axis.set_ylabel("error")
    axis.set_ylim(0, 1)
    axis.legend()
    figure.set_layout_engine("constrained")
    return figure
