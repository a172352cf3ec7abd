"""Novel viewpoints and attacks: matrix capsules compared with an equal network without capsules.

The paper (Hinton et al. 2018, section 5) trains on a third of smallNORB's azimuths, or the lowest
third of its elevations, and tests on the others; so do we with rendered toys. Of letters the middle
third of either angle trains. The networks are equal and tuned by one search, as in
`zoo.equal_network`. They are trained for equal minutes and measured several times during training,
more often at the start. All errors are compared at the lowest familiar error that both networks
reach, on the straight line between two measurements.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from matplotlib.figure import Figure

from capsule_zoo.data import LetterViews, Split, Toys3D, Views
from capsule_zoo.data.seeds import seeded_generator
from capsule_zoo.experiments import Job, Options, Result, experiment, train
from capsule_zoo.experiments.common.findings import mean_and_error
from capsule_zoo.experiments.zoo.equal_network import (
    NETWORK,
    Search,
    Task,
    create_network,
    training_of,
    tune,
    under,
)
from capsule_zoo.figures.curves import legend_below, number_curves, plain_numbers
from capsule_zoo.figures.grids import panels
from capsule_zoo.inference import Pace, error_rate, fgsm
from capsule_zoo.records import Metrics, Numbers, Table
from capsule_zoo.registry import Entry

SETS: Mapping[str, type[Toys3D | LetterViews]] = {"toys3d": Toys3D, "letter-views": LetterViews}
FAMILIAR: Mapping[str, Mapping[str, tuple[int, ...]]] = {  # values of a factor that train
    "toys3d": {"azimuth": (15, 16, 17, 0, 1, 2), "elevation": (0, 1, 2)},
    "letter-views": {"azimuth": (3, 4, 5), "elevation": (3, 4, 5)},
}
FACTORS = ("azimuth", "elevation")
NAMES = {"capsules": "capsules", "plain": "cnn"}  # names of the networks in records
COLORS = {"capsules": "C0", "cnn": "C1"}
LABELS = {"capsules": "matrix capsules", "cnn": "CNN of equal size"}
TICKS = 0.03, 0.05, 0.1, 0.2, 0.3, 0.5  # ticks of the axis of familiar errors
WIDE_TICKS = 0.001, 0.01, 0.1  # its ticks where an error is below .01
STEPS = {"fgsm": "one step", "iterated": "several steps"}
SIZE = 32  # height and width of the views in pixels
# Numbers of familiar and of novel test views, and of training views that validate the search
NUM_VIEWS = {"toys3d": 2000, "letter-views": 1000}
CHECKS = 8  # measurements during a training run; the i-th comes after (i / 8)^2 of the time
ATTACKED_VIEWS = 200  # number of familiar views under attack
ATTACKS = {  # largest changes of a pixel, and the number of steps
    "fgsm": ((0.0, 0.01, 0.02, 0.04), 1),
    "iterated": ((0.01, 0.02), 5),
}
DEFAULTS: dict[str, Any] = dict(defaults=dict(decays=(0.0,), tried=0.25))  # of the search
Run = tuple[str, str, int]  # network, factor, seed
Point = Mapping[str, float]  # error rates at one time of a training, by name


def load_views(name: str) -> tuple[Views, Views]:
    """Load the training and test views of a data set."""
    data = SETS[name](SIZE)
    return data.train, data.test


def novel_values(views: Views, factor: str, familiar: Sequence[int]) -> list[int]:
    """Return the values of a factor that are not familiar."""
    return sorted(set(getattr(views, factor).tolist()) - set(familiar))


def choose_images(split: Split, number: int) -> Split:
    """Return `number` random images with a fixed seed, or all images."""
    return split[torch.randperm(len(split), generator=seeded_generator(5))[:number]]


def split_views(task: Task, data: str) -> tuple[Split, Views]:
    """Return the familiar training views of a task's factor, and all test views."""
    train_views, test_views = load_views(data)
    return train_views.select(**{task.data: FAMILIAR[data][task.data]}).split(SIZE), test_views


def learn(job: Job[Task], *, data: str) -> dict[str, Any]:
    """Train one network on familiar views, and measure it.

    The data of the job's task is the factor that makes held-out views of the data set novel. A try
    returns the error on left-out familiar training views; other tasks return the `path` of errors
    during training, and under attack.
    """
    task, options, number = job.variant, job.options, NUM_VIEWS[data]
    views, test_views = split_views(task, data)
    entry = create_network(views, task, options, len(test_views.classes))
    arguments: dict[str, Any] = {"pace": Pace("constant"), **training_of(task)}
    if task.is_try:
        mixed = choose_images(views, len(views))
        train(entry, mixed[number:], options, options.budget, **arguments)
        return {"validation_error": error_rate(entry.model, entry.guide, mixed[:number])}
    familiar = FAMILIAR[data][task.data]
    values = familiar, novel_values(test_views, task.data, familiar)
    splits = [test_views.select(**{task.data: levels}).split(SIZE) for levels in values]
    tested, path = [choose_images(split, number) for split in splits], []
    for check in range(1, CHECKS + 1):
        minutes = options.budget * (check / CHECKS) ** 2
        name, earlier = f"check-{check}", f"check-{check - 1}" if check > 1 else None
        train(entry, views, options, minutes, name=name, after=earlier, **arguments)
        errors = [error_rate(entry.model, entry.guide, split).value for split in tested]
        point = dict(zip(("familiar", "novel"), errors, strict=True))
        if task.data == "azimuth":
            point |= errors_under_attack(entry, tested[0][:ATTACKED_VIEWS])
        path.append(point)
    return {"path": path}


