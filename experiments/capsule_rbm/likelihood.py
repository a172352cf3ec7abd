"""The capsule RBM's likelihood and reconstruction (Li and Zhu 2019); see `energy` for the data."""

from itertools import pairwise
from typing import Any

import torch
from matplotlib.figure import Figure

from capsule_zoo.data import Dataset, load_dataset
from capsule_zoo.experiments import Options, Result, experiment, train
from capsule_zoo.experiments.common.energy import (
    DRAWN,
    GAUSSIAN,
    load_standard_fashion,
    measure_mnist,
    reconstruction_error,
)
from capsule_zoo.experiments.common.findings import group_by_quantity, pictures
from capsule_zoo.figures.curves import curves_on_log_scale
from capsule_zoo.inference import Pace
from capsule_zoo.records import Numbers, Table
from capsule_zoo.registry import Entry, create
from capsule_zoo.runs import measurements

UPDATES = (10, 30, 100, 200, 500, 1_000, 2_000, 4_000, 8_000, 12_000)
PAPER = {"Li and Zhu (2019)": ((500, 1_000, 12_000), (0.099, 0.085, 0.0718))}
ENTRIES = {"capsules": "capsule-rbm", "rbm": "rbm"}
FASHION: dict[str, dict] = {"capsules": dict(capsules=20, units=16), "rbm": dict(hidden=320)}


ANNEALING = dict(temperatures=14_500, chains=100)


def log_likelihoods(entry: Entry, data: Dataset, options: Options) -> Numbers:
    """Return the mean log p(x) of the test images; see `measurements.log_likelihoods`."""
    images = data.train.images, data.test.images
    arguments: dict[str, Any] = {"seed": options.seed, **ANNEALING}
    likelihoods = measurements.log_likelihoods(entry.model, *images, **arguments)
    return {
        f"log_likelihood_{method}": (nats.value, nats.standard_error, len(data.test))
        for method, nats in likelihoods.items()
    }


@experiment("capsule-rbm/mnist", minutes=30, of_runs=True)
def mnist(options: Options) -> Result:
    """Train 40 capsules of 16 with exact switches, and bracket log p on both sides (30 minutes)."""
    return measure_mnist("capsule-rbm", options, log_likelihoods)


@experiment("capsule-rbm/learning-curve", data="mnist")
def learning_curve(options: Options) -> Result:
    """Measure reconstruction error by updates, on gray pixels as in the paper (some 4 minutes)."""
    data = load_dataset("mnist", root=options.data_root)
    parts = {"train": data.train.images[:10_000], "test": data.test.images}
    errors: dict[str, Numbers] = {}
    for name, of in ENTRIES.items():
        entry = create(of, image_shape=data.image_shape)
        for begin, end in pairwise((0, *UPDATES)):
            arguments: dict[str, Any] = dict(steps=end, pace=Pace("constant"), lr=0.02)
            earlier = f"{name}-{begin}" if begin else None
            train(entry, data, options, name=f"{name}-{end}", after=earlier, **arguments)
            for part, images in parts.items():
                error = reconstruction_error(entry, images)
                errors.setdefault(f"{part}_{name}", {})[str(end)] = error
    lines = {n: (UPDATES, [value for value, *_ in row.values()]) for n, row in errors.items()}
    figure = curves_on_log_scale(lines, "updates", "mean absolute error of a pixel", PAPER)
    table = Table(errors, names="reconstruction_error_{quantity}_{variant}")
    return Result({"error after updates": table}, {"": figure})


@experiment("capsule-rbm/fashion", data="fashion-mnist", minutes=20)
def fashion(options: Options) -> Result:
    """Compare one Gaussian (an RBM) with a mixture of 2^20 Gaussians (20 minutes).

    Pixels are standardized. Errors are on the scale of the pixels, and nats are on the scale of
    the scores.
    """
    data, standard = load_standard_fashion(options)
    families = dict(**GAUSSIAN, objective=dict(centered=False))
    descent: dict[str, Any] = dict(optimizer=torch.optim.Adam, lr=1e-3)  # at .003 SGD diverges
    figures: dict[str, Figure] = {}
    numbers: dict[str, Numbers] = {}
    minutes = options.budget / len(FASHION)
    for name, sizes in FASHION.items():
        entry = create(ENTRIES[name], image_shape=data.image_shape, **families, **sizes)
        train(entry, data, options, minutes, name=name, **descent)
        error = reconstruction_error(entry, data.test.images, standard.scale)
        nats = log_likelihoods(entry, data, options)
        numbers[name] = {"reconstruction_error": error, **nats}
        drawn = pictures(entry, data.test.images[:DRAWN])
        figures |= {f"{name}_{key}": figure for key, figure in drawn.items()}
    return Result(group_by_quantity(numbers), figures)
