"""Part-whole capsules under other likelihoods and objectives, on images of clothes and in color."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

from pyro.infer import ELBO, Trace_ELBO

from capsule_zoo.data import Dataset, load_dataset
from capsule_zoo.experiments import Options, Result, begun, experiment, in_turn, train
from capsule_zoo.experiments.common.findings import (
    Bounded,
    bounds_of_rows,
    by_quantity,
    pictures,
    single,
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


@experiment("part-whole/likelihoods", data="mnist", minutes=60, defaults=dict(particles=50))
def likelihoods(options: Options, chosen: Bounded) -> Result:
    """Compare parts laid over each other with a mixture at each pixel (an hour).

    Both are densities of the same pixels, so that their bounds compare.
    """
    data = load_dataset("mnist", root=options.data_root)
    kinds = ("composite", "mixture")
    variants = {kind: Variant(data, {"likelihood": kind}) for kind in kinds}
    return train_and_measure(variants, options, chosen)


@experiment("part-whole/colours", data="fashion-mnist", minutes=60, defaults=dict(particles=50))
def colors(options: Options, chosen: Bounded) -> Result:
    """Train on Fashion-MNIST, and on CIFAR-10 with a learned background (an hour).

    If the data root has a folder `cifar10` of images by class, which may be a subset, that folder
    is used. `training_images` is the number of training images.
    """
    variants = {
        "fashion_mnist": Variant(load_dataset("fashion-mnist", root=options.data_root), {}),
        "cifar10": Variant(photographs("cifar10", options), {"background": "learned"}),
    }
    return train_and_measure(variants, options, chosen)


def train_and_measure(variants: Mapping[str, Variant], options: Options, chosen: Bounded) -> Result:
    """Train every variant for an equal share of the time, and measure all in the same way."""
    found: dict[str, Numbers] = {}
    drawn: dict = {}
    entries: list[Entry] = []
    for name, variant, minutes in in_turn(options, variants):
        data = variant.data
        points, normal = learn(name, variant, options, minutes)
        parsed = infer(points.guide, data.test.images, seed=options.seed)
        painted = mean_images(points.model, len(data.test), parsed)
        found[name] = {
            **probes(points, data),
            "squared_error": squared_error(painted, data.test.images),
            **chosen.bounds(normal, data, options.seed),
            "training_images": single(len(data.train)),
        }
        shown = pictures(points, data.test.images[:12])
        drawn |= {f"{name}_{kind}": figure for kind, figure in shown.items()}
        entries.append(points)
    return Result(by_quantity(found), drawn, None, entries[0])


def learn(name: str, variant: Variant, options: Options, minutes: float) -> tuple[Entry, Entry]:
    """Return an entry trained with points for poses, and one with densities (model frozen)."""
    entry = begun("part-whole", variant.data, options, **variant.sizes)
    train(entry, variant.data, options, (1 - TIGHTENING) * minutes, name=name)
    how: dict[str, Any] = dict(name=f"{name}-tightened", minutes=TIGHTENING * minutes)
    return entry, tighten(entry, variant.data, options, **how)


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
    for name, objective, minutes in in_turn(options, objectives(draws, intervals)):
        model, guide = deepcopy(pairs["start"])
        pairs[name] = (model, guide)
        own = pairs[name] if name == RELAXED else (model.discretized(), guide.discretized())
        how: dict[str, Any] = dict(
            objective=objective, lr=lr, pace=Pace("linear"), inputs=Inputs(JITTER)
        )
        own_start = replace(start, model=own[0], guide=own[1])
        run = train(own_start, data, options, minutes, name=name, **how)
        updates[name] = (float(run.steps), None, 1)
    table = compare(pairs, data.test[:images], num_particles=particles, seed=options.seed)
    return Result({**bounds_of_rows(table), "updates": updates}, {"": table.draw()}, table)