def errors_under_attack(entry: Entry, split: Split) -> dict[str, float]:
    """Return a network's errors under attacks, by name and size in thousandths of a pixel."""
    errors = {}
    for name, (sizes, steps) in ATTACKS.items():
        for size in sizes:
            attacked = fgsm(entry.model, split, size, steps=steps)
            error = error_rate(entry.model, entry.guide, attacked).value
            errors[f"{name}_{round(1000 * size)}_error"] = error
    return errors


def match(paths: Mapping[str, Sequence[Point]]) -> dict[str, Point]:
    """Return each network's errors at the lowest familiar error that all networks reach.

    Between two measurements errors are interpolated linearly. If a training crosses the familiar
    error several times, the last time counts; if it begins below it, the first measurement counts.
    """
    common = max(min(point["familiar"] for point in path) for path in paths.values())
    return {name: crossing(path, common) for name, path in paths.items()}


def crossing(path: Sequence[Point], familiar: float) -> Point:
    """Return a training's errors at the last time that its familiar error crosses a value."""
    for before, after in reversed(list(pairwise(path))):
        if before["familiar"] >= familiar >= after["familiar"] < before["familiar"]:
            fraction = (before["familiar"] - familiar) / (before["familiar"] - after["familiar"])
            return {name: (1 - fraction) * before[name] + fraction * after[name] for name in before}
    return min(path, key=lambda point: abs(point["familiar"] - familiar))


@experiment("matrix-capsules/viewpoints-of-letters", data="letter-views", minutes=120, **DEFAULTS)
def viewpoints_of_letters(options: Options, settings: Search) -> Result:
    """Compare capsules with an equal network on novel viewpoints of letters (2 core-hours).

    Test views are in other fonts. See `matrix-capsules/viewpoints` for the quantities.
    """
    return compare_on_views("letter-views", settings, options)


@experiment("matrix-capsules/viewpoints", data="toys3d", minutes=240, **DEFAULTS)
def viewpoints(options: Options, settings: Search) -> Result:
    """Compare capsules with an equal network on novel viewpoints of rendered toys (4 core-hours).

    Minutes of the processor are divided equally among all trainings and tries. Measuring during
    training takes some forty minutes more. Errors are means over the seeds at matched familiar
    errors, with the standard error over seeds. `fgsm_40_...` are errors on
    familiar azimuths under a white-box attack of one step that changes pixels by .040, and
    `iterated_...` errors under an attack of several steps.
    """
    return compare_on_views("toys3d", settings, options)


def compare_on_views(data: str, settings: Search, options: Options) -> Result:
    """Tune and train both networks, and compare their errors on the views of a data set."""
    load_views(data)  # toys are rendered once, before processes need them
    task = partial(learn, data=data)
    outcomes, tries, tasks = tune(task, "matrix-capsules", NETWORK, settings, options, FACTORS)
    paths = {
        (NAMES[tasks[name].network], tasks[name].data, seed): run["path"]
        for name, runs in outcomes.items()
        for seed, run in enumerate(runs, options.seed)
    }
    errors = {factor: errors_where_matched(paths, factor) for factor in FACTORS}
    attacks = {name: e for name, e in errors["azimuth"].items() if name.endswith("_error")}
    validation = {name.replace("-", "_"): under(f"{name}-", tries) for name in tasks}
    metrics: Metrics = {
        **{
            f"{factor}_{kind}error": errors[factor][name]
            for factor in FACTORS
            for name, kind in (("novel", ""), ("familiar", "familiar_"))
        },
        "attacked": Table(attacks),
        "validation error": Table(validation, "validation_{quantity}_{variant}"),
    }
    return Result(metrics, {"": plot_paths(paths), "attack": plot_attacks(attacks)})


def errors_where_matched(paths: Mapping[Run, Sequence[Point]], factor: str) -> dict[str, Numbers]:
    """Return the errors at matched familiar errors, over the seeds, by name, then by network."""
    seeds = sorted({seed for _, _, seed in paths})
    points = [match({n: paths[n, factor, seed] for n in NAMES.values()}) for seed in seeds]
    return {
        name: {n: mean_and_error([point[n][name] for point in points]) for n in NAMES.values()}
        for name in points[0][NAMES["capsules"]]
    }


def plot_paths(paths: Mapping[Run, Sequence[Point]]) -> Figure:
    """Plot novel against familiar error during every training run, with a panel for each factor."""
    figure, (axes,) = panels(len(FACTORS), size=(4, 3.5))
    least = min(point["familiar"] for path in paths.values() for point in path)
    for (network, factor, _), path in paths.items():
        axis = axes[FACTORS.index(factor)]
        familiar, novel = zip(*((p["familiar"], p["novel"]) for p in path), strict=True)
        axis.semilogx(familiar, novel, ".-", color=COLORS[network])
    for axis, factor in zip(axes, FACTORS, strict=True):
        axis.set_xlabel("error rate on familiar viewpoints")
        axis.set_title(f"novel {factor}s")
        axis.set_xticks(TICKS if least >= 0.01 else WIDE_TICKS)
        plain_numbers(axis.xaxis)
    axes[0].set_ylabel("error rate on novel viewpoints")
    for network, color in COLORS.items():
        axes[-1].plot([], [], color=color, label=LABELS[network])
    return legend_below(figure)


def plot_attacks(attacks: Mapping[str, Numbers]) -> Figure:
    """Plot errors by the size of an attack, with standard errors over seeds."""
    curves: dict[str, Numbers] = {}
    for name, row in attacks.items():
        attack, size, _ = name.split("_")
        for network, number in row.items():
            curve = curves.setdefault(f"{LABELS[network]}, {STEPS[attack]}", {})
            curve[f"{int(size) / 1000:g}"] = number
    return number_curves({"error rate": curves}, "largest change of a pixel in [0, 1]")
