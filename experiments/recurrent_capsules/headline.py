"""The experiments on recurrent capsules (Sastry), compared with DRAW (Gregor et al. 2015).

Nats are of test images binarized once, with seed 0. Training images are binarized again whenever
they are seen (`energy.binary_mnist`).

`overlap` has two digits over each other. The model explains one of them; its guide sees both, but
only through the capsule of the digit's class, for which the margin loss asks. Without labels the
loss bounds log p(digit). A pair is an image and the one before it, shifted by up to 4 pixels.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from capsule_zoo.data import Binarize, Dataset, Split, load_dataset
from capsule_zoo.data.transforms import Shift
from capsule_zoo.experiments import Options, Result, experiment
from capsule_zoo.experiments.common.energy import binary_mnist
from capsule_zoo.experiments.common.findings import (
    TIGHTNESS,
    Bounded,
    bounds_of_rows,
    by_quantity,
    held_out_bounds,
    mean_and_error,
    means_of,
    over_seeds,
    pictures,
    single,
)
from capsule_zoo.experiments.common.overlaps import Overlaid, beside_equal
from capsule_zoo.experiments.study import Job, Study, choose
from capsule_zoo.experiments.training import begun, photographs, train, trained
from capsule_zoo.figures.grids import image_rows
from capsule_zoo.inference import Inputs, Run, image_log_likelihood, infer, mean_images
from capsule_zoo.inference.evaluation.classification import Share
from capsule_zoo.records import Metrics, Number, Numbers, Table
from capsule_zoo.registry import Entry, create, load
from capsule_zoo.zoo.recurrent_capsules.figures import drawings_of

ONE_STEP = 0.1  # the extra time of the model that draws in one step, as a share of the budget
EVERY: Mapping[str, Any] = dict(capsules="every", steps=6, types=4)  # steps of 1.6 times the time
ABLATIONS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "capsules": ("recurrent-capsules", {}),
    "convolutions": ("recurrent-capsules", {"iterations": 0}),
    "no_margin": ("recurrent-capsules", {"label_weight": 0.0}),
    "no_attention": ("recurrent-capsules", {"attention": False}),
    "every": ("recurrent-capsules", EVERY),
    "draw": ("draw", {}),
}


def knows_labels(entry: Entry) -> bool:
    """Return True if an entry learns the class: it has capsules, and its margin loss a weight."""
    return entry.model.capsules != "none" and entry.model.label_weight > 0


def learn(entry: Entry, data: Dataset, options: Options, name: str = "", **limits: Any) -> Run:
    """Train on images that are binarized again at every visit, with labels if they matter."""
    how: dict[str, Any] = dict(name=name, inputs=Inputs(Binarize(), labels=knows_labels(entry)))
    return train(entry, data, options, **how, **limits)


def digits_and_entry(options: Options) -> tuple[Dataset, Entry]:
    """Return binary MNIST, and the entry that the options name or one trained on it."""
    data, inputs = binary_mnist(options), Inputs(Binarize(), labels=True)
    return data, trained("recurrent-capsules", data, options, inputs=inputs)


@torch.no_grad()
def class_error(entry: Entry, split: Split) -> Number:
    """Return how often another capsule than the class's is longest, with its binomial error."""
    found = torch.cat([entry.model.classify(x).argmax(1) for x in split.images.split(500)])
    return Share.of(found != split.labels)


def negative(found: Mapping[str, Numbers]) -> dict[str, Numbers]:
    """Return numbers by quantity, with the signs of bounds turned: `neg_elbo` for `elbo`."""
    tightness = {quantity: rows for quantity, rows in found.items() if quantity in TIGHTNESS}
    bounds = {
        f"neg_{quantity}": {name: (-value, error, n) for name, (value, error, n) in rows.items()}
        for quantity, rows in found.items()
        if quantity not in TIGHTNESS
    }
    return bounds | tightness


def held_out(entry: Entry, images: Split, particles: int, options: Options) -> Numbers:
    """Return the negative ELBO and IWAE, in nats per image, and how tight they are."""
    bounds = held_out_bounds(entry, images, particles, options.seed)
    return {name: rows["own"] for name, rows in negative(by_quantity({"own": bounds})).items()}


