"""Matrix capsules on MNIST: how often they err, and what their routings do (Hinton et al. 2018)."""

from __future__ import annotations

from itertools import product

import pandas as pd
import torch
from torch import Tensor

from capsule_zoo.data import Dataset, Split, load_dataset, transforms
from capsule_zoo.entries.matrix_capsules import ROUTINGS
from capsule_zoo.experiments import Options, Result, experiment
from capsule_zoo.experiments.findings import mean_and_error
from capsule_zoo.experiments.training import shortened, train, trained
from capsule_zoo.figures.routing import by_iterations, mistakes, votes
from capsule_zoo.inference.evaluation.classification import error_rate
from capsule_zoo.inference.evaluation.vote_history import vote_history
from capsule_zoo.models.modes import in_eval_mode
from capsule_zoo.records import Metrics, Numbers, Table
from capsule_zoo.registry import Entry, create

ITERATIONS = (1, 2, 3, 4, 5)
SHIFT = transforms.Shift(1)  # pixels, of training images


def digits_and_entry(options: Options, minutes: float) -> tuple[Dataset, Entry]:
    """MNIST, and the network that the options name or one trained for so long."""
    data = load_dataset("mnist", root=options.data_root)
    return data, trained("matrix-capsules", data, options, minutes, transform=SHIFT)


@experiment("matrix-capsules/mnist")
def mnist(options: Options) -> Result:
    """The small preset, two iterations of EM, on all of MNIST (an hour)."""
    data, entry = digits_and_entry(options, 60)
    options.say(f"Asking about {len(data.test):,} test images")
    metrics: Metrics = {
        "test_error": error_rate(entry.model, data.test),
        "model_parameters": (float(entry.model.num_parameters), None, 1),
    }
    return Result(metrics, {"": mistakes(entry.model, data.test)}, None, entry)


@experiment("matrix-capsules/votes", data="mnist")
def gathering(options: Options) -> Result:
    """How the votes for the class that wins come together, iteration by iteration (an hour).

    `distance_...` is the mean distance of votes to the class capsule's mean, each weighted by what
    that class has of the child, and `share_winner_...` what the winning class has of all children.
    """
    data, entry = digits_and_entry(options, 60)
    images = data.test.images[:1000]
    history = vote_history(entry.model, images)
    found = {
        "distance_winner": history.mean_distance(history.wins),
        "distance_others": history.mean_distance(~history.wins),
        "share_winner": history.share_of_winner(),
    }
    numbers = {
        name: {str(t): mean_and_error(values) for t, values in enumerate(iterations, start=1)}
        for name, iterations in found.items()
    }
    return Result({"iteration": Table(numbers)}, {"": votes(entry, images)}, None, entry)


NETWORK = dict(features=32, capsules=(4, 8, 8))  # a quarter of the small preset's votes
STEPS = 1200  # for each of fifteen trainings
REFERENCE = ("em", 3)  # whose votes the free energies are of
MEASURES = {
    "error": "error",
    "images_per_second": "images per second",
    "free_energy": "free energy",
}
COMPARED = 500  # images, of the free energies


@experiment("matrix-capsules/routing", data="mnist", role="comparison")
def routings(options: Options) -> Result:
    """EM, variational Bayes and dynamic routing, one to five iterations: error, nats, speed (1 h).

    A small network is trained with each for the same number of updates. Free energies are all of
    the same votes, those for the class capsules of the network with three iterations of EM, at
    each routing's assignments with the Gaussians and switches that fit these best.
    """
    options.refuse_run()
    data = load_dataset("mnist", root=options.data_root)
    found: dict[str, dict[str, Numbers]] = {quantity: {} for quantity in MEASURES}
    errors, speeds = pd.DataFrame(index=ITERATIONS), pd.DataFrame(index=ITERATIONS)
    entries: dict[tuple[str, int], Entry] = {}
    for name, number in product(ROUTINGS, ITERATIONS):
        options.say(f"Training with {number} iterations of {name!r}")
        sizes = dict(image_shape=data.image_shape, routing=name, iterations=number)
        entry = entries[name, number] = create("matrix-capsules", **sizes, **NETWORK)
        limit = shortened(STEPS, (options.minutes or 60) / 60)
        run = train(entry, data, options, steps=limit, transform=SHIFT)
        error = error_rate(entry.model, data.test)
        speed = run.steps * entry.training["batch_size"] / run.seconds
        found["error"].setdefault(name, {})[str(number)] = error
        rate = speed, None, run.steps
        found["images_per_second"].setdefault(name, {})[str(number)] = rate
        errors.loc[number, name], speeds.loc[number, name] = error.value, speed
    reference = entries[REFERENCE]
    energies = free_energies(reference, data.test[:COMPARED])
    for (name, number), energy in energies.items():
        found["free_energy"].setdefault(name, {})[str(number)] = mean_and_error(energy)
    nats = pd.Series({key: energy.mean().item() for key, energy in energies.items()}).unstack(0)
    panels = {"test error": errors, "free energy (nats)": nats, "images per second": speeds}
    table = pd.concat(panels, axis=1)
    metrics = {
        f"{words} after iterations": Table(found[quantity], f"{quantity}_{{quantity}}_{{variant}}")
        for quantity, words in MEASURES.items()
    }
    return Result(metrics, {"": by_iterations(panels)}, table, reference)


@torch.no_grad()
def free_energies(entry: Entry, split: Split) -> dict[tuple[str, int], Tensor]:
    """Of every routing after each iteration, on the votes for an entry's class capsules, (N,)."""
    model = entry.model
    found: dict[tuple[str, int], Tensor] = {}
    with in_eval_mode(model):
        seen, law = model.class_votes(split.images), model.classes.law()
    for name, routing in ROUTINGS.items():
        energies = routing(len(ITERATIONS)).free_energies(seen, law)
        found |= {(name, t): energy for t, energy in zip(ITERATIONS, energies, strict=True)}
    return found
