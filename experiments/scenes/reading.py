"""What each way of reading a scene is worth, with one set of weights: sweeps and places."""

from dataclasses import replace
from typing import Any

from capsule_zoo.data import Split, load_dataset
from capsule_zoo.experiments import Options, Result, begun, experiment, train
from capsule_zoo.experiments.common.findings import calibration_error, mean_and_error
from capsule_zoo.experiments.scenes.counts import (
    MORE,
    at_drawn_places,
    on_large_canvas,
    right_counts,
    with_digits,
)
from capsule_zoo.guides import Peeling
from capsule_zoo.inference import Checks
from capsule_zoo.inference.evaluation.objects import find_objects
from capsule_zoo.records import Number
from capsule_zoo.registry import Entry, load
from capsule_zoo.zoo.scenes.figures import found_objects

WEIGHTS = "scenes-mnist"
OVERLAPPING = "multi-mnist:canvas=60,most=3,overlap=1,train=60000"


def ways(entry: Entry) -> dict[str, Entry]:
    """Return the entry with each way of reading."""
    again = entry.guide_of(Peeling).sharing_parameters(sweeps=2)
    return {
        "peeling": entry,
        "two_sweeps": replace(entry, guide=again),
        "drawn_places": at_drawn_places(entry),
    }


def counted(entry: Entry, scenes: Split, draws: int) -> dict[str, Number]:
    """Return the share of right counts, and how far their probabilities are from such shares."""
    found = find_objects(entry.model, entry.guide, scenes.images, draws=draws)
    right = right_counts(found, scenes)
    apart = calibration_error(found.count_probabilities.amax(1), right)
    return {"accuracy": mean_and_error(right), "calibration": (apart, None, len(right))}


@experiment("scenes/reading", data="multi-mnist", of_runs=True)
def reading(options: Options, scenes: int = 1000, more: int = 500, draws: int = 10) -> Result:
    """Count the digits of test scenes in three ways, with the weights `scenes-mnist` or --run.

    `count_calibration` is the mean distance between the probability of the most likely number and
    the share of scenes in which it is right, within ten bins of probability.

    Args:
        scenes: test scenes of 0 to 2 digits.
        more: test scenes of 3, 4 and 5 digits, each, on 80x80 pixels with seven slots.
        draws: draws of the guide that are combined.
    """
    entry = load(options.run or WEIGHTS)
    sets = {"": (entry, load_dataset("multi-mnist", options.data_root).test[:scenes])}
    for number in MORE:
        sets[f"_{number}_digits"] = on_large_canvas(entry), with_digits(number, more, options)
    found: dict[str, Any] = {}
    for suffix, (pair, test) in sets.items():
        for name, way in ways(pair).items():
            options.say(f"Counting by {name}{suffix.replace('_', ' ')}")
            for quantity, value in counted(way, test, draws).items():
                found.setdefault(f"count_{quantity}{suffix}", {})[name] = value
    return Result(found)


@experiment("scenes/overlap", data="multi-mnist", minutes=31)
def overlap(options: Options, *, length: float = 30.0, draws: int = 5, sizes: Any = None) -> Result:
    """Train on 0 to 3 digits that may hide each other, and count them in three ways (31 minutes).

    Args:
        length: minutes of training, of the processor.
        draws: draws of the guide that are combined.
        sizes: sizes of the entry that replace ours.
    """
    data = load_dataset(OVERLAPPING, options.data_root)
    own = {"slots": 4, "counts": "learned", **(sizes or {})}
    entry = begun("scenes", data, options, **own)
    busy = Checks(clock="processor")
    train(entry, data, options, options.minutes or length, name="trained", checks=busy)
    test = data.test
    sets = {"": test.labels >= 0, **{f"_{n}_digits": test.labels == n for n in range(4)}}
    found: dict[str, Any] = {f"count_accuracy{suffix}": {} for suffix in sets}
    for name, way in ways(entry).items():
        options.say(f"Counting by {name}")
        right = right_counts(find_objects(way.model, way.guide, test.images, draws=draws), test)
        for suffix, chosen in sets.items():
            found[f"count_accuracy{suffix}"][name] = mean_and_error(right[chosen])
    return Result(found, {"": found_objects(entry, test.images)})
