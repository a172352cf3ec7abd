"""The experiments of the capsule generative models' paper (Li and Zhu 2019).

Every likelihood is of MNIST binarised once, with seed 0 (`Dataset.binarized`); the paper trains on
grey pixels and gives none.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from pyro.infer import Trace_ELBO
from torch import Tensor

from capsule_zoo import energy_figures
from capsule_zoo.data import Dataset, Split, load_dataset
from capsule_zoo.experiments import Options, Result, experiment
from capsule_zoo.guides import ExactSwitches
from capsule_zoo.inference import (
    ReweightedWakeSleep,
    WakeSleep,
    compare,
    evaluate,
    fit,
    log_partition,
    summarize,
)
from capsule_zoo.inference.evaluate import standard_error
from capsule_zoo.inference.probe import linear_probe
from capsule_zoo.models import CapsuleRBM
from capsule_zoo.registry import Entry, create, load

TEMPERATURES = 14_500
CHAINS = 100
PARTICLES = 1000
PROBED = 10_000

Metrics = dict[str, tuple[float, float | None, int]]


def train(entry: Entry, data: Dataset, options: Options, minutes: float) -> Entry:
    """Fit an entry by its own settings, from visible biases at the data's mean."""
    entry.model.set_base_rates(data.train.images)
    fit(
        entry.model,
        entry.guide,
        data,
        objective=entry.objective,
        minutes=minutes,
        seed=options.seed,
        progress=options.progress,
        device=options.device,
        **entry.training,
    )
    entry.model.cpu()
    entry.guide.cpu()
    return entry


def trained(options: Options, data: Dataset, name: str, minutes: float) -> Entry:
    """The entry that the options name, or a new one trained on `data` for so long."""
    if options.run:
        return load(options.run)
    entry = create(name, image_shape=data.image_shape)
    return train(entry, data, options, options.minutes or minutes)


@torch.no_grad()
def reconstruction_error(reconstruct: Any, images: Tensor) -> tuple[float, float, int]:
    """Mean over images of the mean absolute error of a pixel, with its standard error."""
    batches = images.split(500)
    errors = torch.cat([(reconstruct(x) - x).abs().flatten(1).mean(1) for x in batches])
    return errors.mean().item(), standard_error(errors.numpy()), len(images)


@torch.no_grad()
def log_likelihoods(model: CapsuleRBM, data: Dataset, seed: int) -> Metrics:
    """Mean log p(x) of the test images by AIS, which errs high, and by reverse AIS, which is low.

    Standard errors hold that of log Z and that of the mean over images.
    """
    free_energy = torch.cat([model.free_energy(x) for x in data.test.images.split(500)]).numpy()
    shared: dict[str, Any] = dict(chains=CHAINS, temperatures=TEMPERATURES, seed=seed)
    found: Metrics = {}
    for method, images in (("ais", data.train.images), ("raise", data.test.images[:CHAINS])):
        log_z = log_partition(model, method, images=images, **shared)
        error = float(np.hypot(standard_error(free_energy), log_z.standard_error))
        value = -float(free_energy.mean()) - log_z.value
        found[f"log_likelihood_{method}"] = (value, error, len(free_energy))
    return found


@torch.no_grad()
def spectrum(entry: Entry, images: Tensor) -> np.ndarray:
    """Probability of every switch of the layer nearest to the image, (N, K)."""
    source = entry.model if isinstance(entry.model, CapsuleRBM) else entry.guide
    return torch.cat([source.switch_probabilities(x) for x in images.split(500)]).numpy()


def probe(entry: Entry, data: Dataset) -> tuple[float, float, int]:
    """Accuracy of a linear probe on spectra, fitted on spectra of training images."""
    train_split: Split = data.train[:PROBED]
    features = [spectrum(entry, split.images) for split in (train_split, data.test)]
    return linear_probe(features[0], train_split.labels, features[1], data.test.labels)


def pictures(entry: Entry, data: Dataset) -> dict:
    """Every picture of the entry, and its spectra by class."""
    few = data.test[:2000]
    found = spectrum(entry, few.images)
    title = "Switches (columns) of test images (rows), by class"
    return {
        **{name: draw(entry, few.images) for name, draw in entry.figures.items()},
        "spectra": energy_figures.spectra(found, few.labels.numpy(), title),
    }


