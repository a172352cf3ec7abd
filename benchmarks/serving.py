"""Time what one process serves: images a second of processor time, by weights and verb.

    python benchmarks/serving.py

Every verb answers one image a call, as a server without a queue does, and 64 images a call, on one
thread. Calls of all kinds take turns, so that a machine that slows down affects all of them. The
headlines are `one_a_call_<weights>_<verb>` and `64_a_call_...`, medians over rounds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
from harness import Contestant, interleave, median

from capsule_zoo import load
from capsule_zoo.inference import classify, encode, reconstruct
from capsule_zoo.records import FOLDER, Number, Numbers, Table, flatten, write_record

CALLS = {"one_a_call": 1, "64_a_call": 64}  # images
VERBS: dict[str, tuple[Callable, ...]] = {
    "part-whole-mnist": (encode, reconstruct),
    "shape-codes-mnist": (encode, reconstruct),
    "capsule-network-mnist": (encode, reconstruct, classify),
    "matrix-capsules-mnist": (classify,),
}
SUMMARY = __doc__.partition("\n")[0]


def timed(verb: Callable, weights: str, number: int) -> Contestant:
    """Return a call of a verb on images of noise, which returns its processor time in seconds."""
    entry = load(weights)
    images = torch.rand(number, *entry.model.image_shape)

    def call() -> float:
        began = time.process_time()
        verb(entry.model, entry.guide, images)
        return time.process_time() - began

    return call


def measure(rounds: int) -> dict[str, Numbers]:
    """Return images a second, by the kind of call and then by weights and verb."""
    made = {
        f"{kind} {weights.removesuffix('-mnist').replace('-', '_')}_{verb.__name__}": timed(
            verb, weights, number
        )
        for weights, verbs in VERBS.items()
        for verb in verbs
        for kind, number in CALLS.items()
    }
    found: dict[str, dict[str, Number]] = {kind: {} for kind in CALLS}
    for name, seconds in interleave(made, rounds).items():
        kind, served = name.split()
        found[kind][served] = median(CALLS[kind] / seconds)
    return {**found}


def main() -> None:
    parser = argparse.ArgumentParser(description="benchmark serving")
    parser.add_argument("--repeats", type=int, default=15, help="rounds (default: 15)")
    parser.add_argument("--out", type=Path, default=FOLDER, help="where records lie")
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error("--repeats must be 1 or more")
    torch.set_num_threads(1)
    began = time.perf_counter()
    metrics, tables = flatten({"images a second": Table(measure(options.repeats))})
    for name, metric in metrics.items():
        print(f"  {name:40}{metric['value']:10.4g} (s.e. {metric['se']:.2g})")
    path = write_record(
        "benchmarks/serving",
        metrics,
        command=f"python benchmarks/serving.py --repeats {options.repeats}",
        seed=0,
        data="images of noise, 28x28 pixels, one and 64 a call, on one thread",
        seconds=time.perf_counter() - began,
        folder=options.out,
        tables=tables,
        about="zoo",
        summary=SUMMARY,
    )
    print(f"written to {path}")


if __name__ == "__main__":
    main()
