"""Cards of trained weights: a number that identifies them, and the checks they have passed.

>>> entry, card = load("part-whole-mnist"), read_recipe("part-whole-mnist")
>>> headline(entry, every(load_dataset("mnist").test, 1000)), card["headline"]

The headline is the squared error of reconstructions of test images, or the error rate of a
classifier. It is cheap, so it can be measured again after any change of the code.
"""

import torch

from capsule_zoo.data import Dataset, Split
from capsule_zoo.inference import check_pair, reconstruct
from capsule_zoo.inference.evaluation.classification import error_rate, predicts_labels
from capsule_zoo.records import Metric
from capsule_zoo.registry import Entry, find_registration


class Headline(Metric):
    """The number that identifies trained weights, a mean over images.

    Attributes:
        metric: "squared_error" of reconstructions, summed over the pixels of an image, or
            "error_rate" of a classifier.
    """

    metric: str


def headline(entry: Entry, split: Split, seed: int = 0) -> Headline:
    """Measure the headline of an entry on images, and on labels if it predicts labels."""
    if predicts_labels(entry.model, entry.guide):
        rate = error_rate(entry.model, entry.guide, split)
        return Headline(metric="error_rate", value=rate.value, se=rate.se, n=rate.n)
    painted = reconstruct(entry.model, entry.guide, split, seed=seed)
    error = entry.model.space.squared_error(painted, split.images).double()
    value, se = error.mean().item(), (error.std() / len(error) ** 0.5).item()
    return Headline(metric="squared_error", value=value, se=se, n=len(error))


def every(split: Split, number: int) -> Split:
    """Return `number` evenly spaced images; the first images of MNIST would be the easiest."""
    return split[:: max(1, len(split) // number)][:number]


def examine(entry: Entry, data: Dataset) -> dict:
    """Check and measure an entry for its card: description, splits, headline, checks.

    Raises:
        ValueError: a weight is not finite, or model and guide do not fit.
    """
    for part, module in (("model", entry.model), ("guide", entry.guide)):
        for name, weights in module.state_dict().items():
            if not torch.isfinite(weights).all():
                raise ValueError(f"{part} weight {name} is not finite; train again")
    discrete = entry.model.discretize(), entry.guide.discretize()
    check_pair(*discrete, data.test.images[:2])
    return {
        "what": find_registration(entry.name).with_preset(entry.settings).summary,
        "split": {name: len(getattr(data, name)) for name in ("train", "validation", "test")},
        "headline": {"on": data.test.name, **headline(entry, data.test)},
        "checks": [
            "every weight is finite",
            "the guide draws every latent site of the discrete model, in its shape, and no other",
            "the headline was measured on weights read back from their file",
        ],
    }
