"""Cards of trained weights: a number by which to know them, and the checks they have passed.

>>> entry, card = load("part-whole-mnist"), read_recipe("part-whole-mnist")
>>> found = headline(entry, every(load_dataset("mnist").test, 1000))
>>> agrees(found, card["headline"])

The headline is cheap and the same for all entries of a kind, so that it can be measured again
whenever the code has changed: how far reconstructions are from test images, or how often a
classifier errs.
"""

from __future__ import annotations

from math import hypot
from typing import TypedDict

import torch

from capsule_zoo.data import Dataset, Split
from capsule_zoo.guides.base import in_eval_mode
from capsule_zoo.inference import check_pair, reconstruct
from capsule_zoo.inference.classification import error_rate
from capsule_zoo.models.classifier import Classifier
from capsule_zoo.registry import Entry, summary

FIELDS = (
    *("entry", "sizes", "guide", "what", "data", "split", "seed", "training"),
    *("headline", "checks", "records"),
)


class Headline(TypedDict):
    """A number by which trained weights are known.

    Attributes:
        metric: "squared_error", of reconstructions, summed over the pixels of an image, or
            "error_rate", of a classifier.
        value, se, n: mean over n images, and its standard error.
    """

    metric: str
    value: float
    se: float
    n: int


def headline(entry: Entry, split: Split, seed: int = 0) -> Headline:
    """Measure an entry on images and, for a classifier, their labels."""
    if isinstance(entry.model, Classifier):
        rate = error_rate(entry.model, split)
        return Headline(metric="error_rate", value=rate.value, se=rate.se, n=rate.n)
    painted = reconstruct(entry.model, entry.guide, split, seed=seed)
    error = (painted - split.images).square().sum((1, 2, 3)).double()
    value, se = error.mean().item(), (error.std() / len(error) ** 0.5).item()
    return Headline(metric="squared_error", value=value, se=se, n=len(error))


def every(split: Split, number: int) -> Split:
    """So many images, evenly spread: the first ones of MNIST are easier than the last."""
    return split[:: max(1, len(split) // number)][:number]


def agrees(found: Headline, stated: Headline, errors: float = 5.0) -> bool:
    """Whether two headlines differ by no more than so many standard errors."""
    if found["metric"] != stated["metric"]:
        return False
    error = hypot(found["se"], stated["se"])
    return abs(found["value"] - stated["value"]) <= errors * error + 1e-6 * abs(stated["value"])


def examine(entry: Entry, data: Dataset) -> dict:
    """What a card says of an entry beside its origin: description, splits, headline, checks.

    Raises:
        ValueError: a weight is not finite, or model and guide do not fit.
    """
    for part, module in (("model", entry.model), ("guide", entry.guide)):
        for name, weights in module.state_dict().items():
            if not torch.isfinite(weights).all():
                raise ValueError(f"{part} weight {name} is not finite; train again")
    discrete = entry.model.with_discrete_presences(), entry.guide.with_discrete_presences()
    with in_eval_mode(*discrete):  # a run in training would move running means
        check_pair(*discrete, data.test.images[:2])
    return {
        "what": summary(entry.name),
        "split": {name: len(getattr(data, name)) for name in ("train", "validation", "test")},
        "headline": {"on": data.test.name, **headline(entry, data.test)},
        "checks": [
            "every weight is finite",
            "the guide draws every latent site of the discrete model, in its shape, and no other",
            "the headline was measured on weights read back from their file",
        ],
    }