@experiment("recurrent-capsules/mnist", minutes=90, of_runs=True)
def mnist(options: Options, chosen: Bounded) -> Result:
    """Measure nats, reconstruction, the KL of each step, and the class error (90 + 9 minutes).

    The class error is measured on the binarized test images of the bounds, and on gray ones, which
    other papers classify. `neg_elbo` is of all test images; its parts are of those of the bound.
    """
    data, entry = digits_and_entry(options)
    few = data.test[: chosen.images]
    weighed = held_out(entry, few, chosen.particles, options)
    codes = infer(entry.guide, few.images, seed=options.seed)
    divergences = torch.cat([entry.guide.divergences(x) for x in few.images.split(500)], 1)
    metrics: dict[str, Number | Table] = {
        "neg_elbo": held_out(entry, data.test, 1, options)["neg_elbo"],
        **{name: nats for name, nats in weighed.items() if name.startswith("neg_iwae")},
        "reconstruction": mean_and_error(-image_log_likelihood(entry.model, few.images, codes)),
        "class_error": class_error(entry, data.test),
        "class_error_gray": class_error(entry, load_dataset("mnist", root=options.data_root).test),
    }
    single = create(entry.name, **{**entry.sizes, "steps": 1})
    learn(single, data, options, "one-step", minutes=ONE_STEP * options.budget)
    metrics["neg_elbo_one_step"] = held_out(single, data.test, 1, options)["neg_elbo"]
    kl = {str(t): mean_and_error(nats) for t, nats in enumerate(divergences, start=1)}
    metrics["step"] = Table({"kl": kl})
    return Result(metrics, pictures(entry, data.test.images), None, entry)


@experiment("recurrent-capsules/steps", data="mnist", minutes=90, of_runs=True)
def steps(options: Options, *, images: int = 1000) -> Result:
    """Show the canvas after each step, and the reconstruction error left in nats (90 minutes).

    Args:
        images: number of test images.
    """
    data, entry = digits_and_entry(options)
    few = data.test.images[:images]
    left: Numbers = {}
    for t, drawing in enumerate(drawings_of(entry, few, options.seed)):
        missing = entry.model.image_law(drawing).log_prob(few)
        left[str(t)] = mean_and_error(-missing)
    strokes = entry.figures["strokes"](entry, data.test.images)
    metrics = {"after step": Table({"reconstruction": left})}
    return Result(metrics, {"": strokes}, None, entry)


@experiment("recurrent-capsules/samples", data="mnist", minutes=90, of_runs=True)
def samples(options: Options, *, images: int = 1000) -> Result:
    """Compare draws from the prior with the nearest training images (90 minutes).

    Distances are root mean squares over pixels, to the nearest training image, of mean images: of
    draws, and of test images as the model redraws them. Draws from a model that memorized its
    training images are nearer.

    Args:
        images: number of draws and of test images; at least 24.
    """
    data, entry = digits_and_entry(options)
    gray = data.train.images
    drawn = mean_images(entry.model, images, seed=options.seed)
    redrawn = drawings_of(entry, data.test.images[:images], options.seed)[-1].mean
    distance, nearest = nearest_to(drawn, gray)
    distances: Numbers = {
        "draws": mean_and_error(distance),
        "test": mean_and_error(nearest_to(redrawn, gray)[0]),
    }
    rows = {}
    for first in (0, 12):
        rows[f"draws {first + 1}-{first + 12}"] = drawn[first : first + 12]
        rows[f"nearest to {first + 1}-{first + 12}"] = gray[nearest[first : first + 12]]
    figure = image_rows(rows, "Draws from the prior, and the training images nearest to them")
    return Result({"distance": distances}, {"": figure}, None, entry)


