"""The Helmholtz machine's experiments (Li and Zhu 2019); see `energy` for the data."""

from __future__ import annotations

from capsule_zoo.data import Binarize, Dataset
from capsule_zoo.experiments import Options, Result, experiment
from capsule_zoo.experiments.energy import (
    DRAWN,
    binary_mnist,
    measured,
    reconstruction_error,
    standard_fashion,
)
from capsule_zoo.experiments.findings import bounds_of_rows, held_out_bounds, pictures
from capsule_zoo.experiments.training import train
from capsule_zoo.inference import ReweightedWakeSleep, ScoreFunctionELBO, WakeSleep, compare
from capsule_zoo.records import Numbers
from capsule_zoo.registry import Entry, create

PARTICLES = 1000
WEIGHED = 500  # images


def bounds(entry: Entry, data: Dataset, options: Options) -> Numbers:
    """ELBO and IWAE of the first test images."""
    return held_out_bounds(entry, data.test[:WEIGHED], PARTICLES, options.seed)


@experiment("capsule-helmholtz/mnist", lead="sums")
def mnist(options: Options) -> Result:
    """Helmholtz machine, two layers of 40 capsules, by reweighted wake-sleep (90 minutes)."""
    return measured("capsule-helmholtz", options, 90, bounds)


@experiment("capsule-helmholtz/objectives", data="mnist", role="comparison")
def objectives(options: Options) -> Result:
    """One machine under wake-sleep, reweighted wake-sleep and the ELBO, in one table (an hour)."""
    options.refuse_run()
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
    return Result(bounds_of_rows(table), {"": table.draw()}, table, entry)


@experiment("capsule-helmholtz/fashion", data="fashion-mnist")
def fashion(options: Options) -> Result:
    """Gaussian pixels and units, two layers of 20 capsules (3 minutes).

    Pixels are standardised; the error is on the scale of the pixels, nats on that of the scores.
    The training is short because a longer one diverges: recognised units have the precision of
    their base law, and cannot follow a posterior that narrows as the pixels' precision grows.
    """
    options.refuse_run()
    data, standard = standard_fashion(options)
    families = dict(visible_family="gaussian", hidden_family="gaussian")
    entry = create("capsule-helmholtz", image_shape=data.image_shape, capsules=(20, 20), **families)
    train(entry, data, options, options.minutes or 3, lr=1e-3)
    metrics = {
        "reconstruction_error": reconstruction_error(entry, data.test.images, standard.scale),
        **bounds(entry, data, options),
    }
    return Result(metrics, pictures(entry, data.test.images[:DRAWN]), None, entry)
