"""Time classifiers with capsules, compared with equal networks without: milliseconds an image.

    python benchmarks/equal_network.py

An equal network has the stem and the number of weights of the classifier. Every network classifies
one image a call and 128 images a call, on one thread, by processor time. All calls alternate, so
that a machine that slows down affects all of them. Weights are untrained: they do not change the
work. The headlines are medians over rounds, and ratios within each round.
"""

import torch
from harness import Contestant, interleave, median, processor_time, run

from capsule_zoo.inference import classify
from capsule_zoo.records import Numbers, Table
from capsule_zoo.registry import Entry, create

CALLS = {"one_a_call": 1, "128_a_call": 128}  # images
FAMILIES = ("capsule-network", "matrix-capsules")
SUMMARY = __doc__.partition("\n")[0]


def entries() -> dict[str, Entry]:
    """Return each classifier and its equal network without capsules, in their small presets."""
    networks = {}
    for family in FAMILIES:
        name = family.replace("-", "_")
        networks[name] = create(family)
        networks[f"{name}_equal"] = create("cnn", preset=family)
    return networks


def make_timer(entry: Entry, number: int) -> Contestant:
    """Return a function that classifies noise and returns its processor time in seconds."""
    images = torch.rand(number, *entry.model.image_shape)
    return processor_time(lambda: classify(entry.model, entry.guide, images, batch_size=number))


def measure(rounds: int) -> dict[str, Numbers]:
    """Return milliseconds an image by call and network, and ratios to the equal network's time."""
    made = entries()
    calls = {
        f"{kind} {name}": make_timer(entry, number)
        for kind, number in CALLS.items()
        for name, entry in made.items()
    }
    seconds = interleave(calls, rounds)
    table: dict[str, Numbers] = {}
    for kind, number in CALLS.items():
        network_seconds = {name: seconds[f"{kind} {name}"] for name in made}
        table[kind] = {
            name: median(1000 * taken / number) for name, taken in network_seconds.items()
        }
        table[f"times_equal_{kind}"] = {
            name: median(taken / network_seconds[f"{name}_equal"])
            for name, taken in network_seconds.items()
            if not name.endswith("_equal")
        }
    return table


def record_table(rounds: int) -> dict[str, Table]:
    """Return the measured times as the table of the record."""
    return {"milliseconds an image": Table(measure(rounds))}


if __name__ == "__main__":
    data = "images of noise, 28x28 pixels, one and 128 a call, on one thread"
    run("equal_network", SUMMARY, record_table, data)
