"""Time the throughput of one process: images a second of processor time, by weights and verb.

    python benchmarks/serving.py

Every verb answers one image a call, as a server without a queue does, and 64 images a call, on one
thread. All calls alternate, so that a machine that slows down affects all of them. The headlines
are `one_a_call_<weights>_<verb>` and `64_a_call_...`, medians over rounds.
"""

from collections.abc import Callable

import torch
from harness import Contestant, interleave, median, processor_time, run

from capsule_zoo import load
from capsule_zoo.inference import classify, encode, reconstruct
from capsule_zoo.records import Number, Numbers, Table

CALLS = {"one_a_call": 1, "64_a_call": 64}  # images
VERBS: dict[str, tuple[Callable, ...]] = {
    "part-whole-mnist": (encode, reconstruct),
    "shape-codes-mnist": (encode, reconstruct),
    "capsule-network-mnist": (encode, reconstruct, classify),
    "matrix-capsules-mnist": (classify,),
}
SUMMARY = __doc__.partition("\n")[0]


def make_timer(verb: Callable, weights: str, number: int) -> Contestant:
    """Return a function that calls a verb on noise and returns its processor time in seconds."""
    entry = load(weights)
    images = torch.rand(number, *entry.model.image_shape)
    return processor_time(lambda: verb(entry.model, entry.guide, images))


def measure(rounds: int) -> dict[str, Numbers]:
    """Return images a second, by number of images a call, then by weights and verb."""
    made = {
        f"{kind} {weights.removesuffix('-mnist').replace('-', '_')}_{verb.__name__}": make_timer(
            verb, weights, number
        )
        for weights, verbs in VERBS.items()
        for verb in verbs
        for kind, number in CALLS.items()
    }
    speeds: dict[str, dict[str, Number]] = {kind: {} for kind in CALLS}
    for name, seconds in interleave(made, rounds).items():
        kind, served = name.split()
        speeds[kind][served] = median(CALLS[kind] / seconds)
    return {**speeds}


def record_table(rounds: int) -> dict[str, Table]:
    """Return the measured speeds as the table of the record."""
    return {"images a second": Table(measure(rounds))}


if __name__ == "__main__":
    data = "images of noise, 28x28 pixels, one and 64 a call, on one thread"
    run("serving", SUMMARY, record_table, data)
