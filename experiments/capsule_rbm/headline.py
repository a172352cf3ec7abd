"""The capsule RBM's experiments (Li and Zhu 2019); see `energy` for the data and the numbers."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pandas as pd
import torch
from matplotlib.figure import Figure

from capsule_zoo.data import Binarize, load_dataset
from capsule_zoo.experiments import Options, Result, experiment
from capsule_zoo.experiments.common.energy import (
    DRAWN,
    binary_mnist,
    log_likelihoods,
    measured,
    probe,
    reconstruction_error,
    spectra,
    standard_fashion,
)
from capsule_zoo.experiments.common.findings import by_quantity, mean_and_error, pictures
from capsule_zoo.experiments.study import divide
from capsule_zoo.experiments.training import train
from capsule_zoo.figures import energy as energy_figures
from capsule_zoo.figures.curves import learning_curves
from capsule_zoo.guides import ExactSwitches, MeanFieldSwitches
from capsule_zoo.inference import Inputs, Pace
from capsule_zoo.records import Numbers, Table
from capsule_zoo.registry import create

UPDATES = (10, 30, 100, 200, 500, 1_000, 2_000, 4_000, 8_000, 12_000)
PAPER = {"Li and Zhu (2019)": ((500, 1_000, 12_000), (0.099, 0.085, 0.0718))}
ENTRIES = {"capsules": "capsule-rbm", "rbm": "rbm", "vae": "vae"}
FASHION: dict[str, dict] = {"capsules": dict(capsules=20, units=16), "rbm": dict(hidden=320)}


@experiment("capsule-rbm/mnist", minutes=30, lead="sums", of_runs=True)
def mnist(options: Options, *, temperatures: int = 14_500, chains: int = 100) -> Result:
    """Train 40 capsules of 16 with exact switches, and bracket log p from both sides (30 minutes).

    Args:
        temperatures: number of temperatures of the annealing.
        chains: number of annealed chains.
    """
    numbers = partial(log_likelihoods, temperatures=temperatures, chains=chains)
    return measured("capsule-rbm", options, numbers)


@experiment("capsule-rbm/learning-curve", data="mnist")
def learning_curve(options: Options, *, updates: tuple[int, ...] = UPDATES) -> Result:
    """Measure reconstruction error by updates, on gray pixels as in the paper (some 4 minutes).

    Args:
        updates: numbers of updates after which the error is measured.
    """
    data = load_dataset("mnist", root=options.data_root)
    parts = {"train": data.train.images[:10_000], "test": data.test.images}
    curves = pd.DataFrame(index=pd.Index(updates, name="updates"))
    errors: dict[str, Numbers] = {}
    for name in ("capsules", "rbm"):
        options.say(f"Training {ENTRIES[name]!r}")
        entry = create(ENTRIES[name], image_shape=data.image_shape)
        for begin, end in pairwise((0, *updates)):
            how: dict[str, Any] = dict(steps=end, pace=Pace("constant"), lr=0.02)
            earlier = f"{name}-{begin}" if begin else None
            train(entry, data, options, name=f"{name}-{end}", after=earlier, **how)
            for part, images in parts.items():
                found = reconstruction_error(entry, images)
                curves.loc[end, f"{name}, {part}"] = found[0]
                errors.setdefault(f"{part}_{name}", {})[str(end)] = found
    figure = learning_curves(curves, "mean absolute error of a pixel", PAPER)
    table = Table(errors, names="reconstruction_error_{quantity}_{variant}")
    return Result({"error after updates": table}, {"": figure}, curves)


@experiment("capsule-rbm/mean-field", data="mnist", minutes=60, role="comparison")
def mean_field(
    options: Options, *, temperatures: int = 14_500, chains: int = 100, images: int = 1000
) -> Result:
    """Compare training with the paper's mean field and with exact switches (an hour).

    Args:
        temperatures: number of temperatures of the annealing.
        chains: number of annealed chains.
        images: number of test images on which the mean field's free energy is compared.
    """
    data = binary_mnist(options)
    found: dict[str, Numbers] = {}
    for name, minutes in divide(options.budget, ("exact", "mean_field")).items():
        entry = create("capsule-rbm", image_shape=data.image_shape).use_guide(name)
        options.say(f"Training with the guide {name!r}")
        train(entry, data, options, minutes, name=name, inputs=Inputs(Binarize()))
        found[name] = log_likelihoods(entry, data, options, temperatures, chains)
        with torch.no_grad():
            few = data.test.images[:images]
            gap = MeanFieldSwitches(entry.model).free_energy(few)
            gap = gap - ExactSwitches(entry.model).free_energy(few)
        found[name]["mean_field_gap"] = mean_and_error(gap)
    return Result(by_quantity(found), {}, None, entry)


@experiment("capsule-rbm/spectra", data="mnist", minutes=30)
def spectra_of_three(options: Options) -> Result:
    """Probe the class in 40 switches, in 640 hidden units and in a VAE's code (30 minutes)."""
    data = binary_mnist(options)
    rows = {}
    found: dict[str, Numbers] = {}
    minutes = divide(options.budget, ENTRIES)
    for name, kind in ENTRIES.items():
        options.say(f"Training {kind!r}")
        sizes = dict(likelihood="bernoulli") if kind == "vae" else {}
        entry = create(kind, image_shape=data.image_shape, **sizes)
        train(entry, data, options, minutes[name], name=name, inputs=Inputs(Binarize()))
        (rows[name],) = spectra(entry, data.test.images).values()
        accuracy, information = probe(entry, data)
        found[name] = {"probe": accuracy, "information": information}
    figure = energy_figures.spectra(rows, data.test.labels.numpy())
    return Result(by_quantity(found), {"": figure})


@experiment("capsule-rbm/fashion", data="fashion-mnist", minutes=20)
def fashion(options: Options, *, temperatures: int = 14_500, chains: int = 100) -> Result:
    """Compare one Gaussian (an RBM) with a mixture of 2^20 Gaussians (20 minutes).

    Pixels are standardized. Errors are on the scale of the pixels, and nats are on the scale of
    the scores.

    Args:
        temperatures: number of temperatures of the annealing.
        chains: number of annealed chains.
    """
    data, standard = standard_fashion(options)
    families = dict(visible_family="gaussian", hidden_family="gaussian", centered=False)
    descent: dict[str, Any] = dict(optimizer=torch.optim.Adam, lr=1e-3)  # at .003 SGD diverges
    figures: dict[str, Figure] = {}
    found: dict[str, Numbers] = {}
    minutes = divide(options.budget, FASHION)
    for name, sizes in FASHION.items():
        options.say(f"Training {ENTRIES[name]!r}")
        entry = create(ENTRIES[name], image_shape=data.image_shape, **families, **sizes)
        train(entry, data, options, minutes[name], name=name, **descent)
        error = reconstruction_error(entry, data.test.images, standard.scale)
        nats = log_likelihoods(entry, data, options, temperatures, chains)
        found[name] = {"reconstruction_error": error, **nats}
        drawn = pictures(entry, data.test.images[:DRAWN])
        figures |= {f"{name}_{key}": figure for key, figure in drawn.items()}
    return Result(by_quantity(found), figures)
