"""The Helmholtz machine's experiments (Li and Zhu 2019); see `energy` for the data."""

from __future__ import annotations

from typing import Any

from capsule_zoo.data import Binarize, Dataset
from capsule_zoo.experiments import Options, Result, experiment
from capsule_zoo.experiments.energy import (
    Metrics,
    binary_mnist,
    measured,
    pictures,
    reconstruction_error,
    standard_fashion,
)
from capsule_zoo.experiments.training import train
from capsule_zoo.inference import (
    ReweightedWakeSleep,
    ScoreFunctionELBO,
    WakeSleep,
    compare,
    evaluate,
    summarize,
)
from capsule_zoo.registry import Entry, create

PARTICLES = 1000
WEIGHED = 500  # images


def bounds(entry: Entry, data: Dataset, options: Options) -> Metrics:
    """ELBO and IWAE of the first test images."""
    images = data.test[:WEIGHED]
    settings: dict[str, Any] = dict(num_particles=PARTICLES, seed=options.seed, draws=0)
    found: dict[str, Any] = summarize(evaluate(entry.model, entry.guide, images, **settings))
    return {
        "elbo": (found["elbo"], found["elbo_se"], found["num_images"]),
        f"iwae_{PARTICLES}": (found["iwae"], found["iwae_se"], found["num_images"]),
    }


@experiment("capsule-helmholtz/mnist")
def mnist(options: Options) -> Result:
    """Helmholtz machine, two layers of 40 capsules, by reweighted wake-sleep (90 minutes)."""
    return measured("capsule-helmholtz", options, 90, bounds)


@experiment("capsule-helmholtz/objectives", data="mnist")
def objectives(options: Options) -> Result:
    """One machine under wake-sleep, reweighted wake-sleep and the ELBO, in one table (an hour)."""
    data = binary_mnist(options)
    rows = {
        "wake_sleep": WakeSleep(),
        "reweighted": ReweightedWakeSleep(5),
        "elbo": ScoreFunctionELBO(5),
    }
    pairs: dict[str, tuple] = {}
    for name, objective in rows.items():
        options.say(f"Training under {type(objective).__name__}")
        entry = create("capsule-helmholtz", image_shape=data.image_shape)
        minutes = (options.minutes or 60) / len(rows)
        train(entry, data, options, minutes, objective=objective, transform=Binarize())
        pairs[name] = (entry.model, entry.guide)
    table = compare(pairs, data.test[:WEIGHED], num_particles=200, seed=options.seed)
    metrics: Metrics = {}
    for label, row in table.iterrows():
        number = table.attrs["num_images"]
        metrics[f"elbo_{label}"] = (row["elbo"], row["elbo_se"], number)
        metrics[f"iwae_200_{label}"] = (row["iwae"], row["iwae_se"], number)
    return Result(metrics, {"": table.plot()}, table, entry)


@experiment("capsule-helmholtz/fashion", data="fashion-mnist")
def fashion(options: Options) -> Result:
    """Gaussian pixels and units, two layers of 20 capsules (30 minutes).

    Pixels are standardised; the error is on the scale of the pixels, nats on that of the scores.
    """
    data, standard = standard_fashion(options)
    families = dict(visible_family="gaussian", hidden_family="gaussian")
    entry = create("capsule-helmholtz", image_shape=data.image_shape, capsules=(20, 20), **families)
    train(entry, data, options, options.minutes or 30)
    metrics = {
        "reconstruction_error": reconstruction_error(entry, data.test.images, standard.scale),
        **bounds(entry, data, options),
    }
    return Result(metrics, pictures(entry, data), None, entry)
