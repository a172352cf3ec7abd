"""Why more iterations of EM routing hurt, what mends it, and two and three iterations at length.

Each iteration of EM divides the children by the densities of sixteen numbers at once, so that it
multiplies small differences between parents, and the gradients with them. With a `power` below 1
the responsibilities are proportional to (a N)^power (see `capsule_zoo.guides.routing`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pyro
import torch.nn.functional as F

from capsule_zoo.data import Split, load_dataset
from capsule_zoo.experiments import Job, Options, Result, Study, begun, choose, experiment, train
from capsule_zoo.experiments.common.findings import (
    by_quantity,
    mean_and_error,
    means_of,
    over_seeds,
    single,
)
from capsule_zoo.experiments.matrix_capsules.headline import NETWORK, SHIFT
from capsule_zoo.experiments.training import load_run, on_device
from capsule_zoo.figures.curves import number_curves
from capsule_zoo.guides import EMRouting
from capsule_zoo.inference import Checks, Inputs, error_rate
from capsule_zoo.records import Numbers, Table
from capsule_zoo.registry import Entry, create, load

STARTED = 32  # training images of the first gradient


@dataclass(frozen=True)
class Settings:
    """The settings of the experiment.

    Args:
        iterations: numbers of iterations of EM.
        powers: powers of the responsibilities.
        seeds: number of seeds for each network.
        steps: updates of every run, unless minutes are given; these are shared by all runs.
        network: sizes of the network.
    """

    iterations: tuple[int, ...] = (2, 3, 4, 5)
    powers: tuple[float, ...] = (1.0, 0.25, 0.0625)
    seeds: int = 1
    steps: int = 540
    network: Mapping[str, Any] | None = None


@experiment("matrix-capsules/iterations", data="mnist")
def iterations(options: Options, chosen: Settings) -> Result:
    """Train with two to five iterations of EM and three powers of its E step (30 core-minutes).

    `first_gradient` is the size of the gradient of the loss with respect to the weights of the
    first convolution before the first update, as a multiple of its size with the fewest iterations
    and the first power. `error` is the test error after the training.
    """
    variants = {
        f"{name_of(power)}-{number}": {"iterations": number, "power": power}
        for power in chosen.powers
        for number in chosen.iterations
    }
    costs = {name: float(each["iterations"]) for name, each in variants.items()}
    how: dict[str, Any] = dict(steps=chosen.steps, network=chosen.network)
    outcomes = Study(variants, chosen.seeds, costs).run(measure, options, **how)
    unit = outcomes[f"{name_of(chosen.powers[0])}-{min(chosen.iterations)}"][0]["slope"][0]
    found: dict[str, dict[str, Numbers]] = {"test error": {}, "first gradient": {}}
    for name, each in variants.items():
        own, row, column = outcomes[name], str(each["iterations"]), name_of(each["power"])
        found["test error"].setdefault(column, {})[row] = over_seeds(own)["error"]
        slope = mean_and_error([outcome["slope"][0] / unit for outcome in own])
        found["first gradient"].setdefault(column, {})[row] = slope
    metrics = {
        f"{words} by iterations": Table(found[words], f"{quantity}_{{quantity}}_{{variant}}")
        for words, quantity in (("test error", "error"), ("first gradient", "first_gradient"))
    }
    figure = number_curves(found, "iterations")
    figure.axes[1].set_yscale("log")
    return Result(metrics, {"": figure})


def name_of(power: float) -> str:
    """Return a power as a part of a metric's name: .25 as `power_0_25`."""
    return f"power_{power:g}".replace(".", "_")


def measure(
    job: Job[Mapping[str, Any]], *, steps: int, network: Mapping[str, Any] | None
) -> Numbers:
    """Train the network of the job's sizes, and return its first gradient and its test error."""
    options = job.options
    data = load_dataset("mnist", root=options.data_root)
    entry = begun("matrix-capsules", data, options, **{**(network or NETWORK), **job.variant})
    slope = single(first_gradient(entry, data.train[:STARTED]))
    train(entry, data, options, inputs=Inputs(SHIFT), **options.limit(steps))
    return {"slope": slope, "error": error_rate(entry.model, entry.guide, data.test)}


def first_gradient(entry: Entry, split: Split) -> float:
    """Return the norm of the gradient of the cross-entropy for the first convolution's weights.

    The cross-entropy is used because the spread loss changes with every update.
    """
    model = entry.model
    F.cross_entropy(model.scores(split.images), split.labels).backward()
    slope = model.stem.weight.grad.norm().item()
    model.zero_grad()
    return slope


def of_article(steps: int) -> dict[str, dict[str, Any]]:
    """Return sizes of networks of three iterations, with what Hui's article does otherwise.

    Args:
        steps: updates of a run, in which the linear margin rises to its end.
    """
    temperature, costs = {"anneal": "linear"}, {"costs": "standardized"}
    margin = {"margin_shape": "linear", "margin_steps": steps / 7}  # from .2 to .9 by tenths
    drawn, flat = {"reconstruction": 0.0005}, {"power": 0.25}
    parts: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
        "paper": ({}, {}),
        "linear_temperature": (temperature, {}),
        "standardized_costs": (costs, {}),
        "linear_margin": ({}, margin),
        "reconstruction": ({}, drawn),
        "article": (temperature | costs, margin | drawn),
        "paper_flat": (flat, {}),
        "article_flat": (temperature | costs | flat, margin | drawn),
    }
    return {name: {"routing": EMRouting(3, **how), **own} for name, (how, own) in parts.items()}


