"""The Helmholtz machine's experiments (Li and Zhu 2019); see `energy` for the data."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from capsule_zoo.data import Binarize, Dataset, load_dataset
from capsule_zoo.experiments import Options, Result, experiment
from capsule_zoo.experiments.common.energy import (
    DRAWN,
    binary_mnist,
    measured,
    pixel_error,
    reconstruction_error,
    spectra,
    standard_fashion,
    use_of_switches,
)
from capsule_zoo.experiments.common.findings import (
    bounds_of_rows,
    by_quantity,
    held_out_bounds,
    mean_and_error,
    pictures,
)
from capsule_zoo.experiments.study import divide
from capsule_zoo.experiments.training import train
from capsule_zoo.figures import energy as energy_figures
from capsule_zoo.figures.curves import losses_in_time
from capsule_zoo.inference import (
    Checks,
    Inputs,
    ReweightedWakeSleep,
    ScoreFunctionELBO,
    WakeSleep,
    compare,
    pretrain,
)
from capsule_zoo.records import Metrics, Numbers
from capsule_zoo.registry import Entry, create, load

PRETRAINED = 0.1  # share of the minutes in which layers are pre-trained


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


def after_pretraining(options: Options, minutes: float, share: float) -> dict[str, Any]:
    """Return arguments of `train` with which layers are pre-trained as RBMs, one after the other.

    Args:
        minutes: length of the whole training.
        share: share of the minutes for the pre-training, divided equally among the layers.
    """

    def start(entry: Entry, images: Tensor) -> None:
        options.say("Pre-training every layer as a capsule RBM")
        each = share * minutes / len(entry.model.layers)
        how: dict[str, Any] = dict(seed=options.seed, checks=Checks(progress=options.progress))
        pretrain(entry.model, entry.guide, images, minutes=each, inputs=Inputs(Binarize()), **how)

    return dict(start=start, minutes=(1 - share) * minutes)


@experiment("capsule-helmholtz/mnist", minutes=60, lead="sums", of_runs=True)
def mnist(
    options: Options, *, images: int = 500, particles: int = 1000, share: float = PRETRAINED
) -> Result:
    """Pre-train two layers of 40 capsules, train them by wake-sleep and bound log p (an hour).

    Args:
        images: number of test images of the bounds.
        particles: number of draws of the IWAE bound.
        share: share of the time in which layers are pre-trained as capsule RBMs.
    """
    numbers = partial(bounds, images=images, particles=particles)
    how = after_pretraining(options, options.budget, share)
    return measured("capsule-helmholtz", options, numbers, **how)


@experiment("capsule-helmholtz/pretraining", data="mnist", minutes=30)
def pretraining(
    options: Options, *, images: int = 500, particles: int = 200, share: float = PRETRAINED
) -> Result:
    """Compare training with and without pre-training, at equal minutes (half an hour).

    The figure shows the loss on held-out images during training. The minutes of a run include its
    pre-training.

    Args:
        images: number of test images of the bounds.
        particles: number of draws of the IWAE bound.
        share: share of the time in which layers are pre-trained as capsule RBMs.
    """
    data = binary_mnist(options)
    found: dict[str, Numbers] = {}
    curves: dict[str, tuple[list[float], list[float]]] = {}
    for name, minutes in divide(options.budget, ("random_start", "pretrained")).items():
        options.say(f"Training: {name}")
        entry = create("capsule-helmholtz", image_shape=data.image_shape)
        how: dict[str, Any] = dict(minutes=minutes)
        if name == "pretrained":
            how = after_pretraining(options, minutes, share)
        run = train(entry, data, options, name=name, inputs=Inputs(Binarize()), **how)
        silent = use_of_switches(spectra(entry, data.test.images)).numbers["silent"]
        found[name] = {
            **held_out_bounds(entry, data.test[:images], particles, options.seed),
            **{f"{site}_silent": number for site, number in silent.items()},
        }
        checks = run.history.dropna(subset="held_out")
        spent = minutes - how["minutes"]
        passed = spent + checks["seconds"] / 60
        curves[name] = (passed.tolist(), checks["held_out"].tolist())
    return Result(by_quantity(found), {"": losses_in_time(curves)}, None, entry)


@experiment("capsule-helmholtz/objectives", data="mnist", minutes=60, role="comparison")
def objectives(
    options: Options, *, images: int = 500, particles: int = 200, share: float | None = None
) -> Result:
    """Compare wake-sleep, reweighted wake-sleep and the ELBO on one machine (an hour).

    Args:
        images: number of test images of the bounds.
        particles: number of draws of the IWAE bound.
        share: share of the time in which layers are pre-trained as capsule RBMs; none by default.
    """
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
        how: dict[str, Any] = dict(minutes=minutes[name])
        if share is not None:
            how = after_pretraining(options, minutes[name], share)
        train(
            entry, data, options, name=name, objective=objective, inputs=Inputs(Binarize()), **how
        )
        pairs[name] = (entry.model, entry.guide)
    table = compare(pairs, data.test[:images], num_particles=particles, seed=options.seed)
    return Result(bounds_of_rows(table), {"": table.draw()}, table, entry)


@experiment("capsule-helmholtz/fashion", data="fashion-mnist", minutes=3)
def fashion(options: Options, *, images: int = 500, particles: int = 1000) -> Result:
    """Train two layers of 20 capsules with Gaussian pixels and units (3 minutes).

    Pixels are standardized. The error is on the scale of the pixels, and nats are on the scale of
    the scores. The training is short because the gap between ELBO and IWAE grows with the precision
    of the pixels.

    Args:
        images: number of test images of the bounds.
        particles: number of draws of the IWAE bound.
    """
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


@experiment("capsule-helmholtz/gray", data="mnist")
def gray(options: Options, *, weights: str = "capsule-helmholtz-mnist") -> Result:
    """Reconstruct gray test digits, as the source does, and count awake capsules (a minute).

    `reconstruction_error_gray` goes up to the first layer of capsules and back, as the authors'
    program does, `reconstruction_error_gray_top` up to the top. `awake_1` and `awake_2` are the
    mean numbers of switches of a layer that are on, for each class, on binarized test digits; the
    first layer is the nearest to the image.

    Args:
        weights: name of the trained weights.
    """
    entry = load(weights)
    images = load_dataset("mnist", root=options.data_root).test.images
    binary = binary_mnist(options).test
    awake: dict[str, Numbers] = {}
    for layer, switches in enumerate(reversed(list(spectra(entry, binary.images).values())), 1):
        count = switches.sum(1)
        awake[f"awake_{layer}"] = {
            f"digit_{digit}": mean_and_error(count[binary.labels.numpy() == digit])
            for digit in range(10)
        }
    metrics: Metrics = {
        "reconstruction_error_gray": reconstruction_error(entry, images),
        "reconstruction_error_gray_top": pixel_error(entry.guide.reconstruct, images),
        **awake,
    }
    return Result(metrics)
