"""A capsule RBM next to a plain RBM of as many hidden units, in equal updates and in equal time."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from capsule_zoo.data import Binarize
from capsule_zoo.experiments import Options, Result, experiment
from capsule_zoo.experiments.common.energy import binary_mnist, log_likelihoods, probe
from capsule_zoo.experiments.common.findings import by_quantity, mean_and_error, means_of, single
from capsule_zoo.experiments.study import Job, Study
from capsule_zoo.experiments.training import begun, train
from capsule_zoo.inference import Inputs
from capsule_zoo.records import Numbers
from capsule_zoo.registry import Entry, create

MACHINES = {"capsules": "capsule-rbm", "rbm": "rbm"}  # 40 capsules of 16 units, and 640 units
ROUNDS = 3  # in which the machines are timed in turn
TIMED = 100  # updates of a machine in a round
SEEN = 1000  # training images of these updates


@experiment("capsule-rbm/beside-rbm", data="mnist", minutes=25)
def beside_rbm(
    options: Options,
    *,
    updates: int = 20_000,
    temperatures: int = 14_500,
    chains: int = 100,
    seeds: int = 1,
) -> Result:
    """Compare 40 capsules of 16 units with a plain RBM of 640 units (25 core-minutes for a seed).

    Both are trained on MNIST that is binarized again at each visit, with the settings of their
    entries. They take the same number of updates. The faster machine is then trained again from
    the start (`longer`), with as many updates as it takes in the time of the slower one. The rate
    of learning falls to zero at the end of each training.

    `seconds_per_update` is processor time of one thread, from updates that the two machines make
    in turn before the trainings, so that other work on the computer hardly changes it.
    `core_minutes` is this time for all updates.

    `probe` is the accuracy of a linear probe on the means of all 640 hidden units, which are zero
    where a switch is off. `probe_switches` is the accuracy of one on the means of the 40 switches.
    Errors are over images, or over seeds if there are several.

    Args:
        updates: updates of both machines; fewer if fewer minutes are given.
        temperatures: number of temperatures of the annealing.
        chains: number of annealed chains.
        seeds: number of seeds for each machine.
    """
    steps = options.shortened(updates)
    untimed = replace(options, minutes=None)
    options.say("Timing the updates")
    clock = Study({"clock": tuple(MACHINES)}).run(time_updates, untimed)["clock", options.seed]
    seconds = {name: mean_and_error(rounds) for name, rounds in clock.items()}
    lengths = {name: (name, steps) for name in MACHINES}
    lengths |= longer({name: number[0] for name, number in seconds.items()}, steps)
    options.say(f"Training {len(lengths) * seeds} machines")
    task = partial(measure, temperatures=temperatures, chains=chains)
    found = means_of(Study(lengths, seeds).run(task, untimed))
    for name, (machine, number) in lengths.items():
        found[name] |= {
            "updates": single(number),
            "core_minutes": single(number * seconds[machine][0] / 60),
        }
    return Result({**by_quantity(found), "seconds_per_update": seconds})


def time_updates(job: Job[tuple[str, ...]]) -> dict[str, list[float]]:
    """Return processor seconds per update of each machine in each round."""
    options = replace(job.options, runs=None)
    data = binary_mnist(options)
    few = data.train[:SEEN]
    how: dict[str, Any] = dict(steps=TIMED, inputs=Inputs(Binarize()))
    found: dict[str, list[float]] = {name: [] for name in job.variant}
    for _ in range(ROUNDS):
        for name, rounds in found.items():
            entry = create(MACHINES[name], image_shape=data.image_shape)
            began = time.process_time()
            train(entry, few, options, name=name, **how)
            rounds.append((time.process_time() - began) / TIMED)
    return found


def longer(seconds: dict[str, float], updates: int) -> dict[str, tuple[str, int]]:
    """Return the faster machine and the updates that it makes while the slower makes `updates`.

    Args:
        seconds: per update of each machine.

    Returns:
        `<machine>_longer`: the machine and its number of updates.
    """
    faster = min(seconds, key=seconds.__getitem__)
    ratio = max(seconds.values()) / seconds[faster]
    return {f"{faster}_longer": (faster, round(updates * ratio))}


def measure(job: Job[tuple[str, int]], *, temperatures: int, chains: int) -> Numbers:
    """Train a machine for its updates; return its likelihoods and the accuracies of its probes."""
    (machine, updates), options = job.variant, job.options
    data = binary_mnist(options)
    entry = begun(MACHINES[machine], data, options)
    train(entry, data, options, steps=updates, inputs=Inputs(Binarize()))
    found = log_likelihoods(entry, data, options, temperatures, chains)
    found["probe"] = probe(entry, data, hidden_means)[0]
    if entry.model.switched:
        found["probe_switches"] = probe(entry, data)[0]
    return found


@torch.no_grad()
def hidden_means(entry: Entry, images: Tensor) -> np.ndarray:
    """Return the posterior means of switch times unit, (N, hidden units)."""
    found = [entry.guide.expectations(x).activity.flatten(1) for x in images.split(500)]
    return torch.cat(found).numpy()
