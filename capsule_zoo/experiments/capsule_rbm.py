"""The capsule RBM's experiments (Li and Zhu 2019); see `energy` for the data and the numbers."""

from __future__ import annotations

import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from matplotlib.figure import Figure

from capsule_zoo.data import Binarize, load_dataset
from capsule_zoo.experiments import Metrics, Options, Result, experiment
from capsule_zoo.experiments.energy import (
    DRAWN,
    binary_mnist,
    log_likelihoods,
    measured,
    probe,
    reconstruction_error,
    spectra,
    standard_fashion,
)
from capsule_zoo.experiments.findings import mean_and_error, pictures
from capsule_zoo.experiments.training import train
from capsule_zoo.figures import energy as energy_figures
from capsule_zoo.figures.curves import learning_curves
from capsule_zoo.guides import ExactSwitches, MeanFieldSwitches
from capsule_zoo.registry import create

UPDATES = (0, 10, 30, 100, 200, 500, 1_000, 2_000, 4_000, 8_000, 12_000)
PAPER = {"Li and Zhu (2019)": ((500, 1_000, 12_000), (0.099, 0.085, 0.0718))}
ENTRIES = {"capsules": "capsule-rbm", "rbm": "rbm", "vae": "vae"}
FASHION: dict[str, dict] = {"capsules": dict(capsules=20, units=16), "rbm": dict(hidden=320)}


@experiment("capsule-rbm/mnist")
def mnist(options: Options) -> Result:
    """Capsule RBM, 40 capsules of 16, with exact switches: nats from both sides (30 minutes)."""
    return measured("capsule-rbm", options, 30, log_likelihoods)


@experiment("capsule-rbm/learning-curve", data="mnist")
def learning_curve(options: Options) -> Result:
    """Reconstruction error by updates, on grey pixels as in the paper (some 4 minutes)."""
    options.refuse_run()
    data = load_dataset("mnist", root=options.data_root)
    parts = {"train": data.train.images[:10_000], "test": data.test.images}
    curves, metrics = pd.DataFrame(index=pd.Index(UPDATES[1:], name="updates")), Metrics()
    for name in ("capsules", "rbm"):
        options.say(f"Training {ENTRIES[name]!r}")
        entry = create(ENTRIES[name], image_shape=data.image_shape)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "run.safetensors"
            for begin, end in pairwise(UPDATES):
                resume = path if begin else None
                settings: dict[str, Any] = dict(
                    steps=end, schedule="constant", lr=0.02, checkpoint=path
                )
                train(entry, data, options, resume=resume, **settings)
                for part, images in parts.items():
                    found = reconstruction_error(entry, images)
                    curves.loc[end, f"{name}, {part}"] = found[0]
                    metrics[f"reconstruction_error_{part}_{name}_{end}"] = found
    figure = learning_curves(curves, "mean absolute error of a pixel", PAPER)
    return Result(metrics, {"": figure}, curves)


@experiment("capsule-rbm/mean-field", data="mnist")
def mean_field(options: Options) -> Result:
    """What the paper's mean field costs: the same machine trained by it and exactly (an hour)."""
    options.refuse_run()
    data = binary_mnist(options)
    metrics: Metrics = {}
    for name in ("exact", "mean_field"):
        entry = create("capsule-rbm", image_shape=data.image_shape).use_guide(name)
        options.say(f"Training with the guide {name!r}")
        train(entry, data, options, (options.minutes or 60) / 2, transform=Binarize())
        for metric, value in log_likelihoods(entry, data, options).items():
            metrics[f"{metric}_{name}"] = value
        with torch.no_grad():
            images = data.test.images[:1000]
            gap = MeanFieldSwitches(entry.model).free_energy(images)
            gap = gap - ExactSwitches(entry.model).free_energy(images)
        metrics[f"mean_field_gap_{name}"] = mean_and_error(gap)
    return Result(metrics, {}, None, entry)


@experiment("capsule-rbm/spectra", data="mnist")
def spectra_of_three(options: Options) -> Result:
    """What 40 switches tell of a digit, beside 640 hidden units and a VAE's code (30 minutes)."""
    options.refuse_run()
    data = binary_mnist(options)
    rows, metrics = {}, Metrics()
    for name, kind in ENTRIES.items():
        options.say(f"Training {kind!r}")
        sizes = dict(likelihood="bernoulli") if kind == "vae" else {}
        entry = create(kind, image_shape=data.image_shape, **sizes)
        minutes = (options.minutes or 30) / len(ENTRIES)
        train(entry, data, options, minutes, transform=Binarize())
        (rows[name],) = spectra(entry, data.test.images).values()
        metrics[f"probe_{name}"], metrics[f"information_{name}"] = probe(entry, data)
    figure = energy_figures.spectra(rows, data.test.labels.numpy())
    return Result(metrics, {"": figure})


@experiment("capsule-rbm/fashion", data="fashion-mnist")
def fashion(options: Options) -> Result:
    """Gaussian pixels and units: one Gaussian (RBM) beside a mixture of 2^20 (20 minutes).

    Pixels are standardised; errors are on the scale of the pixels, nats on that of the scores.
    """
    options.refuse_run()
    data, standard = standard_fashion(options)
    families = dict(visible_family="gaussian", hidden_family="gaussian", centered=False)
    descent: dict[str, Any] = dict(optimizer=torch.optim.Adam, lr=1e-3)  # at .003 SGD diverges
    figures: dict[str, Figure] = {}
    metrics = Metrics()
    for name, sizes in FASHION.items():
        options.say(f"Training {ENTRIES[name]!r}")
        entry = create(ENTRIES[name], image_shape=data.image_shape, **families, **sizes)
        train(entry, data, options, (options.minutes or 20) / 2, **descent)
        error = reconstruction_error(entry, data.test.images, standard.scale)
        metrics[f"reconstruction_error_{name}"] = error
        for metric, value in log_likelihoods(entry, data, options).items():
            metrics[f"{metric}_{name}"] = value
        drawn = pictures(entry, data.test.images[:DRAWN])
        figures |= {f"{name}_{key}": figure for key, figure in drawn.items()}
    return Result(metrics, figures)
