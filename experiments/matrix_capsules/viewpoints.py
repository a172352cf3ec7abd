"""Novel viewpoints, and attacks: matrix capsules against a convolutional network.

The paper (Hinton et al. 2018, section 5) trains on a third of smallNORB's azimuths, or the lowest
third of its elevations, and tests on the others. A capsule network and a convolutional one are
compared where they do equally well on familiar viewpoints. Here both are trained for a given time
and measured several times during training, more often at the start. All errors are compared at the
lowest familiar error that both networks reach, on the straight line between two measurements.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any

import pyro
import torch
from matplotlib.figure import Figure

from capsule_zoo.data import SmallNORB, Split, Toys3D, Views
from capsule_zoo.data.seeds import seeded_generator
from capsule_zoo.data.sources import data_folder
from capsule_zoo.data.viewpoints import CATEGORIES
from capsule_zoo.experiments import Job, Options, Result, Study, experiment, train
from capsule_zoo.experiments.common.findings import mean_and_error
from capsule_zoo.figures.curves import number_curves
from capsule_zoo.figures.grids import panels
from capsule_zoo.inference import Pace, error_rate, fgsm
from capsule_zoo.records import Metrics, Numbers, Table
from capsule_zoo.registry import Entry, create

FAMILIAR = {"azimuth": (15, 16, 17, 0, 1, 2), "elevation": (0, 1, 2)}
ENTRIES = {"capsules": "matrix-capsules", "cnn": "cnn"}
COSTS = {"capsules": 5.0, "cnn": 1.0}  # relative costs of a step; the networks' shares of the time
COLORS = {"capsules": "C0", "cnn": "C1"}
STEPS = {"fgsm": "one step", "iterated": "several steps"}
Run = tuple[str, str, int]  # network, factor, seed
Point = Mapping[str, float]  # error rates at one time of a training, by name


@dataclass(frozen=True)
class Trainings:
    """The settings of an experiment on viewpoints.

    Args:
        seeds: number of seeds for each network and factor.
        size: height and width of the views in pixels.
        checks: number of measurements during each training run; measurement i of n comes after
            (i / n)^2 of the time.
        views: number of familiar and of novel views that are tested on.
        attacked: number of familiar views under attack.
        epsilons: largest changes of a pixel by the attack of one step (FGSM).
        iterated: largest changes by the attack of several steps.
        attack_steps: number of these steps.
        capsules: sizes of the capsule network that replace the entry's own.
    """

    seeds: int = 3
    size: int = 32
    checks: int = 8
    views: int = 2000
    attacked: int = 200
    epsilons: tuple[float, ...] = (0.0, 0.01, 0.02, 0.04)
    iterated: tuple[float, ...] = (0.01, 0.02)
    attack_steps: int = 5
    capsules: Mapping[str, Any] | None = None


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


def train_and_measure(
    job: Job[tuple[str, str]], *, source: str, settings: Trainings
) -> dict[str, Any]:
    """Train one network on familiar views, and measure it during training and under attack.

    Args:
        job: its variant is one of `ENTRIES`, and the factor that makes the held-out views novel.
        source: "toys3d" or "smallnorb".
    """
    (network, factor), options = job.variant, job.options
    train_views, test_views = views(source, options, settings.size)
    familiar = {factor: FAMILIAR[factor]}
    novel = {factor: novel_values(test_views, factor)}
    seen = train_views.select(**familiar).split(settings.size)
    splits = [test_views.select(**kind).split(settings.size) for kind in (familiar, novel)]
    tested = [some(split, settings.views) for split in splits]
    pyro.set_rng_seed(options.seed)
    sizes = (settings.capsules or {}) if network == "capsules" else {}
    shape = tuple(seen.images.shape[1:])
    entry = create(ENTRIES[network], image_shape=shape, classes=len(CATEGORIES), **sizes)
    few = tested[0][: settings.attacked]
    path = []
    for check in range(1, settings.checks + 1):
        minutes = options.budget * (check / settings.checks) ** 2
        earlier = f"check-{check - 1}" if check > 1 else None
        how: dict[str, Any] = dict(pace=Pace("constant"), name=f"check-{check}", after=earlier)
        train(entry, seen, options, minutes, **how)
        errors = [error_rate(entry.model, entry.guide, split).value for split in tested]
        point = dict(zip(("familiar", "novel"), errors, strict=True))
        if factor == "azimuth":
            point |= attacked(entry, few, settings)
        path.append(point)
    return {"path": path}


def attacked(entry: Entry, split: Split, settings: Trainings) -> dict[str, float]:
    """Return a network's errors under the attacks, by name and size in thousandths of a pixel."""
    attacks = {f"fgsm_{round(1000 * size)}_error": (size, 1) for size in settings.epsilons}
    for size in settings.iterated:
        attacks[f"iterated_{round(1000 * size)}_error"] = size, settings.attack_steps
    pair = entry.model, entry.guide
    return {
        name: error_rate(*pair, fgsm(entry.model, split, size, steps=steps)).value
        for name, (size, steps) in attacks.items()
    }


