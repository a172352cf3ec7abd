"""Part-whole capsules under other likelihoods and objectives, on images of clothes and in color."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

from pyro.infer import ELBO, Trace_ELBO

from capsule_zoo.data import Dataset, load_dataset
from capsule_zoo.experiments import Options, Result, begun, divide, experiment, train
from capsule_zoo.experiments.common.findings import (
    bounds_of_rows,
    by_quantity,
    held_out_bounds,
    pictures,
    squared_error,
)
from capsule_zoo.experiments.part_whole.headline import (
    DIGITS_STEPS,
    JITTER,
    TIGHTENING_STEPS,
    learn_digits,
    probes,
    tighten,
)
from capsule_zoo.experiments.training import photographs
from capsule_zoo.inference import (
    ImportanceWeightedELBO,
    Inputs,
    Pace,
    ReweightedWakeSleep,
    ThermodynamicObjective,
    compare,
    infer,
    mean_images,
)
from capsule_zoo.records import Numbers
from capsule_zoo.registry import Entry

TIGHTENING = 0.2  # share of a variant's time, for a guide with a density


@dataclass(frozen=True)
class Variant:
    """A variant: a data set, and sizes for `create`."""

    data: Dataset
    sizes: Mapping[str, Any]


@experiment("part-whole/likelihoods", data="mnist", minutes=60)
def likelihoods(options: Options, *, images: int = 1000, particles: int = 50) -> Result:
    """Compare parts laid over each other with a mixture at each pixel (an hour).

    Both are densities of the same pixels, so that their bounds compare.

    Args:
        images: number of held-out images of the bounds.
        particles: number of draws of the IWAE bound.
    """
    data = load_dataset("mnist", root=options.data_root)
    kinds = ("composite", "mixture")
    variants = {kind: Variant(data, {"likelihood": kind}) for kind in kinds}
    return train_and_measure(variants, options, images, particles)


@experiment("part-whole/colours", data="fashion-mnist", minutes=60)
def colors(options: Options, *, images: int = 1000, particles: int = 50) -> Result:
    """Train on Fashion-MNIST, and on CIFAR-10 with a learned background (an hour).

    If the data root has a folder `cifar10` of images by class, which may be a subset, that folder
    is used. `training_images` is the number of training images.

    Args:
        images: number of held-out images of the bounds.
        particles: number of draws of the IWAE bound.
    """
    variants = {
        "fashion_mnist": Variant(load_dataset("fashion-mnist", root=options.data_root), {}),
        "cifar10": Variant(photographs("cifar10", options), {"background": "learned"}),
    }
    return train_and_measure(variants, options, images, particles)


def train_and_measure(
    variants: Mapping[str, Variant], options: Options, images: int, particles: int
) -> Result:
    """Train every variant for an equal share of the time, and measure all in the same way."""
    found: dict[str, Numbers] = {}
    drawn: dict = {}
    shares = divide(options.budget, variants)
    first: Entry | None = None
    for name, variant in variants.items():
        minutes = shares[name]
        options.say(f"Training {name} on {len(variant.data.train):,} images, {minutes:.3g} minutes")
        points, normal = learn(name, variant, options, minutes)
        found[name] = measure(points, normal, variant.data, options.seed, images, particles)
        shown = pictures(points, variant.data.test.images[:12])
        drawn |= {f"{name}_{kind}": figure for kind, figure in shown.items()}
        first = first or points
    return Result(by_quantity(found), drawn, None, first)


def learn(name: str, variant: Variant, options: Options, minutes: float) -> tuple[Entry, Entry]:
    """Return an entry trained with points for poses, and one with densities (model frozen)."""
    entry = begun("part-whole", variant.data, options, **variant.sizes)
    train(entry, variant.data, options, (1 - TIGHTENING) * minutes, name=name)
    how: dict[str, Any] = dict(name=f"{name}-tightened", minutes=TIGHTENING * minutes)
    return entry, tighten(entry, variant.data, options, **how)


def measure(
    points: Entry, normal: Entry, data: Dataset, seed: int, bounded: int, particles: int
) -> Numbers:
    """Return probes, the squared error of reconstructions, and bounds on held-out images."""
    images = data.test.images
    parsed = infer(points.guide, images, seed=seed)
    return {
        **probes(points, data),
        "squared_error": squared_error(mean_images(points.model, len(images), parsed), images),
        **held_out_bounds(normal, data.test[:bounded], particles, seed),
        "training_images": (float(len(data.train)), None, 1),
    }


RELAXED = "relaxed"


def objectives(draws: int, intervals: int) -> Mapping[str, ELBO]:
    """Return the objectives by name; all but the first are for discrete presences."""
    return {
        RELAXED: Trace_ELBO(),
        "importance_weighted": ImportanceWeightedELBO(draws),
        "reweighted": ReweightedWakeSleep(draws, sleep=0.0),
        "thermodynamic": ThermodynamicObjective(draws, intervals),
    }


@experiment("part-whole/discrete-objectives", data="digits", minutes=20)
def discrete_objectives(
    options: Options,
    *,
    steps: int = DIGITS_STEPS,
    tightening: int = TIGHTENING_STEPS,
    draws: int = 5,
    intervals: int = 5,
    lr: float = 3e-4,
    images: int = 200,
    particles: int = 100,
) -> Result:
    """Compare objectives for discrete presences with the relaxed bound (25 core-minutes).

    All objectives start at the pair of `part-whole/digits`, which was trained with relaxed
    presences and has normal poses. From there model and guide are trained further for the same time
    (a quarter of the minutes each), under

    - `relaxed`: the ELBO of relaxed presences, with one draw, whose gradient is reparametrized;
    - `importance_weighted`: the bound of several draws of discrete presences. Their gradient is the
      score function with the baseline of Mnih & Rezende (2016), and poses are reparametrized;
    - `reweighted`: reweighted wake-sleep without its sleep phase (Bornschein & Bengio 2015);
    - `thermodynamic`: the thermodynamic objective (Masrani, Le & Wood 2019).

    The last two hold all draws constant, poses too. Bounds are those of the discrete model, for all
    rows alike; `start` is the pair that they start at. `updates` were made in this time.

    Args:
        steps: relaxed updates of the pair before the start; these and the next shrink with minutes.
        tightening: updates of the guide with normal poses before the start.
        draws: number of draws for each image, except for `relaxed`.
        intervals: number of intervals of the thermodynamic objective.
        lr: learning rate, which falls to zero.
        images: number of held-out digits.
        particles: number of draws of the IWAE bound.
    """
    data = load_dataset("digits")
    entry = learn_digits(data, options, steps=options.shortened(steps))
    shorter = options.shortened(tightening)
    start = tighten(entry, data, options, steps=shorter, inputs=Inputs(JITTER))
    pairs: dict[str, tuple] = {"start": (start.model, start.guide)}
    updates: Numbers = {}
    rows = objectives(draws, intervals)
    for name, minutes in divide(options.budget, rows).items():
        options.say(f"Training on under {name}")
        model, guide = deepcopy(pairs["start"])
        pairs[name] = (model, guide)
        own = pairs[name] if name == RELAXED else (model.discretized(), guide.discretized())
        how: dict[str, Any] = dict(
            objective=rows[name], lr=lr, pace=Pace("linear"), inputs=Inputs(JITTER)
        )
        own_start = replace(start, model=own[0], guide=own[1])
        run = train(own_start, data, options, minutes, name=name, **how)
        updates[name] = (float(run.steps), None, 1)
    table = compare(pairs, data.test[:images], num_particles=particles, seed=options.seed)
    return Result({**bounds_of_rows(table), "updates": updates}, {"": table.draw()}, table)