@experiment("matrix-capsules/article", data="mnist", minutes=20)
def article(
    options: Options,
    *,
    seeds: int = 3,
    steps: int = Settings.steps,
    network: Mapping[str, Any] | None = None,
) -> Result:
    """Train three iterations with what Hui's article does otherwise (20 core-minutes).

    That is an inverse temperature that rises by 1, costs that are standardized over the parents, a
    margin that rises linearly, here to its end in all updates, and a loss of reconstruction: each
    alone, and together (`article`). `flat` has a power of a quarter. `first_gradient` is as in
    `iterations`, as a multiple of `paper`. Both are means over the seeds.

    Args:
        seeds: number of seeds.
        steps: updates of every run.
        network: sizes of the network.
    """
    steps = options.shortened(steps)
    study = Study(of_article(steps), seeds)
    how: dict[str, Any] = dict(steps=steps, network=network)
    found = means_of(study.run(measure, replace(options, minutes=None), **how))
    unit = found["paper"]["slope"][0]
    rows: dict[str, Numbers] = {}
    for name, own in found.items():
        slope, error, count = own["slope"]
        share = slope / unit, None if error is None else error / unit, count
        rows[name] = {"test_error": own["error"], "first_gradient": share}
    return Result({"": Table(by_quantity(rows))})


AT_LENGTH = {"two_iterations": 2, "three_iterations": 3}


@dataclass(frozen=True)
class Lengths:
    """The settings of the runs at length.

    Args:
        variants: names of the networks that are trained.
        seeds: number of seeds for each network.
        power: power of the responsibilities with three iterations; two iterations have 1.
        lr: first learning rate, which falls to 0; by default the entry's.
        batch_size: images of an update; by default the entry's.
        network: arguments of the entry, such as its preset.
    """

    variants: tuple[str, ...] = tuple(AT_LENGTH)
    seeds: int = 1
    power: float = 0.25
    lr: float | None = None
    batch_size: int | None = None
    network: Mapping[str, Any] | None = None


@experiment("matrix-capsules/at-length", data="mnist", minutes=120, of_runs=True)
def at_length(options: Options, chosen: Lengths) -> Result:
    """Train the small preset with two and with three iterations of EM (2 x 60 minutes).

    Three iterations have a power below 1 in the E step, without which they hardly learn. With
    `--run` networks start from the parameters of a trained one, and its margin. Both get
    equal times of the processor, side by side where there are two cores. Errors are of validation
    images and of test images. The network with the lower validation error is kept.
    """
    networks = choose("variant", chosen.variants, AT_LENGTH)
    study, timed = Study(networks, chosen.seeds), replace(options, minutes=options.budget)
    found = means_of(study.run(learn_digits, timed, settings=chosen))
    best = min(found, key=lambda name: found[name]["validation_error"][0])
    return Result({"": Table(by_quantity(found))}, {}, None, load(study.folders(options)[best]))


def network_at_length(
    iterations: int, settings: Lengths, image_shape: tuple[int, int, int]
) -> Entry:
    """Return an untrained network."""
    power = 1.0 if iterations == 2 else settings.power
    sizes = {"iterations": iterations, "power": power, **(settings.network or {})}
    return create("matrix-capsules", image_shape=image_shape, **sizes)


def learn_digits(job: Job[int], *, settings: Lengths) -> Numbers:
    """Train a network of the job's iterations, and return its errors, updates and speed."""
    iterations, options = job.variant, job.options
    data = load_dataset("mnist", root=options.data_root)
    pyro.set_rng_seed(options.seed)
    entry = network_at_length(iterations, settings, data.image_shape)
    if options.run:
        start = load_run(options.run, entry.name)
        entry.model.load_state_dict(start.model.state_dict())
    own = {"lr": settings.lr, "batch_size": settings.batch_size}
    how: dict[str, Any] = {name: value for name, value in own.items() if value is not None}
    checks = Checks(clock="processor")
    run = train(entry, data, options, options.budget, inputs=Inputs(SHIFT), checks=checks, **how)
    images = run.steps * (settings.batch_size or entry.training["batch_size"])
    with on_device(entry, options):
        errors = {
            "validation_error": error_rate(entry.model, entry.guide, data.validation),
            "test_error": error_rate(entry.model, entry.guide, data.test),
        }
    return {
        **errors,
        "updates": single(run.steps),
        "images_per_second": single(images / run.seconds, run.steps),
    }


@experiment("matrix-capsules/full", data="mnist", minutes=8, of_runs=True)
def full(options: Options) -> Result:
    """Train the full preset with three iterations of EM (8 minutes with --device cuda, 80 GiB).

    See `matrix-capsules/at-length` for the quantities.
    """
    network = {"preset": "full", "recompute": False}
    return at_length(options, Lengths(("three_iterations",), batch_size=64, network=network))
