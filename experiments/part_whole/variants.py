"""Part-whole capsules in variants: likelihoods, images, objectives, settings and a third level."""

import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pyro.infer import ELBO, Trace_ELBO

from capsule_zoo.data import Dataset, Split, load_dataset
from capsule_zoo.experiments import (
    Job,
    Options,
    Result,
    Study,
    begun,
    choose,
    experiment,
    in_turn,
    train,
)
from capsule_zoo.experiments.common.findings import (
    Bounded,
    bounds_of_rows,
    by_quantity,
    means_of,
    pictures,
    single,
    squared_error,
)
from capsule_zoo.experiments.part_whole.headline import (
    DIGITS_STEPS,
    JITTER,
    PROBED,
    TIGHTENING_STEPS,
    WITH_POSES,
    learn_digits,
    probes,
    tighten,
)
from capsule_zoo.experiments.training import photographs
from capsule_zoo.figures.curves import number_curves
from capsule_zoo.inference import (
    Check,
    Checks,
    ImportanceWeightedELBO,
    Inputs,
    Pace,
    ReweightedWakeSleep,
    ThermodynamicObjective,
    compare,
    infer,
    latents,
    linear_probe,
    mean_images,
)
from capsule_zoo.records import Numbers, write_json
from capsule_zoo.registry import Entry, load

TIGHTENING = 0.2  # share of a variant's time, for a guide with a density


@experiment("part-whole/likelihoods", data="mnist", minutes=60, defaults=dict(particles=50))
def likelihoods(options: Options, chosen: Bounded) -> Result:
    """Compare parts laid over each other with a mixture at each pixel (an hour).

    Both are densities of the same pixels, so that their bounds compare.
    """
    data = load_dataset("mnist", root=options.data_root)
    kinds = ("composite", "mixture")
    return train_and_measure(
        {kind: (data, {"likelihood": kind}) for kind in kinds}, options, chosen
    )


@experiment("part-whole/colours", data="fashion-mnist", minutes=60, defaults=dict(particles=50))
def colors(options: Options, chosen: Bounded) -> Result:
    """Train on Fashion-MNIST, and on CIFAR-10 with a learned background (an hour).

    If the data root has a folder `cifar10` of images by class, which may be a subset, that folder
    is used. `training_images` is the number of training images.
    """
    variants = {
        "fashion_mnist": (load_dataset("fashion-mnist", root=options.data_root), {}),
        "cifar10": (photographs("cifar10", options), {"background": "learned"}),
    }
    return train_and_measure(variants, options, chosen)


def train_and_measure(
    variants: Mapping[str, tuple[Dataset, dict[str, str]]], options: Options, chosen: Bounded
) -> Result:
    """Train on every data set with its sizes for equal times, and measure all in the same way."""
    found: dict[str, Numbers] = {}
    drawn: dict = {}
    entries: list[Entry] = []
    for name, (data, sizes), minutes in in_turn(options, variants):
        points, normal = learn_both(name, data, options, minutes, **sizes)
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


def learn_both(
    name: str, data: Dataset, options: Options, minutes: float, **sizes: str
) -> tuple[Entry, Entry]:
    """Return an entry trained with points for poses, and one with densities (model frozen)."""
    entry = begun("part-whole", data, options, **sizes)
    train(entry, data, options, (1 - TIGHTENING) * minutes, name=name)
    how: dict[str, Any] = dict(name=f"{name}-tightened", minutes=TIGHTENING * minutes)
    return entry, tighten(entry, data, options, **how)


START, RELAXED = "start", "relaxed"


@dataclass(frozen=True)
class Further(Bounded):
    """The settings of `discrete-objectives`: `Bounded`, a search, and the trainings.

    Args:
        steps: relaxed updates of a pair before the start; these and the next shrink with minutes.
        tightening: updates of the guide with normal poses before the start.
        draws: number of draws for each image, except for `relaxed`.
        intervals: number of intervals of the thermodynamic objective.
        rates: learning rates that are tried from the first seed; they fall to zero.
        tried: length of a try, as a part of the length of a training.
        seeds: number of seeds, each with a start of its own.
    """

    images: int = 200
    steps: int = DIGITS_STEPS
    tightening: int = TIGHTENING_STEPS
    draws: int = 5
    intervals: int = 5
    rates: tuple[float, ...] = (1e-4, 3e-4, 1e-3)
    tried: float = 0.5
    seeds: int = 3

    def bounds_of(self, pairs: Mapping[str, tuple], images: Split, seed: int) -> Numbers:
        """Return the bounds of the last of some pairs, and its difference to the first."""
        table = compare(pairs, images[: self.images], num_particles=self.particles, seed=seed)
        row = list(pairs)[-1]
        return {name: rows[row] for name, rows in bounds_of_rows(table).items() if row in rows}


