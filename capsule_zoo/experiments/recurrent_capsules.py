"""The experiments on recurrent capsules (Sastry), with DRAW (Gregor et al. 2015) beside them.

Nats are of test images binarised once, with seed 0; training images are binarised anew whenever
they are seen (`energy.binary_mnist`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from capsule_zoo.data import Binarize, Dataset, Split, load_dataset
from capsule_zoo.experiments import Options, Result, experiment, training
from capsule_zoo.experiments.energy import binary_mnist
from capsule_zoo.experiments.findings import (
    bounds_of_rows,
    held_out_bounds,
    mean_and_error,
    pictures,
)
from capsule_zoo.experiments.part_whole_variants import photographs
from capsule_zoo.experiments.training import train
from capsule_zoo.figures.grids import image_rows
from capsule_zoo.figures.recurrent import drawings_of
from capsule_zoo.inference import Run, compare
from capsule_zoo.inference.evaluation.ancestral import image_log_likelihood, infer, mean_images
from capsule_zoo.inference.evaluation.classification import Share
from capsule_zoo.records import Metrics, Number, Numbers, Table
from capsule_zoo.registry import Entry, create

MINUTES = 90
ONE_STEP = 0.1  # of the time, for the model that draws in one step
WEIGHED = 1000  # images
PARTICLES = 100
ABLATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "capsules": ("recurrent-capsules", {}),
    "convolutions": ("recurrent-capsules", {"iterations": 0}),
    "no_margin": ("recurrent-capsules", {"label_weight": 0.0}),
    "no_attention": ("recurrent-capsules", {"attention": False}),
    "draw": ("draw", {}),
}


def knows_labels(entry: Entry) -> bool:
    """Whether an entry is taught the class: it has capsules, and the margin loss a weight."""
    return entry.model.capsules != "none" and entry.model.label_weight > 0


def learn(entry: Entry, data: Dataset, options: Options, minutes: float) -> Run:
    """Train on images binarised anew, with labels where they teach anything."""
    return train(entry, data, options, minutes, transform=Binarize(), labels=knows_labels(entry))


def trained(options: Options, data: Dataset) -> Entry:
    """The entry that the options name, or one trained on MNIST."""
    how: dict[str, Any] = dict(transform=Binarize(), labels=True)
    return training.trained("recurrent-capsules", data, options, MINUTES, **how)


@torch.no_grad()
def class_error(entry: Entry, split: Split) -> Number:
    """How often the longest capsule is not that of the class, and its binomial standard error."""
    found = torch.cat([entry.model.classify(x).argmax(1) for x in split.images.split(500)])
    return Share.of(found != split.labels)


def negative(bounds: Numbers) -> Numbers:
    """Bounds with their signs turned: `neg_elbo` for `elbo`, the smaller the better."""
    return {f"neg_{name}": number for name, number in negated(bounds).items()}


def negated(numbers: Numbers) -> Numbers:
    """Return numbers with their signs turned."""
    return {name: (-value, error, n) for name, (value, error, n) in numbers.items()}


def held_out(entry: Entry, images: Split, particles: int, options: Options) -> Numbers:
    """Negative ELBO and IWAE, nats per image."""
    return negative(held_out_bounds(entry, images, particles, options.seed))


@experiment("recurrent-capsules/mnist")
def mnist(options: Options) -> Result:
    """Nats, with reconstruction and each step's KL apart, and class error (90 + 9 minutes).

    The class is read off the test images as they are bounded, binarised, and off grey ones, which
    other papers classify.
    """
    data = binary_mnist(options)
    entry = trained(options, data)
    few = data.test[:WEIGHED]
    weighed = held_out(entry, few, PARTICLES, options)
    codes = infer(entry.guide, few.images, seed=options.seed)
    divergences = torch.cat([entry.guide.divergences(x) for x in few.images.split(500)], 1)
    metrics: dict[str, Number | Table] = {
        "neg_elbo": held_out(entry, data.test, 1, options)["neg_elbo"],
        f"neg_iwae_{PARTICLES}": weighed[f"neg_iwae_{PARTICLES}"],
        "reconstruction": mean_and_error(-image_log_likelihood(entry.model, few.images, codes)),
        "class_error": class_error(entry, data.test),
        "class_error_grey": class_error(entry, load_dataset("mnist", root=options.data_root).test),
    }
    options.say("Training one that draws in a single step")
    single = create(entry.name, **{**entry.sizes, "steps": 1})
    learn(single, data, options, ONE_STEP * (options.minutes or MINUTES))
    metrics["neg_elbo_one_step"] = held_out(single, data.test, 1, options)["neg_elbo"]
    kl = {str(t): mean_and_error(nats) for t, nats in enumerate(divergences, start=1)}
    metrics["step"] = Table({"kl": kl})
    return Result(metrics, pictures(entry, data.test.images), None, entry)


@experiment("recurrent-capsules/steps", data="mnist", lead="")
def steps(options: Options) -> Result:
    """The canvas after each step with its window, and what is missing then in nats (90 minutes)."""
    data = binary_mnist(options)
    entry = trained(options, data)
    images = data.test.images[:WEIGHED]
    left: Numbers = {}
    for t, drawing in enumerate(drawings_of(entry, images, options.seed)):
        missing = entry.model.image_law(drawing).log_prob(images)
        left[str(t)] = mean_and_error(-missing)
    strokes = entry.figures["strokes"](entry, data.test.images)
    metrics = {"after step": Table({"reconstruction": left})}
    return Result(metrics, {"": strokes}, None, entry)


@experiment("recurrent-capsules/samples", data="mnist")
def samples(options: Options) -> Result:
    """Draws from the prior, and the training images next to them (90 minutes).

    Distances are root mean square over pixels, to the nearest training image, of mean images: of
    draws, and of test images as the model redraws them. Draws from a model that knows its training
    images by heart are nearer.
    """
    data = binary_mnist(options)
    entry = trained(options, data)
    grey = data.train.images
    drawn = mean_images(entry.model, WEIGHED, seed=options.seed)
    redrawn = drawings_of(entry, data.test.images[:WEIGHED], options.seed)[-1].mean
    distance, nearest = nearest_to(drawn, grey)
    distances: Numbers = {
        "draws": mean_and_error(distance),
        "test": mean_and_error(nearest_to(redrawn, grey)[0]),
    }
    rows = {}
    for first in (0, 12):
        rows[f"draws {first + 1}-{first + 12}"] = drawn[first : first + 12]
        rows[f"nearest to {first + 1}-{first + 12}"] = grey[nearest[first : first + 12]]
    figure = image_rows(rows, "Draws from the prior, and the training images nearest to them")
    return Result({"distance": distances}, {"": figure}, None, entry)


def nearest_to(images: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    """Root mean square distance to the nearest known image, and which it is, (N,) each."""
    found = [torch.cdist(x.flatten(1), known.flatten(1)).min(1) for x in images.split(100)]
    distance = torch.cat([f.values for f in found]) / images[0].numel() ** 0.5
    return distance, torch.cat([f.indices for f in found])


@experiment("recurrent-capsules/ablations", data="mnist", role="comparison")
def ablations(options: Options) -> Result:
    """Capsules against linear layers, no margin loss, no attention, and DRAW (5 x 30 minutes)."""
    options.refuse_run()
    data = binary_mnist(options)
    updates: Numbers = {}
    errors: Numbers = {}
    pairs: dict[str, tuple] = {}
    for name, (kind, sizes) in ABLATIONS.items():
        entry = create(kind, image_shape=data.image_shape, classes=data.num_classes, **sizes)
        options.say(f"Training {name}")
        run = learn(entry, data, options, (options.minutes or 150) / len(ABLATIONS))
        updates[name] = (float(run.steps), None, 1)
        if knows_labels(entry):
            errors[name] = class_error(entry, data.test)
        pairs[name] = entry.model, entry.guide
    table = compare(pairs, data.test[:WEIGHED], num_particles=PARTICLES, seed=options.seed)
    bounds = {f"neg_{name}": negated(numbers) for name, numbers in bounds_of_rows(table).items()}
    metrics: Metrics = {**bounds, "class_error": errors, "updates": updates}
    return Result(metrics, {"": table.draw()}, table)


@experiment("recurrent-capsules/cifar10", data="cifar10")
def cifar10(options: Options) -> Result:
    """Photographs, with normal pixels: class error and nats, as they are (an hour).

    A folder of images of the data set, a subset perhaps, is used where there is one.
    """
    options.refuse_run()
    data = photographs("cifar10", options)
    entry = create(
        "recurrent-capsules",
        image_shape=data.image_shape,
        classes=data.num_classes,
        likelihood="normal",
    )
    train(entry, data, options, options.minutes or 60, labels=True)
    metrics: Metrics = {
        **held_out(entry, data.test[:WEIGHED], PARTICLES, options),
        "class_error": class_error(entry, data.test),
        "training_images": (float(len(data.train)), None, 1),
    }
    return Result(metrics, pictures(entry, data.test.images), None, entry)