@experiment("capsule-rbm/mnist")
def capsule_rbm(options: Options) -> Result:
    """Capsule RBM, 40 capsules of 16, with exact switches: nats from both sides (30 minutes)."""
    data = load_dataset("mnist", root=options.data_root).binarized()
    entry = trained(options, data, "capsule-rbm", minutes=30)
    options.say("Annealing for log Z, forward and in reverse")
    metrics = {
        "reconstruction_error": reconstruction_error(entry.model.reconstruct, data.test.images),
        **log_likelihoods(entry.model, data, options.seed),
        "probe_switches": probe(entry, data),
        "switches_on": (float(spectrum(entry, data.test.images).mean()), None, len(data.test)),
    }
    return Result(metrics, pictures(entry, data), None, entry)


@experiment("capsule-rbm/mean-field", data="mnist")
def mean_field(options: Options) -> Result:
    """What the paper's mean field costs: the same machine trained by it and exactly (an hour)."""
    data = load_dataset("mnist", root=options.data_root).binarized()
    metrics: Metrics = {}
    for name in ("exact", "mean_field"):
        entry = create("capsule-rbm", image_shape=data.image_shape).use_guide(name)
        options.say(f"Training with the guide {name!r}")
        train(entry, data, options, (options.minutes or 60) / 2)
        for metric, value in log_likelihoods(entry.model, data, options.seed).items():
            metrics[f"{metric}_{name}"] = value
        with torch.no_grad():
            images = data.test.images[:1000]
            gap = entry.make_guide("mean_field").free_energy(images)
            gap = (gap - ExactSwitches(entry.model).free_energy(images)).numpy()
        metrics[f"mean_field_gap_{name}"] = (float(gap.mean()), standard_error(gap), len(gap))
    return Result(metrics, {}, None, entry)


def helmholtz_metrics(entry: Entry, data: Dataset, seed: int) -> Metrics:
    """ELBO and IWAE of the first 500 test images, and the reconstruction error of all."""
    idata = evaluate(
        entry.model, entry.guide, data.test[:500], num_particles=PARTICLES, seed=seed, draws=0
    )
    summary: dict[str, Any] = summarize(idata)
    return {
        "reconstruction_error": reconstruction_error(entry.guide.reconstruct, data.test.images),
        "elbo": (summary["elbo"], summary["elbo_se"], summary["num_images"]),
        f"iwae_{PARTICLES}": (summary["iwae"], summary["iwae_se"], summary["num_images"]),
    }


@experiment("capsule-helmholtz/mnist")
def helmholtz(options: Options) -> Result:
    """Helmholtz machine, two layers of 40 capsules, by reweighted wake-sleep (an hour)."""
    data = load_dataset("mnist", root=options.data_root).binarized()
    entry = trained(options, data, "capsule-helmholtz", minutes=60)
    options.say("Importance weighting")
    metrics = {
        **helmholtz_metrics(entry, data, options.seed),
        "probe_switches": probe(entry, data),
    }
    return Result(metrics, pictures(entry, data), None, entry)


@experiment("capsule-helmholtz/objectives", data="mnist")
def objectives(options: Options) -> Result:
    """One machine under wake-sleep, reweighted wake-sleep and the ELBO, in one table (an hour)."""
    data = load_dataset("mnist", root=options.data_root).binarized()
    rows = {
        "wake_sleep": WakeSleep(),
        "reweighted": ReweightedWakeSleep(5),
        "elbo": Trace_ELBO(),
    }
    pairs: dict[str, tuple] = {}
    for name, objective in rows.items():
        options.say(f"Training under {type(objective).__name__}")
        entry = create("capsule-helmholtz", image_shape=data.image_shape)
        entry.objective = objective
        train(entry, data, options, (options.minutes or 60) / len(rows))
        pairs[name] = (entry.model, entry.guide)
    table = compare(pairs, data.test[:500], num_particles=200, seed=options.seed)
    metrics: Metrics = {}
    for label, row in table.iterrows():
        name = str(label)
        number = table.attrs["num_images"]
        metrics[f"elbo_{name}"] = (row["elbo"], row["elbo_se"], number)
        metrics[f"iwae_200_{name}"] = (row["iwae"], row["iwae_se"], number)
    return Result(metrics, {"objectives": table.plot()}, table, entry)
