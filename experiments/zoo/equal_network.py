"""Capsules compared with an equal network without capsules: equal stem, weights and minutes.

Both networks are tuned on each data set by one search: every learning rate with every weight
decay (AdamW), for a part of the time and from one seed. The pair with the lowest error on
validation images is trained from all seeds. The network without capsules makes more updates in its
minutes, so it is trained a third time, for the updates of the capsules.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from capsule_zoo.data import Dataset, Split, load_dataset, transforms
from capsule_zoo.experiments import Job, Options, Result, Study, create_untrained, experiment, train
from capsule_zoo.experiments.common.findings import group_by_quantity, means_of, single
from capsule_zoo.figures.curves import number_curves
from capsule_zoo.inference import Checks, Inputs, error_rate, fgsm
from capsule_zoo.records import Number, Numbers, Table
from capsule_zoo.registry import Entry

SHIFT = transforms.Shift(1)  # random shift of training images by pixels
NETWORK: Mapping[str, Any] = dict(features=32, capsules=(4, 8, 8))  # a quarter of `small`'s votes
VECTOR_CAPSULES: Mapping[str, Any] = dict(guide=dict(channels=16))
MOVED_DATA = "affnist"  # moved digits, which are not moved again
DEGREES = (0, 15, 30, 45, 60, 90)  # rotations of test images, counterclockwise
EPSILONS = (0.0, 0.05, 0.1)  # largest changes of a pixel under attack by one step
CHANGED_IMAGES = 500  # number of test images that are rotated or attacked
NETWORKS = ("capsules", "plain")
LABELS = {  # labels in legends
    "capsules": "capsules",
    "plain": "CNN of equal size",
    "plain_equal_updates": "CNN, equal updates",
}


@dataclass(frozen=True)
class Search:
    """Settings of a search, and of the trainings that follow it.

    Args:
        rates: learning rates that are tried.
        decays: weight decays that are tried with each learning rate.
        tried: length of a try, as a fraction of the length of a training.
        seeds: number of seeds of each network.
    """

    rates: tuple[float, ...] = (1e-3, 3e-3, 1e-2)
    decays: tuple[float, ...] = (0.0, 0.1)
    tried: float = 0.5
    seeds: int = 3


@dataclass(frozen=True)
class Task:
    """One training: the network, the data, learning rate and decay, and the updates or the time.

    `sizes` are the arguments of the entry with capsules. A try measures validation images only.
    """

    like: str
    network: str
    data: str
    rate: float
    decay: float
    sizes: Mapping[str, Any]
    steps: int | None = None
    is_try: bool = False


Learn = Callable[[Job[Task]], Mapping[str, Any]]


@experiment(
    "capsule-network/equal-network-at-length",
    data="mnist",
    minutes=100,
    defaults=dict(rates=(3e-3, 1e-2), decays=(0.0,), tried=1.0),
)
def compare_vector_capsules_at_length(options: Options, settings: Search) -> Result:
    """Compare the capsule network with an equal network on digits, ten minutes each (two hours).

    Learning rates are searched at full length, as short tries choose a rate that is too high. See
    `matrix-capsules/equal-network` for the quantities.
    """
    return compare_with_plain_network(
        "capsule-network", VECTOR_CAPSULES, settings, options, ["mnist"]
    )


@experiment("matrix-capsules/equal-network", data="mnist", minutes=40)
def compare_matrix_capsules(options: Options, settings: Search) -> Result:
    """Compare matrix capsules with an equal network without capsules (40 core-minutes).

    Minutes of the processor are divided among all trainings and tries; trainings for equal updates
    and measurements take further time. Errors are means over the seeds. `error_15_degrees` is on
    rotated test images, `error_fgsm_50` under an attack that changes pixels by .050.
    `validation_...` are the errors of all tries, which choose `rate` and `decay`. `weights` is the
    number of weights between image and class. Networks for moved digits are tuned on digits.
    """
    datasets, moved = ["mnist", "fashion-mnist"], [MOVED_DATA]
    return compare_with_plain_network(
        "matrix-capsules", NETWORK, settings, options, datasets, moved
    )


def compare_with_plain_network(
    like: str,
    sizes: Mapping[str, Any],
    settings: Search,
    options: Options,
    datasets: Sequence[str],
    moved: Sequence[str] = (),
) -> Result:
    """Tune, train and measure both networks on all data sets, and return the comparison."""
    outcomes, errors, tasks = tune(learn, like, sizes, settings, options, datasets, moved)
    numbers, names = means_of(outcomes), [*datasets, *moved]
    again = {
        f"{data}-plain_equal_updates": replace(
            tasks[f"{data}-plain"], steps=max(1, round(numbers[f"{data}-capsules"]["updates"][0]))
        )
        for data in names
    }
    numbers |= means_of(run_tasks(learn, again, settings.seeds, options, "equal-updates"))
    tables, rows = {}, {}
    for data in names:
        rows[data], end = under(f"{data}-", numbers), f"{data.replace('-', '_')}"
        tables[data] = Table(group_by_quantity(rows[data]), "{quantity}_{variant}_" + end)
        if data in datasets:
            tries = {n: under(f"{data}-{n}-", errors) for n in NETWORKS}
            names_of_tries = "validation_{quantity}_{variant}_" + end
            tables[f"{data}, validation error"] = Table(tries, names_of_tries)
    rotated = {f"{x:g}": f"error_{x:g}_degrees" for x in DEGREES}
    attacked = {f"{x:g}": f"error_fgsm_{1000 * x:.0f}" for x in EPSILONS}
    drawn = {}
    for title, quantities, axis_label in (
        ("rotated", rotated, "largest rotation (degrees)"),
        ("attacked", attacked, "largest change of a pixel in [0, 1]"),
    ):
        grids: dict[str, dict[str, Numbers]] = {
            f"error rate, {data}": {
                LABELS[n]: {x: row[name] for x, name in quantities.items()}
                for n, row in rows[data].items()
            }
            for data in datasets
        }
        drawn[title] = number_curves(grids, axis_label)
    return Result(tables, drawn)


def tune(
    learn: Learn,
    like: str,
    sizes: Mapping[str, Any],
    settings: Search,
    options: Options,
    datasets: Sequence[str],
    moved: Sequence[str] = (),
) -> tuple[dict[str, list], dict[str, Number], dict[str, Task]]:
    """Tune both networks on data sets, and train them on these and on moved data.

    Returns:
        The outcomes of every seed (by data set and network: "mnist-plain"), the validation errors
        of all tries ("mnist-plain-rate_0_01_decay_0"), and the tasks of the trainings.
    """
    names, ways = (*datasets, *moved), len(settings.rates) * len(settings.decays)
    parts = settings.seeds * len(names) + settings.tried * ways * len(datasets)
    minutes = options.budget / len(NETWORKS) / parts
    grid = product(settings.rates, settings.decays)
    named = {f"rate_{r:g}_decay_{d:g}".replace(".", "_"): (r, d) for r, d in grid}
    tries = {
        f"{data}-{network}-{way}": Task(like, network, data, *named[way], sizes, is_try=True)
        for data, network, way in product(datasets, NETWORKS, named)
    }
    tried = means_of(run_tasks(learn, tries, 1, options, "tries", minutes * settings.tried))
    errors = {name: numbers["validation_error"] for name, numbers in tried.items()}
    tasks = {}
    for data, network in product(names, NETWORKS):
        start = f"{data if data in datasets else datasets[0]}-{network}-"
        way = min(under(start, tries), key=lambda way: errors[f"{start}{way}"][0])
        tasks[f"{data}-{network}"] = replace(tries[f"{start}{way}"], data=data, is_try=False)
    return run_tasks(learn, tasks, settings.seeds, options, "trained", minutes), errors, tasks


def run_tasks(
    learn: Learn,
    tasks: Mapping[str, Task],
    seeds: int,
    options: Options,
    name: str,
    minutes: float | None = None,
) -> dict[str, list]:
    """Run tasks from several seeds, each for some minutes or its updates; return all outcomes."""
    whole = None if minutes is None else minutes * seeds * len(tasks)
    return Study(tasks, seeds).run(learn, replace(options.within(name), minutes=whole))


def under(start: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Select the values whose names have a prefix, by the rest of the name."""
    return {name.removeprefix(start): x for name, x in values.items() if name.startswith(start)}


