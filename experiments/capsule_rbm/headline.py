"""The capsule RBM's experiments (Li and Zhu 2019); see `energy` for the data and the numbers.

`beside-rbm` compares it with a plain RBM of as many hidden units, in equal updates and equal time.
"""

import time
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from capsule_zoo.data import Binarize, Dataset, load_dataset
from capsule_zoo.experiments import Job, Options, Result, Study, begun, experiment, in_turn, train
from capsule_zoo.experiments.common.energy import (
    DRAWN,
    binary_mnist,
    measured,
    probe,
    reconstruction_error,
    spectra,
    standard_fashion,
)
from capsule_zoo.experiments.common.findings import (
    by_quantity,
    mean_and_error,
    means_of,
    pictures,
    single,
)
from capsule_zoo.figures import energy as energy_figures
from capsule_zoo.figures.curves import curves_on_log_scale
from capsule_zoo.guides import ExactSwitches, MeanFieldSwitches
from capsule_zoo.inference import Inputs, Pace
from capsule_zoo.records import Numbers, Table
from capsule_zoo.registry import Entry, create
from capsule_zoo.runs import measurements

UPDATES = (10, 30, 100, 200, 500, 1_000, 2_000, 4_000, 8_000, 12_000)
PAPER = {"Li and Zhu (2019)": ((500, 1_000, 12_000), (0.099, 0.085, 0.0718))}
LAWS = MeanFieldSwitches, ExactSwitches  # of the switches, given an image
ENTRIES = {"capsules": "capsule-rbm", "rbm": "rbm", "vae": "vae"}
FASHION: dict[str, dict] = {"capsules": dict(capsules=20, units=16), "rbm": dict(hidden=320)}


@dataclass(frozen=True)
class Annealing:
    """The settings of log likelihoods.

    Args:
        temperatures: number of temperatures of the annealing.
        chains: number of annealed chains.
    """

    temperatures: int = 14_500
    chains: int = 100

    def log_likelihoods(self, entry: Entry, data: Dataset, options: Options) -> Numbers:
        """Return the mean log p(x) of the test images, see `measurements.log_likelihoods`."""
        found = measurements.log_likelihoods(
            entry.model,
            data.train.images,
            data.test.images,
            chains=self.chains,
            temperatures=self.temperatures,
            seed=options.seed,
        )
        return {
            f"log_likelihood_{method}": (nats.value, nats.standard_error, len(data.test))
            for method, nats in found.items()
        }


@experiment("capsule-rbm/mnist", minutes=30, of_runs=True)
def mnist(options: Options, chosen: Annealing) -> Result:
    """Train 40 capsules of 16 with exact switches, and bracket log p on both sides (30 minutes)."""
    return measured("capsule-rbm", options, chosen.log_likelihoods)


@experiment("capsule-rbm/learning-curve", data="mnist")
def learning_curve(options: Options, *, updates: tuple[int, ...] = UPDATES) -> Result:
    """Measure reconstruction error by updates, on gray pixels as in the paper (some 4 minutes).

    Args:
        updates: numbers of updates after which the error is measured.
    """
    data = load_dataset("mnist", root=options.data_root)
    parts = {"train": data.train.images[:10_000], "test": data.test.images}
    errors: dict[str, Numbers] = {}
    for name in ("capsules", "rbm"):
        entry = create(ENTRIES[name], image_shape=data.image_shape)
        for begin, end in pairwise((0, *updates)):
            how: dict[str, Any] = dict(steps=end, pace=Pace("constant"), lr=0.02)
            earlier = f"{name}-{begin}" if begin else None
            train(entry, data, options, name=f"{name}-{end}", after=earlier, **how)
            for part, images in parts.items():
                error = reconstruction_error(entry, images)
                errors.setdefault(f"{part}_{name}", {})[str(end)] = error
    lines = {n: (updates, [value for value, *_ in row.values()]) for n, row in errors.items()}
    figure = curves_on_log_scale(lines, "updates", "mean absolute error of a pixel", PAPER)
    table = Table(errors, names="reconstruction_error_{quantity}_{variant}")
    return Result({"error after updates": table}, {"": figure})


@dataclass(frozen=True)
class MeanField(Annealing):
    """The settings of the comparison with the mean field: `Annealing`, and test images.

    Args:
        images: number of test images on which the mean field's free energy is compared.
    """

    images: int = 1000


@experiment("capsule-rbm/mean-field", data="mnist", minutes=60)
def mean_field(options: Options, chosen: MeanField) -> Result:
    """Compare training with the paper's mean field and with exact switches (an hour)."""
    data = binary_mnist(options)
    found: dict[str, Numbers] = {}
    for name, _, minutes in in_turn(options, dict.fromkeys(("exact", "mean_field"))):
        entry = create("capsule-rbm", image_shape=data.image_shape).use_guide(name)
        train(entry, data, options, minutes, name=name, inputs=Inputs(Binarize()))
        found[name] = chosen.log_likelihoods(entry, data, options)
        with torch.no_grad():
            few = data.test.images[: chosen.images]
            mean, exact = (guide(entry.model).free_energy(few) for guide in LAWS)
        found[name]["mean_field_gap"] = mean_and_error(mean - exact)
    return Result(by_quantity(found), {}, None, entry)


