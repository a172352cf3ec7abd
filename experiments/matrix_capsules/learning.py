"""What makes matrix capsules learn fast, found by a search that an equal network gets too.

The search goes through kinds of changes one after the other: fewer positions (images that are cut
at each side), batches, learning rates, margins, likelihoods, label smoothing, schedules and shifts.
Every change of a kind is tried on top of the changes that were kept before, for a part of the time
of a training and from one seed. The change with the lowest error on validation images is kept, if
that error is below the lowest one so far. At last both networks are trained for equal times, as
they are and with all changes that were kept.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from pyro.infer import ELBO
from torch import Tensor

from capsule_zoo.data import Dataset, load_dataset
from capsule_zoo.data.transforms import Shift
from capsule_zoo.experiments import Job, Options, Result, Study, choose, experiment, train
from capsule_zoo.experiments.common.curves import Curve, learning_curve, times_of
from capsule_zoo.experiments.common.findings import (
    by_quantity,
    mean_and_error,
    means_of,
    over_seeds,
)
from capsule_zoo.experiments.matrix_capsules.headline import NETWORK
from capsule_zoo.experiments.zoo.equal_network import NETWORKS, Search, Task, begun_on, under
from capsule_zoo.figures.curves import plain_numbers
from capsule_zoo.figures.grids import panels
from capsule_zoo.inference import Checks, Inputs, Pace, error_rate
from capsule_zoo.inference.objectives.base import Objective, loss_per_image
from capsule_zoo.records import Numbers, Table, in_words
from capsule_zoo.registry import Entry

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEVELS = {f"to_{level:g}".replace(".", "_"): level for level in (0.03, 0.02, 0.01, 0.007)}
TICKS = 0.01, 0.03, 0.1, 0.3  # of errors
EVERY, LONGER = 20, 1.3  # updates between two looks at the clock, and the ratio of measured times
KINDS: dict[str, dict[str, dict[str, Any]]] = {
    "positions": {"cut_2": dict(cut=2), "cut_4": dict(cut=4)},
    "batches": {f"batch_{size}": dict(batch_size=size) for size in (16, 64, 128)},
    "rates": {"rate_0_001": dict(rate=0.001), "rate_0_01": dict(rate=0.01)},
    "margins": {"margin_steps_50": dict(margin_steps=50.0)},
    "likelihoods": {"cross_entropy": dict(likelihood="categorical")},
    "smoothing": {"smoothed_labels": dict(smoothing=0.1)},
    "schedules": {
        "constant": dict(schedule="constant"),
        "cosine": dict(schedule="cosine"),
        "warmup_100": dict(warmup=100),
    },
    "shifts": {"unshifted": dict(shift=0), "shift_2": dict(shift=2)},
}
OF_CAPSULES = ("margins", "likelihoods")  # the equal network has cross-entropy and no margin


@dataclass(frozen=True)
class Way:
    """How a network is trained, by default as the small network is.

    Attributes:
        network: "capsules" or "plain".
        cut: pixels that are cut off at each side of all images.
        batch_size: images of an update.
        rate: first learning rate.
        margin_steps, likelihood: of `MatrixCapsules`.
        smoothing: share of the training labels that are replaced by any class, anew in each update.
        schedule, warmup: of `Pace`.
        shift: pixels by which training images are shifted at most.
    """

    network: str
    cut: int = 0
    batch_size: int = 32
    rate: float = 0.003
    margin_steps: float = 250
    likelihood: str = "spread"
    smoothing: float = 0.0
    schedule: str = "linear"
    warmup: int = 0
    shift: int = 1


class Smoothed(Objective):
    """An objective whose labels are replaced by any class, with a probability, in training.

    Its gradients are those of smoothed labels on average, because the loss is linear in them.
    """

    def __init__(self, objective: ELBO, classes: int, share: float) -> None:
        super().__init__()
        self.objective, self.classes, self.share = objective, classes, share

    def differentiable_loss(self, model: Any, guide: Any, images: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss of the replaced labels (B,), in nats per image."""
        if torch.is_grad_enabled():
            replaced = torch.rand_like(labels, dtype=torch.float) < self.share
            labels = torch.where(replaced, torch.randint_like(labels, self.classes), labels)
        return loss_per_image(self.objective, model, guide, images, labels)


@dataclass(frozen=True)
class Settings:
    """The settings of the experiment.

    Args:
        tried: length of a try, as a part of the length of a training.
        seeds: number of seeds of each training.
        kinds: names of the kinds of changes that are tried, in this order.
        images: number of the validation images of a learning curve.
        sizes: sizes of the network.
    """

    tried: float = 0.2
    seeds: int = 3
    kinds: tuple[str, ...] = tuple(KINDS)
    images: int = 2000
    sizes: Mapping[str, Any] | None = None


