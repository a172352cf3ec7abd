"""Matrix capsules on MNIST: their test error, and a comparison of routings (Hinton et al. 2018)."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from capsule_zoo.data import Dataset, Split, load_dataset, transforms
from capsule_zoo.experiments import Options, Result, experiment
from capsule_zoo.experiments.common.findings import mean_and_error
from capsule_zoo.experiments.training import train, trained
from capsule_zoo.inference import Inputs
from capsule_zoo.inference.evaluation.classification import error_rate
from capsule_zoo.inference.evaluation.vote_history import vote_history
from capsule_zoo.models.common.modes import in_eval_mode
from capsule_zoo.records import Metrics, Numbers, Table
from capsule_zoo.registry import Entry, create
from capsule_zoo.zoo.matrix_capsules.entry import ITERATED
from capsule_zoo.zoo.matrix_capsules.figures import by_iterations, mistakes, votes

SHIFT = transforms.Shift(1)  # pixels, of training images


def digits_and_entry(options: Options) -> tuple[Dataset, Entry]:
    """Return MNIST, and the network that the options name or one trained for their budget."""
    data = load_dataset("mnist", root=options.data_root)
    return data, trained("matrix-capsules", data, options, inputs=Inputs(SHIFT))


@experiment("matrix-capsules/mnist", minutes=60, of_runs=True)
def mnist(options: Options) -> Result:
    """Train the small preset, two iterations of EM, and measure its test error (an hour)."""
    data, entry = digits_and_entry(options)
    options.say(f"Testing on {len(data.test):,} images")
    metrics: Metrics = {
        "test_error": error_rate(entry.model, entry.guide, data.test),
        "model_parameters": (float(entry.model.num_parameters), None, 1),
    }
    return Result(metrics, {"": mistakes(entry.model, data.test)}, None, entry)


@experiment("matrix-capsules/votes", data="mnist", minutes=60, of_runs=True)
def gathering(options: Options, *, images: int = 1000) -> Result:
    """Follow the votes for the winning class from iteration to iteration (an hour).

    `distance_...` is the mean distance of votes to the mean of the class capsule, each vote
    weighted by the class's responsibility for the child. `share_winner_...` is the share of the
    children that the winning class is responsible for.

    Args:
        images: number of test images.
    """
    data, entry = digits_and_entry(options)
    few = data.test.images[:images]
    history = vote_history(entry.model, few)
    found = {
        "distance_winner": history.mean_distance(history.wins),
        "distance_others": history.mean_distance(~history.wins),
        "share_winner": history.share_of_winner(),
    }
    numbers = {
        name: {str(t): mean_and_error(values) for t, values in enumerate(iterations, start=1)}
        for name, iterations in found.items()
    }
    return Result({"iteration": Table(numbers)}, {"": votes(entry, few)}, None, entry)


NETWORK: Mapping[str, Any] = dict(features=32, capsules=(4, 8, 8))  # a quarter of the small votes
MEASURES = {
    "error": "error",
    "images_per_second": "images per second",
    "free_energy": "free energy",
}


@experiment("matrix-capsules/routing", data="mnist", minutes=60, role="comparison")
def routings(
    options: Options,
    *,
    iterations: int = 5,
    steps: int = 1200,
    compared: int = 500,
    reference: int = 3,
    network: Mapping[str, Any] = NETWORK,
) -> Result:
    """Compare EM, variational Bayes and dynamic routing after one to five iterations (an hour).

    A small network is trained with each for the same number of updates. Free energies are all of
    the same votes: the votes for the class capsules of the network with three iterations of EM. The
    assignments are those of each routing, and the Gaussians and switches fit them best.

    Args:
        iterations: highest number of iterations; there is a training run for each number.
        steps: updates of every run in a full run of an hour; fewer minutes give fewer updates.
        compared: number of test images of the free energies.
        reference: iterations of EM in the network whose votes have the free energies.
        network: sizes of the network.
    """
    data = load_dataset("mnist", root=options.data_root)
    found: dict[str, dict[str, Numbers]] = {quantity: {} for quantity in MEASURES}
    numbers = range(1, iterations + 1)
    errors, speeds = pd.DataFrame(index=numbers), pd.DataFrame(index=numbers)
    entries: dict[tuple[str, int], Entry] = {}
    for name, number in product(ITERATED, numbers):
        options.say(f"Training with {number} iterations of {name!r}")
        sizes = dict(image_shape=data.image_shape, routing=name, iterations=number)
        entry = entries[name, number] = create("matrix-capsules", **sizes, **network)
        how: dict[str, Any] = dict(steps=options.shortened(steps), inputs=Inputs(SHIFT))
        run = train(entry, data, options, name=f"{name}-{number}", **how)
        error = error_rate(entry.model, entry.guide, data.test)
        speed = run.steps * entry.training["batch_size"] / run.seconds
        found["error"].setdefault(name, {})[str(number)] = error
        rate = speed, None, run.steps
        found["images_per_second"].setdefault(name, {})[str(number)] = rate
        errors.loc[number, name], speeds.loc[number, name] = error.value, speed
    judge = entries["em", reference]
    energies = free_energies(judge, data.test[:compared], iterations)
    for (name, number), energy in energies.items():
        found["free_energy"].setdefault(name, {})[str(number)] = mean_and_error(energy)
    nats = pd.Series({key: energy.mean().item() for key, energy in energies.items()}).unstack(0)
    panels = {"test error": errors, "free energy (nats)": nats, "images per second": speeds}
    table = pd.concat(panels, axis=1)
    metrics = {
        f"{words} after iterations": Table(found[quantity], f"{quantity}_{{quantity}}_{{variant}}")
        for quantity, words in MEASURES.items()
    }
    return Result(metrics, {"": by_iterations(panels)}, table, judge)


@torch.no_grad()
def free_energies(entry: Entry, split: Split, iterations: int) -> dict[tuple[str, int], Tensor]:
    """Return the free energies (N,) of every routing after each iteration.

    They are free energies of the votes for the class capsules of an entry.
    """
    model = entry.model
    found: dict[tuple[str, int], Tensor] = {}
    with in_eval_mode(model):
        seen, law = model.class_votes(split.images)
    for name, routing in ITERATED.items():
        energies = routing(iterations).free_energies(seen, law)
        found |= {(name, t): energy for t, energy in enumerate(energies, start=1)}
    return found