def nearest_to(images: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    """Return the root mean square distance to the nearest known image, and its index, (N,) each."""
    found = [torch.cdist(x.flatten(1), known.flatten(1)).min(1) for x in images.split(100)]
    distance = torch.cat([f.values for f in found]) / images[0].numel() ** 0.5
    return distance, torch.cat([f.indices for f in found])


@dataclass(frozen=True)
class Comparing(Bounded):
    """The settings of both comparisons of variants: `Bounded`, and what is trained.

    Args:
        variants: names of the variants.
        seeds: number of seeds of each variant.
        sizes: sizes of every entry that replace the variant's.
    """

    variants: tuple[str, ...] = tuple(ABLATIONS)
    seeds: int = 1
    sizes: Mapping[str, Any] | None = None


@experiment("recurrent-capsules/ablations", data="mnist", minutes=150)
def ablations(options: Options, chosen: Comparing) -> Result:
    """Compare capsules with linear layers, no margin loss, no attention, and DRAW (6 x 25 minutes).

    `every` looks through its capsules at every step, as in the paper, in six steps and with half of
    the types of primary capsules. All variants get equal times, side by side where there are two
    cores.
    """
    return compared(replace(options, minutes=options.budget), chosen)


@dataclass(frozen=True)
class EqualUpdates(Comparing):
    """The settings of the comparison after equal updates: `Comparing`, and their number.

    Args:
        steps: updates of each variant; they shrink with minutes.
    """

    steps: int = 1000


@experiment("recurrent-capsules/equal-updates", data="mnist", minutes=40)
def equal_updates(options: Options, chosen: EqualUpdates) -> Result:
    """Compare capsules, linear layers and DRAW after equal numbers of updates (40 core-minutes)."""
    steps = options.shortened(chosen.steps)
    return compared(replace(options, minutes=None), chosen, steps)


def compared(options: Options, chosen: Comparing, steps: int | None = None) -> Result:
    """Train the variants from each seed, and return bounds, errors and updates; see `Comparing`."""
    study = Study(choose("variant", chosen.variants, ABLATIONS), chosen.seeds)
    learned = means_of(study.run(learn_variant, options, chosen=chosen, steps=steps))
    data = binary_mnist(options)
    bounds, tables = [], []
    for seed in range(options.seed, options.seed + chosen.seeds):
        entries = {name: load(folder) for name, folder in study.folders(options, seed).items()}
        pairs = {name: (entry.model, entry.guide) for name, entry in entries.items()}
        tables.append(chosen.compare(pairs, data, seed))
        bounds.append(negative(bounds_of_rows(tables[-1])))
    metrics: Metrics = {
        **{q: over_seeds([own.get(q, {}) for own in bounds]) for q in bounds[0]},
        **by_quantity(learned),
    }
    return Result(metrics, {"": tables[0].draw()}, tables[0])


def learn_variant(
    job: Job[tuple[str, Mapping[str, Any]]], *, chosen: Comparing, steps: int | None
) -> Numbers:
    """Train one variant, and return its updates and class error.

    Args:
        job: its variant is the name of an entry, and its sizes.
        steps: updates; None for the minutes.
    """
    (name, sizes), options = job.variant, job.options
    data = binary_mnist(options)
    own = {"classes": data.num_classes, **sizes, **(chosen.sizes or {})}
    entry = begun(name, data, options, **own)
    minutes = options.budget if steps is None else None
    run = learn(entry, data, options, minutes=minutes, steps=steps)
    found: Numbers = {"updates": single(run.steps)}
    if knows_labels(entry):
        found["class_error"] = class_error(entry, data.test)
    return found


@experiment("recurrent-capsules/cifar10", data="cifar10", minutes=60)
def cifar10(options: Options, chosen: Bounded) -> Result:
    """Train on photographs with normal pixels; measure class error and nats (an hour).

    If the data root has a folder of images of the data set, which may be a subset, it is used.
    """
    data = photographs("cifar10", options)
    sizes = dict(classes=data.num_classes, likelihood="normal")
    entry = trained("recurrent-capsules", data, options, sizes, inputs=Inputs(labels=True))
    metrics: Metrics = {
        **held_out(entry, data.test[: chosen.images], chosen.particles, options),
        "class_error": class_error(entry, data.test),
        "training_images": single(len(data.train)),
    }
    return Result(metrics, pictures(entry, data.test.images), None, entry)


def scattered(images: Tensor, *, generator: torch.Generator) -> Tensor:
    """Return images shifted by up to 4 pixels along each axis, and binarized."""
    return Binarize()(Shift(4)(images, generator=generator), generator=generator)


@experiment("recurrent-capsules/overlap", data="mnist", minutes=40)
def overlap(options: Options, chosen: Overlaid) -> Result:
    """Name and separate two overlapping digits, beside an equal network (40 core-minutes).

    Digits are binarized, on 28x28 pixels and shifted by up to 4. `weights` are those that read a
    pair, without what draws. See `capsule-network/overlap` for the quantities.
    """
    small = dict(steps=2, latent=16, units=64, channels=(8, 8), types=2, attention=False)
    given = replace(chosen, sizes=chosen.sizes or small)
    return beside_equal("overlapping-capsules", given, options, binary_mnist, scattered)