@experiment("matrix-capsules/learning", data="mnist", minutes=96)
def learning(options: Options, chosen: Settings) -> Result:
    """Search what makes the network learn fast, beside an equal network (96 core-minutes).

    The network has a quarter of the votes of the small preset. Minutes are of the processor, and
    all tries and trainings share them. `validation_...` is the error of a try; `searched` has all
    changes that were kept, and `plain` is the equal network. Seconds and updates to an error are of
    the first measurement below it, on validation images, where all seeds get there; measuring takes
    a part of the minutes and is not counted in these seconds.
    """
    choose("kind", chosen.kinds, KINDS)  # refuses unknown ones
    parts = chosen.seeds * 2 * len(NETWORKS) + chosen.tried * (
        len(NETWORKS) + sum(len(changes(kind, n)) for kind in chosen.kinds for n in NETWORKS)
    )
    minutes = options.budget / parts
    best, errors = searched(options.within("tries"), chosen, minutes * chosen.tried)
    final = {n: Way(n) for n in NETWORKS} | {f"{n}_searched": best[n] for n in NETWORKS}
    timed = replace(options.within("trained"), minutes=minutes * chosen.seeds * len(final))
    outcomes = Study(final, chosen.seeds).run(trained, timed, chosen=chosen)
    curves = {name: [each["curve"] for each in own] for name, own in outcomes.items()}
    rows: dict[str, Numbers] = {}
    for name, own in outcomes.items():
        times, ends = times_of(curves[name], LEVELS), [curve[-1] for curve in curves[name]]
        rows[name] = over_seeds([each["numbers"] for each in own])
        rates = [updates / seconds for seconds, updates, _ in ends]
        rows[name]["updates_per_second"] = mean_and_error(rates)
        for level, unit in product(LEVELS, ("seeds", "seconds", "updates")):
            if (number := times.get(f"{level}_{unit}")) is not None:
                rows[name][f"{unit}_{level}"] = number
    tables = {
        "": Table(by_quantity(rows)),
        "validation error": Table(errors, "validation_{quantity}_{variant}"),
    }
    return Result(tables, {"": draw(curves)})


def changes(kind: str, network: str) -> dict[str, dict[str, Any]]:
    """Return the changes of a kind that a network can have, by name."""
    return {} if network == "plain" and kind in OF_CAPSULES else KINDS[kind]


def searched(
    options: Options, chosen: Settings, minutes: float
) -> tuple[dict[str, Way], dict[str, Numbers]]:
    """Return each network's best way, and the validation errors of all tries by network and name.

    Args:
        minutes: length of a try.
    """
    best = {network: Way(network) for network in NETWORKS}
    errors: dict[str, Numbers] = {network: {} for network in NETWORKS}
    for kind in ("", *chosen.kinds):
        tries = {
            f"{network}-{name}": replace(best[network], **change)
            for network in NETWORKS
            for name, change in (changes(kind, network) if kind else {"as_it_is": {}}).items()
        }
        timed = replace(options.within(kind or "start"), minutes=minutes * len(tries))
        found = means_of(Study(tries).run(tried, timed, chosen=chosen))
        for network in NETWORKS:
            own = {n: e["validation_error"] for n, e in under(f"{network}-", found).items()}
            lowest = min((error[0] for error in errors[network].values()), default=math.inf)
            if own and min(own.values())[0] < lowest:
                best[network] = tries[f"{network}-{min(own, key=lambda name: own[name][0])}"]
            errors[network] |= own
    return best, errors


def tried(job: Job[Way], *, chosen: Settings) -> Numbers:
    """Train a network in a way, and return its error on validation images."""
    entry, data, how = ready(job, chosen)
    train(entry, data, job.options, job.options.budget, checks=Checks(clock="processor"), **how)
    return {"validation_error": error_rate(entry.model, entry.guide, data.validation)}


def trained(job: Job[Way], *, chosen: Settings) -> dict[str, Any]:
    """Train a network in a way, and return its learning curve and its test error."""
    entry, data, how = ready(job, chosen)
    few = data.validation[: chosen.images]
    error = lambda: error_rate(entry.model, entry.guide, few).value  # noqa: E731
    options = job.options
    curve = learning_curve(entry, data, options, error, every=EVERY, longer=LONGER, **how)
    test_error = error_rate(entry.model, entry.guide, data.test)
    return {"curve": curve, "numbers": {"test_error": test_error}}


def ready(job: Job[Way], chosen: Settings) -> tuple[Entry, Dataset, dict[str, Any]]:
    """Return a network and its data, and how it is trained, as arguments of `train`."""
    way, options = job.variant, job.options
    data = load_dataset("mnist", root=options.data_root)
    if way.cut:
        data = data.transformed(lambda images: images[..., way.cut : -way.cut, way.cut : -way.cut])
    margin = {"margin_steps": way.margin_steps, "likelihood": way.likelihood}
    given = Search(sizes={**(chosen.sizes or NETWORK), **margin})
    task = Task("matrix-capsules", way.network, "mnist", way.rate, 0.0, given)
    entry = begun_on(data, task, options, data.num_classes)
    if way.smoothing:
        entry = replace(entry, objective=Smoothed(entry.objective, data.num_classes, way.smoothing))
    how = dict(
        lr=way.rate,
        batch_size=way.batch_size,
        pace=Pace(way.schedule, way.warmup),
        inputs=Inputs(Shift(way.shift)),
    )
    return entry, data, how


def draw(curves: Mapping[str, Sequence[Curve]]) -> "Figure":
    """Draw the errors during training against seconds and updates, a line for each seed."""
    figure, (axes,) = panels(2, size=(3.4, 3), sharey=True)
    for n, (name, own) in enumerate(curves.items()):
        for curve in own:
            seconds, updates, errors = zip(*curve, strict=True)
            for axis, places in zip(axes, (seconds, updates), strict=True):
                axis.plot(places, errors, color=f"C{n}", lw=1, antialiased=False)
        axes[0].plot([], [], color=f"C{n}", label=in_words(name))
    for axis, words in zip(axes, ("processor seconds of training", "updates"), strict=True):
        axis.set(xscale="log", yscale="log", xlabel=words)
        for level in LEVELS.values():
            axis.axhline(level, color="0.8", linestyle=":", zorder=0)
    axes[0].set(ylabel="error on validation images", yticks=TICKS)
    plain_numbers(axes[0].yaxis)
    axes[0].legend(fontsize=8)
    return figure