def objectives(draws: int, intervals: int) -> Mapping[str, ELBO]:
    """Return the objectives by name; all but the first are for discrete presences."""
    return {
        RELAXED: Trace_ELBO(),
        "importance_weighted": ImportanceWeightedELBO(draws),
        "reweighted": ReweightedWakeSleep(draws, sleep=0.0),
        "thermodynamic": ThermodynamicObjective(draws, intervals),
    }


@experiment("part-whole/discrete-objectives", data="digits", minutes=90)
def discrete_objectives(options: Options, chosen: Further) -> Result:
    """Compare objectives for discrete presences with the relaxed bound (100 core-minutes).

    All objectives start at the pair of `part-whole/digits`, which was trained with relaxed
    presences and has normal poses. From there model and guide are trained further for the same
    processor time, under

    - `relaxed`: the ELBO of relaxed presences, with one draw, whose gradient is reparametrized;
    - `importance_weighted`: the bound of several draws of discrete presences. Their gradient is the
      score function with the baseline of Mnih & Rezende (2016), and poses are reparametrized;
    - `reweighted`: reweighted wake-sleep without its sleep phase (Bornschein & Bengio 2015);
    - `thermodynamic`: the thermodynamic objective (Masrani, Le & Wood 2019).

    The last two hold all draws constant, poses too. Each objective gets the rate with the best ELBO
    of validation digits after a try; the figure shows all tries. Bounds are those of the discrete
    model, for all rows alike; `start` is the pair that they start at. `updates` were made in this
    time.
    """
    steps, more = (options.shortened(number) for number in (chosen.steps, chosen.tightening))
    chosen = replace(chosen, steps=steps, tightening=more)
    begin = Study({START: None}, chosen.seeds)
    starts = begin.run(learn_start, replace(options, minutes=None), chosen=chosen)
    folders = {
        seed: begin.folders(options, seed)[START]
        for seed in range(options.seed, options.seed + chosen.seeds)
    }

    names = tuple(objectives(chosen.draws, chosen.intervals))
    each = options.budget / len(names) / (chosen.seeds + chosen.tried * len(chosen.rates))
    how: dict[str, Any] = dict(chosen=chosen, starts=folders)
    tries = {f"{name}-{rate:g}": (name, rate) for name in names for rate in chosen.rates}
    timed = replace(options, minutes=each * chosen.tried * len(tries))
    tried = means_of(Study(tries).run(learn_further, timed, is_try=True, **how))
    curves = {
        name: {f"{rate:g}": tried[f"{name}-{rate:g}"]["elbo"] for rate in chosen.rates}
        for name in names
    }
    best = {n: (n, max(chosen.rates, key=lambda r: curves[n][f"{r:g}"][0])) for n in names}

    timed = replace(options, minutes=each * chosen.seeds * len(names))
    found = Study(best, chosen.seeds).run(learn_further, timed, **how)
    figure = number_curves({"ELBO of validation digits": curves}, "learning rate")
    figure.axes[0].set_xscale("log")
    return Result(by_quantity(means_of({**starts, **found})), {"": figure})


def learn_start(job: Job[None], *, chosen: Further) -> Numbers:
    """Train one pair with relaxed presences, then with normal poses; return its bounds."""
    options, data = job.options, load_dataset("digits")
    entry = learn_digits(data, options, steps=chosen.steps)
    start = tighten(entry, data, options, steps=chosen.tightening, inputs=Inputs(JITTER))
    return chosen.bounds_of({START: (start.model, start.guide)}, data.test, options.seed)


def learn_further(
    job: Job[tuple[str, float]],
    *,
    chosen: Further,
    starts: Mapping[int, Path],
    is_try: bool = False,
) -> Numbers:
    """Train the start of the job's seed further under one objective; return its bounds."""
    (name, rate), options, data = job.variant, job.options, load_dataset("digits")
    start = load(starts[options.seed] / "tightened-normal")
    pairs = {START: (start.model, start.guide), name: deepcopy((start.model, start.guide))}
    model, guide = pairs[name]
    own = pairs[name] if name == RELAXED else (model.discretized(), guide.discretized())
    run = train(
        replace(start, model=own[0], guide=own[1]),
        data,
        options,
        options.minutes,
        objective=objectives(chosen.draws, chosen.intervals)[name],
        lr=rate,
        pace=Pace("linear"),
        inputs=Inputs(JITTER),
        checks=Checks(clock="processor"),
    )
    found = chosen.bounds_of(pairs, data.validation if is_try else data.test, options.seed)
    return {**found, "rate": single(rate), "updates": single(run.steps)}


