"""Two overlapping digits, separated by masking capsules.

The model explains one digit of the two. Its guide sees both, but only through the capsule of the
digit's class. The margin loss asks for the capsules of both classes. Separating digits is thus
inference, and without labels the loss bounds log p(digit).

A pair is made of each image of a batch and the one before it, shifted by up to 4 pixels.
Reference: Sabour, Frosst & Hinton 2017 (arXiv 1710.09829), section 6, on MultiMNIST.
"""

from __future__ import annotations

from typing import Any

import pyro
import torch
from torch import Tensor

from capsule_zoo.data import Binarize
from capsule_zoo.data.transforms import Shift
from capsule_zoo.experiments import Options, Result, experiment
from capsule_zoo.experiments.energy import binary_mnist
from capsule_zoo.experiments.overlaps import different_pairs, taken_out
from capsule_zoo.experiments.training import train
from capsule_zoo.records import Metrics
from capsule_zoo.registry import create


def scattered(images: Tensor, *, generator: torch.Generator) -> Tensor:
    """Return images shifted by up to 4 pixels along each axis, and binarized."""
    return Binarize()(Shift(4)(images, generator=generator), generator=generator)


@experiment("recurrent-capsules/overlap", data="mnist", minutes=90)
def overlap(options: Options, *, images: int = 1000) -> Result:
    """Separate overlapping digits by masking all capsules but one (90 minutes).

    Squared errors are sums over pixels, to the digit: of the drawing of its own capsule, of the
    drawing of the other digit's capsule, and of the pair as it is.

    Args:
        images: number of test images; pairs of one class are left out.
    """
    options.refuse_run()
    data = binary_mnist(options)
    sizes: dict[str, Any] = dict(image_shape=data.image_shape, classes=data.num_classes)
    entry = create("overlapping-capsules", **sizes)
    how: dict[str, Any] = dict(name="trained", transform=scattered, labels=True)
    train(entry, data, options, options.budget, **how)
    pairs = different_pairs(data.test[:images], scattered, options.seed)
    pyro.set_rng_seed(options.seed)
    errors, figure = taken_out(entry, pairs)
    with torch.no_grad():
        right = pairs.both_right(entry.model.classify(pairs.overlays))
    metrics: Metrics = {"squared_error": errors, "both_classes": right}
    return Result(metrics, {"": figure}, None, entry)
