"""Part-whole capsules under another likelihood, and on images of clothes and in color."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from capsule_zoo.data import Dataset, load_dataset
from capsule_zoo.experiments import Options, Result, experiment
from capsule_zoo.experiments.common.findings import (
    by_quantity,
    held_out_bounds,
    pictures,
    squared_error,
)
from capsule_zoo.experiments.common.photographs import photographs
from capsule_zoo.experiments.part_whole.headline import probes, tighten
from capsule_zoo.experiments.study import divide
from capsule_zoo.experiments.training import begun, train
from capsule_zoo.inference.evaluation.ancestral import infer, mean_images
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
