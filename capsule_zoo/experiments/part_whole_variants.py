"""The same story under another likelihood, and on images of clothes and of coloured things."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyro

from capsule_zoo.data import Dataset, load_dataset
from capsule_zoo.data.sources import data_folder
from capsule_zoo.experiments import Options, Result, experiment
from capsule_zoo.experiments.findings import (
    by_quantity,
    held_out_bounds,
    pictures,
    squared_error,
)
from capsule_zoo.experiments.part_whole import probes, tighten
from capsule_zoo.experiments.training import train
from capsule_zoo.inference.evaluation.ancestral import infer, mean_images
from capsule_zoo.records import Numbers
from capsule_zoo.registry import Entry, create

MINUTES = 60  # of training, in all
TIGHTENING = 0.2  # of a variant's time, for a guide with a density


@dataclass(frozen=True)
class Variant:
    """What is trained: a data set, and sizes for `create`."""

    data: Dataset
    sizes: Mapping[str, Any]


@experiment("part-whole/likelihoods", data="mnist")
def likelihoods(options: Options) -> Result:
    """Parts laid over each other against a mixture at each pixel, all else equal (an hour).

    Both are densities of the same pixels, so that their bounds compare.
    """
    options.refuse_run()
    data = load_dataset("mnist", root=options.data_root)
    kinds = ("composite", "mixture")
    return study({kind: Variant(data, {"likelihood": kind}) for kind in kinds}, options)


@experiment("part-whole/colours", data="fashion-mnist")
def colours(options: Options) -> Result:
    """Fashion-MNIST and CIFAR-10, the code as it is; photographs get a background (an hour).

    Where the data root has a folder `cifar10` of images by class, a subset perhaps, that is used;
    `training_images` says how many there were.
    """
    options.refuse_run()
    variants = {
        "fashion_mnist": Variant(load_dataset("fashion-mnist", root=options.data_root), {}),
        "cifar10": Variant(photographs("cifar10", options), {"background": "learned"}),
    }
    return study(variants, options)


def photographs(name: str, options: Options) -> Dataset:
    """The folder of images of that name under the data root, or else the data set of that name."""
    root = data_folder(options.data_root)
    if root and (root / name / "train").is_dir():
        return load_dataset(f"folder:{root / name}")
    return load_dataset(name, root=options.data_root)


def study(variants: Mapping[str, Variant], options: Options) -> Result:
    """Train every variant for an equal share of the time, and measure all in the same way."""
    found: dict[str, Numbers] = {}
    drawn: dict = {}
    minutes = (options.minutes or MINUTES) / len(variants)
    first: Entry | None = None
    for name, variant in variants.items():
        options.say(f"Training {name} on {len(variant.data.train):,} images, {minutes:.3g} minutes")
        points, normal = learn(variant, options, minutes)
        found[name] = measure(points, normal, variant.data, options.seed)
        shown = pictures(points, variant.data.test.images[:12])
        drawn |= {f"{name}_{kind}": figure for kind, figure in shown.items()}
        first = first or points
    return Result(by_quantity(found), drawn, None, first)


def learn(variant: Variant, options: Options, minutes: float) -> tuple[Entry, Entry]:
    """An entry trained with points for poses, and the same with densities (model frozen)."""
    pyro.set_rng_seed(options.seed)
    entry = create("part-whole", image_shape=variant.data.image_shape, **variant.sizes)
    train(entry, variant.data, options, (1 - TIGHTENING) * minutes)
    return entry, tighten(entry, variant.data, options, minutes=TIGHTENING * minutes)


def measure(points: Entry, normal: Entry, data: Dataset, seed: int) -> Numbers:
    """Probes, squared error of reconstructions, and bounds on 1,000 held-out images."""
    images = data.test.images
    parsed = infer(points.guide, images, seed=seed)
    return {
        **probes(points, data),
        "squared_error": squared_error(mean_images(points.model, len(images), parsed), images),
        **held_out_bounds(normal, data.test[:1000], 50, seed),
        "training_images": (float(len(data.train)), None, 1),
    }
