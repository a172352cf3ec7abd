"""Recurrent capsules (Sastry): nats, strokes, and the class error.

Nats are of test images binarized once, with seed 0. Training images are binarized again whenever
they are seen (`energy.binary_mnist`).
"""

from typing import Any

import torch

from capsule_zoo.data import Binarize, Split, load_dataset
from capsule_zoo.experiments import Options, Result, experiment
from capsule_zoo.experiments.common.energy import binary_mnist
from capsule_zoo.experiments.common.findings import held_out_bounds, mean_and_error, pictures
from capsule_zoo.experiments.training import load_or_train, train
from capsule_zoo.inference import Inputs, infer
from capsule_zoo.inference.evaluation.ancestral import image_log_likelihood
from capsule_zoo.inference.evaluation.classification import Fraction
from capsule_zoo.records import Number, Table
from capsule_zoo.registry import Entry, create

IMAGES, PARTICLES = 1000, 100  # held-out images for the bounds, draws of the IWAE bound
ONE_STEP = 0.1  # extra training time of the one-step model, as a fraction of the budget


@torch.no_grad()
def class_error(entry: Entry, split: Split) -> Number:
    """Return the class error: how often the class's capsule is not longest, with binomial error."""
    classes = torch.cat([entry.model.classify(x).argmax(1) for x in split.images.split(500)])
    return Fraction.of(classes != split.labels)


def negative_bound(entry: Entry, images: Split, name: str, particles: int, seed: int) -> Number:
    """Return the negative of a bound of `held_out_bounds`, in nats per image."""
    value, error, count = held_out_bounds(entry, images, particles, seed)[name]
    return -value, error, count


@experiment("recurrent-capsules/mnist", minutes=90, of_runs=True)
def mnist(options: Options) -> Result:
    """Measure nats, reconstruction, the KL of each step, and the class error (90 + 9 minutes).

    The class error is measured on the binarized test images of the bounds, and on gray ones, which
    other papers classify. `neg_elbo` is on all test images; its parts are on the bounds' images.
    """
    data, arguments = binary_mnist(options), dict[str, Any](inputs=Inputs(Binarize(), labels=True))
    entry = load_or_train("recurrent-capsules", data, options, **arguments)
    subset, seed, iwae = data.test[:IMAGES], options.seed, f"iwae_{PARTICLES}"
    weighted = negative_bound(entry, subset, iwae, PARTICLES, seed)
    codes = infer(entry.guide, subset.images, seed=seed)
    divergences = torch.cat([entry.guide.divergences(x) for x in subset.images.split(500)], 1)
    metrics: dict[str, Number | Table] = {
        "neg_elbo": negative_bound(entry, data.test, "elbo", 1, seed),
        f"neg_{iwae}": weighted,
        "reconstruction": mean_and_error(-image_log_likelihood(entry.model, subset.images, codes)),
        "class_error": class_error(entry, data.test),
        "class_error_gray": class_error(entry, load_dataset("mnist", root=options.data_root).test),
    }
    single = create(entry.name, **{**entry.settings, "steps": 1})
    train(single, data, options, name="one-step", minutes=ONE_STEP * options.budget, **arguments)
    metrics["neg_elbo_one_step"] = negative_bound(single, data.test, "elbo", 1, seed)
    kl = {str(t): mean_and_error(nats) for t, nats in enumerate(divergences, start=1)}
    metrics["step"] = Table({"kl": kl})
    return Result(metrics, pictures(entry, data.test.images), None, entry)
