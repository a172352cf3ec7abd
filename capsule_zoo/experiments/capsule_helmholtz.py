"""The Helmholtz machine's experiments (Li and Zhu 2019); see `energy` for the data."""

from __future__ import annotations

from functools import partial
from typing import Any

from capsule_zoo.data import Binarize, Dataset
from capsule_zoo.experiments import Options, Result, experiment
from capsule_zoo.experiments.energy import (
    DRAWN,
    binary_mnist,
    measured,
    pixel_error,
    reconstruction_error,
    spectra,
    standard_fashion,
    use_of_switches,
)
from capsule_zoo.experiments.findings import bounds_of_rows, held_out_bounds, pictures
from capsule_zoo.experiments.study import divide
from capsule_zoo.experiments.training import train
from capsule_zoo.figures import energy as energy_figures
from capsule_zoo.inference import ReweightedWakeSleep, ScoreFunctionELBO, WakeSleep, compare
from capsule_zoo.records import Numbers
from capsule_zoo.registry import Entry, create


def bounds(
    entry: Entry,
    data: Dataset,
    options: Options,
    *,
    images: int,
    particles: int,
    scale: float = 1.0,
) -> Numbers:
    """Return the error through all layers, and ELBO and IWAE of the first test images."""
    return {
        "reconstruction_error_top": pixel_error(entry.guide.reconstruct, data.test.images, scale),
        **held_out_bounds(entry, data.test[:images], particles, options.seed),
    }


@experiment("capsule-helmholtz/mnist", minutes=90, lead="sums")
def mnist(options: Options, *, images: int = 500, particles: int = 1000) -> Result:
    """Train two layers of 40 capsules by reweighted wake-sleep and bound log p (90 minutes).

    Args:
        images: number of test images of the bounds.
        particles: number of draws of the IWAE bound.
    """
    numbers = partial(bounds, images=images, particles=particles)
    return measured("capsule-helmholtz", options, numbers)


@experiment("capsule-helmholtz/objectives", data="mnist", minutes=60, role="comparison")
def objectives(options: Options, *, images: int = 500, particles: int = 200) -> Result:
    """Compare wake-sleep, reweighted wake-sleep and the ELBO on one machine (an hour).

    Args:
        images: number of test images of the bounds.
        particles: number of draws of the IWAE bound.
    """
    options.refuse_run()
    data = binary_mnist(options)
    rows = {
        "wake_sleep": WakeSleep(),
        "reweighted": ReweightedWakeSleep(5),
        "elbo": ScoreFunctionELBO(5),
    }
    minutes = divide(options.budget, rows)
    pairs: dict[str, tuple] = {}
    for name, objective in rows.items():
        options.say(f"Training under {type(objective).__name__}")
        entry = create("capsule-helmholtz", image_shape=data.image_shape)
        how: dict[str, Any] = dict(objective=objective, transform=Binarize())
        train(entry, data, options, minutes[name], name=name, **how)
        pairs[name] = (entry.model, entry.guide)
    table = compare(pairs, data.test[:images], num_particles=particles, seed=options.seed)
    return Result(bounds_of_rows(table), {"": table.draw()}, table, entry)


@experiment("capsule-helmholtz/fashion", data="fashion-mnist", minutes=3)
def fashion(options: Options, *, images: int = 500, particles: int = 1000) -> Result:
    """Train two layers of 20 capsules with Gaussian pixels and units (3 minutes).

    Pixels are standardized. The error is on the scale of the pixels, and nats are on the scale of
    the scores. The training is short because a longer one diverges: recognized units have the
    precision of their base law, and cannot follow a posterior that narrows as the precision of the
    pixels grows.

    Args:
        images: number of test images of the bounds.
        particles: number of draws of the IWAE bound.
    """
    options.refuse_run()
    data, standard = standard_fashion(options)
    families = dict(visible_family="gaussian", hidden_family="gaussian")
    entry = create("capsule-helmholtz", image_shape=data.image_shape, capsules=(20, 20), **families)
    train(entry, data, options, options.budget, name="trained", lr=1e-3)
    how: dict[str, Any] = dict(images=images, particles=particles, scale=standard.scale)
    metrics = {
        "reconstruction_error": reconstruction_error(entry, data.test.images, standard.scale),
        **bounds(entry, data, options, **how),
    }
    found, labels = spectra(entry, data.test.images), data.test.labels.numpy()
    figures = {
        "spectra": energy_figures.spectra(found, labels),
        **pictures(entry, data.test.images[:DRAWN]),
    }
    return Result({**metrics, "switches": use_of_switches(found)}, figures, None, entry)