@experiment("capsule-rbm/spectra", data="mnist", minutes=30)
def spectra_of_three(options: Options) -> Result:
    """Probe the class in 40 switches, in 640 hidden units and in a VAE's code (30 minutes)."""
    data = binary_mnist(options)
    rows = {}
    found: dict[str, Numbers] = {}
    for name, kind, minutes in in_turn(options, ENTRIES):
        sizes = dict(likelihood="bernoulli") if kind == "vae" else {}
        entry = create(kind, image_shape=data.image_shape, **sizes)
        train(entry, data, options, minutes, name=name, inputs=Inputs(Binarize()))
        (rows[name],) = spectra(entry, data.test.images).values()
        accuracy, information = probe(entry, data)
        found[name] = {"probe": accuracy, "information": information}
    figure = energy_figures.spectra(rows, data.test.labels.numpy())
    return Result(by_quantity(found), {"": figure})


@experiment("capsule-rbm/fashion", data="fashion-mnist", minutes=20)
def fashion(options: Options, chosen: Annealing) -> Result:
    """Compare one Gaussian (an RBM) with a mixture of 2^20 Gaussians (20 minutes).

    Pixels are standardized. Errors are on the scale of the pixels, and nats are on the scale of
    the scores.
    """
    data, standard = standard_fashion(options)
    families = dict(visible_family="gaussian", hidden_family="gaussian", centered=False)
    descent: dict[str, Any] = dict(optimizer=torch.optim.Adam, lr=1e-3)  # at .003 SGD diverges
    figures: dict[str, Figure] = {}
    found: dict[str, Numbers] = {}
    for name, sizes, minutes in in_turn(options, FASHION):
        entry = create(ENTRIES[name], image_shape=data.image_shape, **families, **sizes)
        train(entry, data, options, minutes, name=name, **descent)
        error = reconstruction_error(entry, data.test.images, standard.scale)
        nats = chosen.log_likelihoods(entry, data, options)
        found[name] = {"reconstruction_error": error, **nats}
        drawn = pictures(entry, data.test.images[:DRAWN])
        figures |= {f"{name}_{key}": figure for key, figure in drawn.items()}
    return Result(by_quantity(found), figures)


MACHINES = {"capsules": "capsule-rbm", "rbm": "rbm"}  # 40 capsules of 16 units, and 640 units
ROUNDS = 3  # in which the machines are timed in turn
TIMED = 100  # updates of a machine in a round
SEEN = 1000  # training images of these updates


@dataclass(frozen=True)
class Beside(Annealing):
    """The settings of the comparison of machines: `Annealing`, and the trainings.

    Args:
        updates: updates of both machines; fewer if fewer minutes are given.
        seeds: number of seeds for each machine.
    """

    updates: int = 20_000
    seeds: int = 1


@experiment("capsule-rbm/beside-rbm", data="mnist", minutes=25)
def beside_rbm(options: Options, chosen: Beside) -> Result:
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
    """
    steps = options.shortened(chosen.updates)
    untimed = replace(options, minutes=None)
    clock = Study({"clock": tuple(MACHINES)}).run(time_updates, untimed)["clock"][0]
    seconds = {name: mean_and_error(rounds) for name, rounds in clock.items()}
    lengths = {name: (name, steps) for name in MACHINES}
    lengths |= longer({name: number[0] for name, number in seconds.items()}, steps)
    found = means_of(Study(lengths, chosen.seeds).run(measure, untimed, chosen=chosen))
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


def measure(job: Job[tuple[str, int]], *, chosen: Beside) -> Numbers:
    """Train a machine for its updates; return its likelihoods and the accuracies of its probes."""
    (machine, updates), options = job.variant, job.options
    data = binary_mnist(options)
    entry = begun(MACHINES[machine], data, options)
    train(entry, data, options, steps=updates, inputs=Inputs(Binarize()))
    found = chosen.log_likelihoods(entry, data, options)
    found["probe"] = probe(entry, data, hidden_means)[0]
    if entry.model.switched:
        found["probe_switches"] = probe(entry, data)[0]
    return found


@torch.no_grad()
def hidden_means(entry: Entry, images: Tensor) -> np.ndarray:
    """Return the posterior means of switch times unit, (N, hidden units)."""
    found = [entry.guide.expectations(x).activity.flatten(1) for x in images.split(500)]
    return torch.cat(found).numpy()
