"""What each way of reading a scene is worth, with one set of weights: sweeps and narrow slots."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from capsule_zoo.data import load_dataset
from capsule_zoo.experiments import Options, Result, experiment
from capsule_zoo.experiments.scenes.counts import MORE, accuracy, on_large_canvas, with_digits
from capsule_zoo.guides import Peeling
from capsule_zoo.registry import Entry, load

WEIGHTS = "scenes-mnist"


def ways(entry: Entry, narrow: int) -> dict[str, Entry]:
    """Return the entry with each way of reading."""
    guide = entry.guide_of(Peeling)
    sharp = guide.with_narrow_slots(narrow)
    twice = guide.sharing_parameters(sweeps=2)
    return {
        "peeling": entry,
        "two_sweeps": replace(entry, guide=twice),
        "narrow_slots": replace(entry, model=sharp.model, guide=sharp),
    }


@experiment("scenes/reading", data="multi-mnist")
def reading(
    options: Options, scenes: int = 2000, more: int = 300, draws: int = 5, narrow: int = 3
) -> Result:
    """Count the digits of test scenes in three ways, with the weights `scenes-mnist` or --run.

    Args:
        scenes: test scenes of 0 to 2 digits.
        more: test scenes of 3, 4 and 5 digits, each, on 80x80 pixels with seven slots.
        draws: draws of the guide that are combined.
        narrow: slots that are added with a sharper attention.
    """
    entry = load(options.run or WEIGHTS)
    test = load_dataset("multi-mnist", options.data_root).test[:scenes]
    found: dict[str, Any] = {"count_accuracy": {}}
    for name, way in ways(entry, narrow).items():
        options.say(f"Counting by {name}")
        found["count_accuracy"][name] = accuracy(way, test, draws)
    for number in MORE:
        larger = with_digits(number, more, options)
        found[f"count_accuracy_{number}_digits"] = own = {}
        for name, way in ways(on_large_canvas(entry), narrow).items():
            options.say(f"Counting {number} digits by {name}")
            own[name] = accuracy(way, larger, draws)
    return Result(found)