def learn(job: Job[Task]) -> Numbers:
    """Train one network and measure it; see `compare_matrix_capsules`."""
    task = job.variant
    data = load_dataset(task.data, root=job.options.data_root)
    entry, facts = fit_network(job, data, SHIFT)
    if task.is_try:
        return {"validation_error": error_rate(entry.model, entry.guide, data.validation)}
    errors: Numbers = {"test_error": error_rate(entry.model, entry.guide, data.test)}
    if task.data != MOVED_DATA:
        errors |= errors_of_changed(entry, data.test[:CHANGED_IMAGES])
    return errors | facts


def fit_network(
    job: Job[Task], data: Dataset, transform: Callable[..., Tensor]
) -> tuple[Entry, Numbers]:
    """Train one network on transformed images; return it, its updates, weights and settings."""
    task, options = job.variant, job.options
    entry = create_network(data, task, options, data.num_classes)
    limit = {"minutes": options.minutes} if task.steps is None else {"steps": task.steps}
    inputs = Inputs(transform, labels=True)
    run = train(entry, data, options, **limit, **training_of(task), inputs=inputs)
    facts = {"updates": run.steps, "weights": reader_of(entry).num_parameters}
    facts |= {"rate": task.rate, "decay": task.decay}
    return entry, {name: single(value) for name, value in facts.items()}


def create_network(data: Dataset | Split, task: Task, options: Options, classes: int) -> Entry:
    """Return a task's untrained network for these images."""
    name, sizes = task.like, dict(task.sizes)
    if task.network == "plain":
        name, sizes = "cnn", dict(preset=name, capsules=sizes)
    return create_untrained(name, data, options, classes=classes, **sizes)


def training_of(task: Task) -> dict[str, Any]:
    """Return the arguments of a task's training: learning rate, decay and clock."""
    adam = partial(torch.optim.AdamW, weight_decay=task.decay, fused=True)
    return dict(lr=task.rate, optimizer=adam, checks=Checks(clock="processor"))


def reader_of(entry: Entry) -> Any:
    """Return the module that computes scores of images: the model, a part of it, or the guide."""
    reader = entry.model if entry.model.supervised else entry.guide
    return getattr(entry.model, "reader", reader)


def errors_of_changed(entry: Entry, split: Split) -> Numbers:
    """Return the errors on rotated and on attacked images."""
    changed = {}
    for angle in DEGREES:
        images = transforms.warp_images(split.images, transforms.motion(float(angle)))
        changed[f"error_{angle:g}_degrees"] = images.clamp(0, 1)
    for size in EPSILONS:
        attacked = fgsm(entry.model, split, size, guide=entry.guide)
        changed[f"error_fgsm_{1000 * size:.0f}"] = attacked.images
    pair, labels = (entry.model, entry.guide), split.labels
    return {name: error_rate(*pair, Split(images, labels)) for name, images in changed.items()}