def matched(paths: Mapping[str, Sequence[Point]]) -> dict[str, Point]:
    """Return each network's errors where its familiar error is the lowest that all networks reach.

    Between two measurements errors follow a straight line. If a training crosses that error several
    times, the last time counts; if it begins below, its first measurement does.
    """
    common = max(min(point["familiar"] for point in path) for path in paths.values())
    return {name: crossing(path, common) for name, path in paths.items()}


def crossing(path: Sequence[Point], familiar: float) -> Point:
    """Return the errors of a training where its familiar error last has a value."""
    for before, after in reversed(list(pairwise(path))):
        if before["familiar"] >= familiar >= after["familiar"] < before["familiar"]:
            share = (before["familiar"] - familiar) / (before["familiar"] - after["familiar"])
            return {name: (1 - share) * before[name] + share * after[name] for name in before}
    return min(path, key=lambda point: abs(point["familiar"] - familiar))


def compared(source: str, settings: Trainings, options: Options) -> Result:
    """Train every network on every factor with every seed, and compare them."""
    views(source, options, settings.size)  # rendered or downloaded once, before processes need them
    variants = {"-".join(pair): pair for pair in product(ENTRIES, FAMILIAR)}
    costs = {name: COSTS[network] for name, (network, _) in variants.items()}
    options.say(f"Training {len(variants) * settings.seeds} networks")
    timed, study = replace(options, minutes=options.budget), Study(variants, settings.seeds, costs)
    outcomes = study.run(train_and_measure, timed, source=source, settings=settings)
    found = {
        (*variants[name], seed): run["path"]
        for name, runs in outcomes.items()
        for seed, run in enumerate(runs, options.seed)
    }
    errors = {factor: errors_where_matched(found, factor) for factor in FAMILIAR}
    matched_errors = {
        f"{factor}_{kind}error": errors[factor][name]
        for factor in FAMILIAR
        for name, kind in (("novel", ""), ("familiar", "familiar_"))
    }
    attacks = {name: e for name, e in errors["azimuth"].items() if name.endswith("_error")}
    metrics: Metrics = {**matched_errors, "attacked": Table(attacks)}
    return Result(metrics, {"": paths_figure(found), "attack": attack_figure(attacks)})


def errors_where_matched(found: Mapping[Run, Sequence[Point]], factor: str) -> dict[str, Numbers]:
    """Return the errors over the seeds, by name, then by network."""
    errors: dict[str, dict[str, list[float]]] = {}
    for seed in sorted({seed for _, _, seed in found}):
        paths = {network: found[network, factor, seed] for network in ENTRIES}
        for network, point in matched(paths).items():
            for name, error in point.items():
                errors.setdefault(name, {}).setdefault(network, []).append(error)
    return {
        name: {network: mean_and_error(values) for network, values in of_networks.items()}
        for name, of_networks in errors.items()
    }


@experiment("matrix-capsules/viewpoints", data="toys3d", minutes=240, lead="")
def viewpoints(options: Options, chosen: Trainings) -> Result:
    """Compare capsules with a CNN on novel viewpoints of rendered toys (4 core-hours).

    The minutes are shared by all training runs, which go side by side where there are several
    cores. Measuring during training takes some forty minutes more. Errors are means over the seeds
    at matched familiar errors, with the standard error over seeds. `fgsm_40_...` are errors on
    familiar azimuths under a white-box attack of one step that changes pixels by .040, and
    `iterated_...` errors under an attack of several steps.
    """
    return compared("toys3d", chosen, options)


@experiment("matrix-capsules/viewpoints-smallnorb", data="smallnorb", minutes=240)
def viewpoints_smallnorb(options: Options, chosen: Trainings) -> Result:
    """Compare capsules with a CNN on novel viewpoints of smallNORB (4 core-hours).

    The files of smallNORB must be given or downloaded.
    """
    return compared("smallnorb", chosen, options)


def paths_figure(found: Mapping[Run, Sequence[Point]]) -> Figure:
    """Draw novel against familiar error during every training run, with a panel for each factor."""
    figure, (axes,) = panels(len(FAMILIAR), size=(4, 3.5))
    for (network, factor, _), path in found.items():
        axis = axes[list(FAMILIAR).index(factor)]
        familiar, novel = zip(*((p["familiar"], p["novel"]) for p in path), strict=True)
        axis.loglog(familiar, novel, ".-", color=COLORS[network])
    for axis, factor in zip(axes, FAMILIAR, strict=True):
        axis.set_xlabel("error on familiar viewpoints")
        axis.set_title(f"novel {factor}s")
    axes[0].set_ylabel("error on novel viewpoints")
    for network, color in COLORS.items():
        axes[0].plot([], [], color=color, label=network)
    axes[0].legend()
    return figure


def attack_figure(attacks: Mapping[str, Numbers]) -> Figure:
    """Draw the error under attack by the size of the attack, with the standard error over seeds."""
    curves: dict[str, Numbers] = {}
    for name, row in attacks.items():
        attack, size, _ = name.split("_")
        for network, number in row.items():
            own = curves.setdefault(f"{network}, {STEPS[attack]}", {})
            own[f"{int(size) / 1000:g}"] = number
    return number_curves({"error": curves}, "largest change of a pixel")
