"""Time classifiers with capsules beside equal networks without: milliseconds an image.

    python benchmarks/equal_network.py

An equal network has the stem and the number of weights of the classifier. Every network classifies
one image a call and 128 images a call, on one thread, by processor time. Calls of all kinds take
turns, so that a machine that slows down affects all of them. Weights are untrained: they do not
change the work. The headlines are medians over rounds, and ratios within each round.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from harness import Contestant, interleave, median

from capsule_zoo.inference import classify
from capsule_zoo.records import FOLDER, Numbers, Table, flatten, write_record
from capsule_zoo.registry import Entry, create

CALLS = {"one_a_call": 1, "128_a_call": 128}  # images
FAMILIES = ("capsule-network", "matrix-capsules")
SUMMARY = __doc__.partition("\n")[0]


def entries() -> dict[str, Entry]:
    """Return each classifier, and the equal network beside it, in their small presets."""
    found = {}
    for family in FAMILIES:
        name = family.replace("-", "_")
        found[name] = create(family)
        found[f"{name}_equal"] = create("cnn", like=family)
    return found


def timed(entry: Entry, number: int) -> Contestant:
    """Return a call that classifies images of noise, and returns its processor time in seconds."""
    images = torch.rand(number, *entry.model.image_shape)

    def call() -> float:
        began = time.process_time()
        classify(entry.model, entry.guide, images, batch_size=number)
        return time.process_time() - began

    return call


def measure(rounds: int) -> dict[str, Numbers]:
    """Return milliseconds an image by the kind of call and network, and ratios to the equal one."""
    made = entries()
    calls = {
        f"{kind} {name}": timed(entry, number)
        for kind, number in CALLS.items()
        for name, entry in made.items()
    }
    seconds = interleave(calls, rounds)
    found: dict[str, Numbers] = {}
    for kind, number in CALLS.items():
        own = {name: seconds[f"{kind} {name}"] for name in made}
        found[kind] = {name: median(1000 * taken / number) for name, taken in own.items()}
        found[f"times_equal_{kind}"] = {
            name: median(taken / own[f"{name}_equal"])
            for name, taken in own.items()
            if not name.endswith("_equal")
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="benchmark capsules beside equal networks")
    parser.add_argument("--repeats", type=int, default=15, help="rounds (default: 15)")
    parser.add_argument("--out", type=Path, default=FOLDER, help="where records lie")
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error("--repeats must be 1 or more")
    torch.set_num_threads(1)
    began = time.perf_counter()
    metrics, tables = flatten({"milliseconds an image": Table(measure(options.repeats))})
    for name, metric in metrics.items():
        print(f"  {name:40}{metric['value']:10.4g} (s.e. {metric['se']:.2g})")
    path = write_record(
        "benchmarks/equal_network",
        metrics,
        command=f"python benchmarks/equal_network.py --repeats {options.repeats}",
        seed=0,
        data="images of noise, 28x28 pixels, one and 128 a call, on one thread",
        seconds=time.perf_counter() - began,
        folder=options.out,
        tables=tables,
        about="zoo",
        summary=SUMMARY,
    )
    print(f"written to {path}")


if __name__ == "__main__":
    main()