SAMPLED = "sampled"  # poses are drawn from normal laws from the first update, not points first
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "temperature_025": {"temperature": 0.25},
    "temperature_1": {"temperature": 1.0},
    "sigma_min_001": {"sigma_min": 0.01},
    "sigma_min_005": {"sigma_min": 0.05},
    "three_levels": {"layers": (16, 24, 16)},
    SAMPLED: {},
}


@dataclass(frozen=True)
class Sensitivity(Bounded):
    """The settings of `sensitivity`: `Bounded`, the variants, and their trainings.

    Args:
        variants: names of the variants.
        steps: updates of every variant in a full run.
        tightening: further updates, for a guide with a density.
        batch_size: images of an update. Small batches learn faster for their time.
        points: number of times that the probe is measured during training.
        probed: training images, and test images, of these probes.
    """

    variants: tuple[str, ...] = tuple(VARIANTS)
    steps: int = 3000
    tightening: int = 600
    batch_size: int = 32
    particles: int = 50
    points: int = 8
    probed: int = 2000


@experiment("part-whole/sensitivity", data="mnist", minutes=40)
def sensitivity(options: Options, chosen: Sensitivity) -> Result:
    """Try other temperatures, deviations and starts, and a third level (40 core-minutes).

    All variants take equally many updates, with points as poses, and then with normal laws, the
    model frozen. `sampled` has normal laws from the first update to the last. `three_levels` has
    16 objects, 24 groups and 16 parts. The figure shows a linear probe on presences and poses of
    objects as training goes on.
    """
    steps, more = (options.shortened(number) for number in (chosen.steps, chosen.tightening))
    chosen = replace(chosen, steps=steps, tightening=more)
    study = Study(choose("variant", chosen.variants, VARIANTS))
    found = study.run(learn, replace(options, minutes=None), chosen=chosen)
    numbers = {name: run["numbers"] for name, (run,) in found.items()}
    curves = {
        name: {f"{updates:g}": (value, se, chosen.probed) for updates, value, se in run["curve"]}
        for name, (run,) in found.items()
    }
    figure = number_curves({"accuracy of a linear probe": curves}, "updates")
    return Result(by_quantity(numbers), {"": figure})


def learn(job: Job[Mapping[str, Any]], *, chosen: Sensitivity) -> dict[str, Any]:
    """Train one variant; return what is measured, and its probes as training went on."""
    options, sampled = job.options, job.name == SAMPLED
    data = load_dataset("mnist", root=options.data_root)
    entry = begun("part-whole", data, options, **job.variant)
    steps = chosen.steps
    if sampled:
        entry = entry.use_guide("normal")
        steps += chosen.tightening
    curve = ProbesInTraining(data, chosen.probed, options.runs and options.runs / "curve.json")
    checks = Checks(callbacks=[curve], every=max(1, steps // chosen.points))
    few_at_once: dict[str, Any] = dict(batch_size=chosen.batch_size)
    train(entry, data, options, steps=steps, checks=checks, **few_at_once)
    normal = entry
    if not sampled:
        limit: dict[str, Any] = dict(name="tightened", steps=chosen.tightening)
        normal = tighten(entry, data, options, **limit, **few_at_once)
    numbers: Numbers = {
        **probes(entry, data, min(PROBED, len(data.train))),
        **chosen.bounds(normal, data, options.seed),
    }
    return {"numbers": numbers, "curve": curve.found}


class ProbesInTraining:
    """A callback that probes the objects at every check, and keeps the accuracies in a file.

    Args:
        data: the data set; the probe is fitted on its first training images.
        probed: number of training and of test images.
        path: the file, from which an interrupted run goes on; None to keep nothing.
    """

    def __init__(self, data: Dataset, probed: int, path: Path | None) -> None:
        self.splits = data.train[:probed], data.test[:probed]
        self.path = path
        self.found: list[list[float]] = []
        if path is not None and path.is_file():
            self.found = json.loads(path.read_text())["found"]

    def __call__(self, check: Check) -> None:
        """Probe the guide; keep the number of updates, the accuracy and its error."""
        if self.found and check.step <= self.found[-1][0]:
            return  # an interrupted run comes here again
        train, test = self.splits
        given, asked = (latents(check.guide, split.images, WITH_POSES) for split in self.splits)
        accuracy = linear_probe(given, train.labels, asked, test.labels)
        self.found.append([float(check.step), accuracy.value, accuracy.se])
        if self.path is not None:
            write_json(self.path, {"found": self.found})
