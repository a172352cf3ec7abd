"""Novel viewpoints, and an attack: matrix capsules against a convolutional network.

The paper (Hinton et al. 2018, section 5.1) trains on a third of smallNORB's azimuths, or the lowest
third of its elevations, and tests on the others. A capsule network and a convolutional one are
compared where they do equally well on familiar viewpoints. Here both are trained for a given time
and measured several times during training. The network that gets further is judged at the check
where it came closest to the best of the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import pyro
import torch
from matplotlib.figure import Figure

from capsule_zoo.data import SmallNORB, Split, Toys3D, Views
from capsule_zoo.data.seeds import seeded_generator
from capsule_zoo.data.sources import data_folder
from capsule_zoo.data.viewpoints import CATEGORIES
from capsule_zoo.experiments import Options, Result, experiment
from capsule_zoo.experiments.findings import mean_and_error
from capsule_zoo.experiments.study import Job, Study
from capsule_zoo.experiments.training import train
from capsule_zoo.inference.evaluation.classification import error_rate, fgsm
from capsule_zoo.records import Metrics, Number, Numbers, Table
from capsule_zoo.registry import create

FAMILIAR = {"azimuth": (15, 16, 17, 0, 1, 2), "elevation": (0, 1, 2)}
ENTRIES = {"capsules": "matrix-capsules", "cnn": "cnn"}
COSTS = {"capsules": 5.0, "cnn": 1.0}  # relative costs of a step; the networks' shares of the time
Run = tuple[str, str, int]  # network, factor, seed
EPSILONS = (0.0, 0.01, 0.02, 0.04, 0.08)


@dataclass(frozen=True)
class Trainings:
    """The settings of an experiment on viewpoints.

    Args:
        seeds: number of seeds for each network and factor.
        size: height and width of the views in pixels.
        checks: number of measurements during each training run.
        views: number of familiar and of novel views that are tested on.
        attacked: number of familiar views under attack.
        epsilons: largest changes of a pixel by the attacks.
        capsules: sizes of the capsule network that replace the entry's own.
    """

    seeds: int = 3
    size: int = 32
    checks: int = 5
    views: int = 2000
    attacked: int = 500
    epsilons: tuple[float, ...] = EPSILONS
    capsules: Mapping[str, Any] | None = None


class Point(NamedTuple):
    """The error rates of a network at one time of its training."""

    familiar: float
    novel: float


@dataclass(frozen=True)
class Task:
    """The training of one network.

    Attributes:
        network: one of `ENTRIES`.
        factor: the factor that makes the held-out views novel.
        source: "toys3d" or "smallnorb".
        settings: the settings of the experiment.
    """

    network: str
    factor: str
    source: str
    settings: Trainings


@dataclass(frozen=True)
class Outcome:
    """The errors of a trained network.

    Attributes:
        path: familiar and novel error during training.
        attacked: error at the end, by the size of the attack.
    """

    path: list[Point]
    attacked: dict[float, float]

    @classmethod
    def read(cls, outcome: Mapping[str, Any]) -> Outcome:
        """Return an outcome that a run has saved."""
        attacked = {float(size): error for size, error in outcome["attacked"]}
        return cls([Point(*errors) for errors in outcome["path"]], attacked)


def views(source: str, options: Options, size: int) -> tuple[Views, Views]:
    """Return training and test views of "toys3d" or "smallnorb"."""
    data = Toys3D(size) if source == "toys3d" else SmallNORB(data_folder(options.data_root))
    return data.train, data.test


def novel_values(seen: Views, factor: str) -> list[int]:
    """Return the values of a factor that are not familiar."""
    return sorted(set(getattr(seen, factor).tolist()) - set(FAMILIAR[factor]))


def some(split: Split, number: int) -> Split:
    """Return `number` of the images, or all of them, and the same ones on every call."""
    return split[torch.randperm(len(split), generator=seeded_generator(5))[:number]]


def train_and_measure(job: Job[Task]) -> dict[str, Any]:
    """Train one network on familiar views, and measure it during training and under attack."""
    task, options, settings = job.variant, job.options, job.variant.settings
    train_views, test_views = views(task.source, options, settings.size)
    familiar = {task.factor: FAMILIAR[task.factor]}
    novel = {task.factor: novel_values(test_views, task.factor)}
    seen = train_views.select(**familiar).split(settings.size)
    splits = [test_views.select(**kind).split(settings.size) for kind in (familiar, novel)]
    tested = [some(split, settings.views) for split in splits]
    pyro.set_rng_seed(options.seed)
    sizes = (settings.capsules or {}) if task.network == "capsules" else {}
    shape = tuple(seen.images.shape[1:])
    entry = create(ENTRIES[task.network], image_shape=shape, classes=len(CATEGORIES), **sizes)
    path = []
    for check in range(1, settings.checks + 1):
        minutes = options.budget * check / settings.checks
        earlier = f"check-{check - 1}" if check > 1 else None
        how: dict[str, Any] = dict(schedule="constant", name=f"check-{check}", after=earlier)
        train(entry, seen, options, minutes, **how)
        path.append([error_rate(entry.model, split).value for split in tested])
    few = tested[0][: settings.attacked]
    attacked = [
        (size, error_rate(entry.model, fgsm(entry.model, few, size)).value)
        for size in settings.epsilons
    ]
    return {"path": path, "attacked": attacked}


def matched(paths: Mapping[str, list[Point]]) -> dict[str, Point]:
    """Return, for each network, the check with the familiar error nearest to the common one.

    The common error is the lowest one that all networks reach.
    """
    reached = max(min(point.familiar for point in path) for path in paths.values())
    return {
        name: min(path, key=lambda point: abs(point.familiar - reached))
        for name, path in paths.items()
    }


def compared(source: str, settings: Trainings, options: Options) -> Result:
    """Train every network on every factor with every seed, and compare them."""
    options.refuse_run()
    views(
        source, options, settings.size
    )  # rendered or downloaded once, before several processes need them
    tasks = {
        f"{network}-{factor}": Task(network, factor, source, settings)
        for network, factor in product(ENTRIES, FAMILIAR)
    }
    costs = {name: COSTS[task.network] for name, task in tasks.items()}
    study = Study(tasks, settings.seeds, costs)
    options.say(f"Training {len(tasks) * settings.seeds} networks")
    outcomes = study.run(train_and_measure, replace(options, minutes=options.budget))
    found = {
        (tasks[name].network, tasks[name].factor, seed): Outcome.read(outcome)
        for (name, seed), outcome in outcomes.items()
    }
    attacks = errors_under_attack(found)
    under_attack: dict[str, Numbers] = {}
    for (network, size), error in attacks.items():
        under_attack.setdefault(f"fgsm_{round(1000 * size)}_error", {})[network] = error
    metrics: Metrics = {**errors_where_matched(found), "attacked": Table(under_attack)}
    return Result(metrics, {"": paths_figure(found), "attack": attack_figure(attacks)})


def errors_where_matched(found: Mapping[Run, Outcome]) -> dict[str, Numbers]:
    """Return the errors over the seeds, by factor and kind of view, then by network."""
    points: dict[str, dict[str, list[float]]] = {}
    seeds = sorted({seed for _, _, seed in found})
    for factor, seed in product(FAMILIAR, seeds):
        paths = {network: found[network, factor, seed].path for network in ENTRIES}
        for network, point in matched(paths).items():
            for kind, error in (("", point.novel), ("familiar_", point.familiar)):
                of_networks = points.setdefault(f"{factor}_{kind}error", {})
                of_networks.setdefault(network, []).append(error)
    return {
        quantity: {network: mean_and_error(errors) for network, errors in of_networks.items()}
        for quantity, of_networks in points.items()
    }


def errors_under_attack(found: Mapping[Run, Outcome]) -> dict[tuple[str, float], Number]:
    """Return the errors of networks that saw a few azimuths, by network and size of the attack."""
    errors: dict[tuple[str, float], list[float]] = {}
    for (network, factor, _), outcome in found.items():
        if factor == "azimuth":
            for size, error in outcome.attacked.items():
                errors.setdefault((network, size), []).append(error)
    return {key: mean_and_error(values) for key, values in errors.items()}


@experiment("matrix-capsules/viewpoints", data="toys3d", minutes=240, lead="", takes=Trainings)
def viewpoints(options: Options, **settings: Any) -> Result:
    """Compare capsules with a CNN on novel viewpoints of rendered toys (4 core-hours).

    The minutes are shared by all training runs, which go side by side where there are several
    cores. Measuring during training takes some twenty minutes more. Errors are means over the
    seeds at matched familiar errors, with the standard error over seeds. `fgsm_40_...` are errors
    on familiar views under a white-box attack that changes pixels by .040.
    """
    return compared("toys3d", Trainings(**settings), options)


@experiment("matrix-capsules/viewpoints-smallnorb", data="smallnorb", minutes=240, takes=Trainings)
def viewpoints_smallnorb(options: Options, **settings: Any) -> Result:
    """Compare capsules with a CNN on novel viewpoints of smallNORB (4 core-hours).

    The files of smallNORB must be given or downloaded.
    """
    return compared("smallnorb", Trainings(**settings), options)


def paths_figure(found: Mapping[Run, Outcome]) -> Figure:
    """Draw novel against familiar error during every training run, with a panel for each factor."""
    figure, axes = plt.subplots(1, len(FAMILIAR), figsize=(8, 3.5), squeeze=False)
    colors = dict(zip(ENTRIES, ("C0", "C1"), strict=True))
    for (network, factor, _), outcome in found.items():
        axis = axes[0, list(FAMILIAR).index(factor)]
        familiar, novel = zip(*outcome.path, strict=True)
        axis.plot(familiar, novel, ".-", color=colors[network])
    for axis, factor in zip(axes[0], FAMILIAR, strict=True):
        axis.set_xlabel("error on familiar viewpoints")
        axis.set_title(f"novel {factor}s")
    axes[0, 0].set_ylabel("error on novel viewpoints")
    for network, color in colors.items():
        axes[0, 0].plot([], [], color=color, label=network)
    axes[0, 0].legend()
    figure.set_layout_engine("constrained")
    return figure


def attack_figure(attacks: Mapping[tuple[str, float], Number]) -> Figure:
    """Draw the error under attack by the size of the attack, with the standard error over seeds."""
    figure, axis = plt.subplots(figsize=(5, 3.5))
    for network in ENTRIES:
        own = {size: number for (name, size), number in attacks.items() if name == network}
        values, errors, _ = zip(*own.values(), strict=True)
        axis.errorbar(list(own), values, errors, fmt=".-", capsize=3, label=network)
    axis.set_xlabel("largest change of a pixel")
    axis.set_ylabel("error")
    axis.set_ylim(0, 1)
    axis.legend()
    figure.set_layout_engine("constrained")
    return figure
