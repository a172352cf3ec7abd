"""How many digits a scene has where they may hide each other."""

from __future__ import annotations

from typing import Any

import pyro

from capsule_zoo.data import load_dataset
from capsule_zoo.experiments import Options, Result, experiment
from capsule_zoo.experiments.common.findings import mean_and_error
from capsule_zoo.experiments.scenes.counts import right_counts
from capsule_zoo.experiments.scenes.reading import ways
from capsule_zoo.experiments.training import train
from capsule_zoo.inference.evaluation.objects import find_objects
from capsule_zoo.registry import create
from capsule_zoo.zoo.scenes.figures import found_objects

DATA = "multi-mnist:canvas=60,most=3,overlap=1,train=60000"


@experiment("scenes/overlap", data="multi-mnist", minutes=16)
def overlap(options: Options, *, length: float = 15.0, draws: int = 5, sizes: Any = None) -> Result:
    """Train on 0 to 3 digits that may hide each other, and count them in three ways (16 minutes).

    Args:
        length: minutes of training.
        draws: draws of the guide that are combined.
        sizes: sizes of the entry that replace ours.
    """
    data = load_dataset(DATA, options.data_root)
    pyro.set_rng_seed(options.seed)
    own = {"slots": 4, "counts": "learned", **(sizes or {})}
    entry = create("scenes", image_shape=data.image_shape, **own)
    train(entry, data, options, options.minutes or length)
    test = data.test
    sets = {"": test.labels >= 0, **{f"_{n}_digits": test.labels == n for n in range(4)}}
    found: dict[str, Any] = {f"count_accuracy{suffix}": {} for suffix in sets}
    for name, way in ways(entry, narrow=3).items():
        options.say(f"Counting by {name}")
        right = right_counts(find_objects(way.model, way.guide, test.images, draws=draws), test)
        for suffix, chosen in sets.items():
            found[f"count_accuracy{suffix}"][name] = mean_and_error(right[chosen])
    return Result(found, {"": found_objects(entry, test.images)})
