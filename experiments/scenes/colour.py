"""Digits in random colors on photographs: the case in which earlier versions found nothing."""

from __future__ import annotations

from typing import Any

import pyro

from capsule_zoo.data import Split, load_dataset
from capsule_zoo.data.scenes import gray_scenes
from capsule_zoo.experiments import Options, Result, experiment
from capsule_zoo.experiments.scenes.segmentation import segmented
from capsule_zoo.experiments.training import photographs, train
from capsule_zoo.inference.evaluation.objects import find_objects
from capsule_zoo.registry import create
from capsule_zoo.zoo.scenes.figures import found_objects


def on_photographs(digits: Split, photos: Split, number: int, seed: int) -> Split:
    """Return scenes of 0 to 2 digits in random colors, each on a photograph of 50x50 pixels."""
    images, known = gray_scenes(
        digits.images, digits.labels, number, grounds=photos.images, seed=seed
    )
    return Split(images, known.counts, "digits on photographs", known)


@experiment("scenes/colour", data="cifar10", minutes=20)
def colour(
    options: Options,
    *,
    length: float = 10.0,
    scenes: int = 20_000,
    tested: int = 1000,
    sizes: Any = None,
) -> Result:
    """Find colored digits on photographs, with two laws of the ground (20 core-minutes).

    `picture` draws 10x10 colors with smooth transitions, `color` one color for each scene.

    Args:
        length: minutes of training with each ground.
        scenes: training scenes.
        tested: test scenes.
        sizes: sizes of the entries that replace the zoo's own.
    """
    photos, digits = photographs("cifar10", options), load_dataset("mnist", options.data_root)
    data = on_photographs(digits.train, photos.train, scenes, 1)
    test = on_photographs(digits.test, photos.test, tested, 2)
    found: dict[str, Any] = {}
    figures = {}
    for ground in ("picture", "color"):
        pyro.set_rng_seed(options.seed)
        entry = create("scenes", image_shape=data.images.shape[1:], ground=ground, **(sizes or {}))
        train(entry, data, options, options.minutes or length, name=ground, batch_size=16)
        read = find_objects(entry.model, entry.guide, test.images, draws=5)
        for quantity, number in segmented(read, test).items():
            found.setdefault(quantity, {})[ground] = number
        figures[ground] = found_objects(entry, test.images)
    return Result(found, figures)
