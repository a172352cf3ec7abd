"""The experiments on recurrent capsules (Sastry), compared with DRAW (Gregor et al. 2015).

Nats are of test images binarized once, with seed 0. Training images are binarized again whenever
they are seen (`energy.binary_mnist`).

`overlap` has two digits over each other. The model explains one of them; its guide sees both, but
only through the capsule of the digit's class, for which the margin loss asks. Without labels the
loss bounds log p(digit). A pair is an image and the one before it, shifted by up to 4 pixels.
"""

from collections.abc import Mapping
from typing import Any

import torch

from capsule_zoo.data import Binarize, Dataset, Split, load_dataset
from capsule_zoo.experiments import Options, Result, experiment
from capsule_zoo.experiments.common.energy import binary_mnist
from capsule_zoo.experiments.common.findings import (
    TIGHTNESS,
    Bounded,
    by_quantity,
    held_out_bounds,
    mean_and_error,
    pictures,
)
from capsule_zoo.experiments.training import train, trained
from capsule_zoo.inference import Inputs, Run, image_log_likelihood, infer
from capsule_zoo.inference.evaluation.classification import Share
from capsule_zoo.records import Number, Numbers, Table
from capsule_zoo.registry import Entry, create

ONE_STEP = 0.1  # the extra time of the model that draws in one step, as a share of the budget


def knows_labels(entry: Entry) -> bool:
    """Return True if an entry learns the class: it has capsules, and its margin loss a weight."""
    return entry.model.capsules != "none" and entry.model.label_weight > 0


def learn(entry: Entry, data: Dataset, options: Options, name: str = "", **limits: Any) -> Run:
    """Train on images that are binarized again at every visit, with labels if they matter."""
    how: dict[str, Any] = dict(name=name, inputs=Inputs(Binarize(), labels=knows_labels(entry)))
    return train(entry, data, options, **how, **limits)


def digits_and_entry(options: Options) -> tuple[Dataset, Entry]:
    """Return binary MNIST, and the entry that the options name or one trained on it."""
    data, inputs = binary_mnist(options), Inputs(Binarize(), labels=True)
    return data, trained("recurrent-capsules", data, options, inputs=inputs)


@torch.no_grad()
def class_error(entry: Entry, split: Split) -> Number:
    """Return how often another capsule than the class's is longest, with its binomial error."""
    found = torch.cat([entry.model.classify(x).argmax(1) for x in split.images.split(500)])
    return Share.of(found != split.labels)


def negative(found: Mapping[str, Numbers]) -> dict[str, Numbers]:
    """Return numbers by quantity, with the signs of bounds turned: `neg_elbo` for `elbo`."""
    tightness = {quantity: rows for quantity, rows in found.items() if quantity in TIGHTNESS}
    bounds = {
        f"neg_{quantity}": {name: (-value, error, n) for name, (value, error, n) in rows.items()}
        for quantity, rows in found.items()
        if quantity not in TIGHTNESS
    }
    return bounds | tightness


def held_out(entry: Entry, images: Split, particles: int, options: Options) -> Numbers:
    """Return the negative ELBO and IWAE, in nats per image, and how tight they are."""
    bounds = held_out_bounds(entry, images, particles, options.seed)
    return {name: rows["own"] for name, rows in negative(by_quantity({"own": bounds})).items()}


@experiment("recurrent-capsules/mnist", minutes=90, of_runs=True)
def mnist(options: Options, chosen: Bounded) -> Result:
    """Measure nats, reconstruction, the KL of each step, and the class error (90 + 9 minutes).

    The class error is measured on the binarized test images of the bounds, and on gray ones, which
    other papers classify. `neg_elbo` is of all test images; its parts are of those of the bound.
    """
    data, entry = digits_and_entry(options)
    few = data.test[: chosen.images]
    weighed = held_out(entry, few, chosen.particles, options)
    codes = infer(entry.guide, few.images, seed=options.seed)
    divergences = torch.cat([entry.guide.divergences(x) for x in few.images.split(500)], 1)
    metrics: dict[str, Number | Table] = {
        "neg_elbo": held_out(entry, data.test, 1, options)["neg_elbo"],
        **{name: nats for name, nats in weighed.items() if name.startswith("neg_iwae")},
        "reconstruction": mean_and_error(-image_log_likelihood(entry.model, few.images, codes)),
        "class_error": class_error(entry, data.test),
        "class_error_gray": class_error(entry, load_dataset("mnist", root=options.data_root).test),
    }
    single = create(entry.name, **{**entry.sizes, "steps": 1})
    learn(single, data, options, "one-step", minutes=ONE_STEP * options.budget)
    metrics["neg_elbo_one_step"] = held_out(single, data.test, 1, options)["neg_elbo"]
    kl = {str(t): mean_and_error(nats) for t, nats in enumerate(divergences, start=1)}
    metrics["step"] = Table({"kl": kl})
    return Result(metrics, pictures(entry, data.test.images), None, entry)
