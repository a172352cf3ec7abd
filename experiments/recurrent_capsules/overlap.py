"""Two overlapping digits, separated by masking capsules.

The model explains one digit of the two. Its guide sees both, but only through the capsule of the
digit's class. The margin loss asks for the capsules of both classes. Separating digits is thus
inference, and without labels the loss bounds log p(digit).

A pair is made of each image of a batch and the one before it, shifted by up to 4 pixels.
Reference: Sabour, Frosst & Hinton 2017 (arXiv 1710.09829), section 6, on MultiMNIST.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyro
import torch
from torch import Tensor

from capsule_zoo.data import Binarize
from capsule_zoo.data.transforms import Shift
from capsule_zoo.experiments import Options, Result, experiment
from capsule_zoo.experiments.common.energy import binary_mnist
from capsule_zoo.experiments.common.overlaps import different_pairs, plain_network, taken_out
from capsule_zoo.experiments.training import train
from capsule_zoo.inference import Inputs
from capsule_zoo.models.common.modes import in_eval_mode
from capsule_zoo.records import Metrics, Numbers
from capsule_zoo.registry import create

CNN: Mapping[str, Any] = dict(channels=(32, 64), hidden=129)  # as many parameters as the capsules


def scattered(images: Tensor, *, generator: torch.Generator) -> Tensor:
    """Return images shifted by up to 4 pixels along each axis, and binarized."""
    return Binarize()(Shift(4)(images, generator=generator), generator=generator)


@experiment("recurrent-capsules/overlap", data="mnist", minutes=90)
def overlap(options: Options, *, images: int = 1000, cnn: Mapping[str, Any] = CNN) -> Result:
    """Separate overlapping digits by masking all capsules but one (90 minutes).

    Squared errors are sums over pixels, to the digit: of the drawing of its own capsule, of the
    drawing of the other digit's capsule, and of the pair as it is. A convolutional network with as
    many parameters as the capsules that read the pair is trained for half of the minutes, with the
    same settings, and names the classes only. `error` is the share of pairs whose two classes are
    not both found.

    Args:
        images: number of test images; pairs of one class are left out.
        cnn: sizes of the convolutional network.
    """
    options.refuse_run()
    data = binary_mnist(options)
    sizes: dict[str, Any] = dict(image_shape=data.image_shape, classes=data.num_classes)
    entry = create("overlapping-capsules", **sizes)
    plain = plain_network(data.image_shape, cnn, entry.training)
    readers = {"capsules": entry.model.classify, "cnn": plain.model.scores}
    parameters = {"capsules": entry.model.eye, "cnn": plain.model}
    missed, updates = Numbers(), Numbers()
    pairs = different_pairs(data.test[:images], scattered, options.seed)
    for name, network in {"capsules": entry, "cnn": plain}.items():
        options.say(f"Training: {name}")
        how: dict[str, Any] = dict(name=name, inputs=Inputs(scattered, labels=True))
        run = train(network, data, options, options.budget / 2, **how)
        with torch.no_grad(), in_eval_mode(network.model):
            missed[name] = pairs.missed(readers[name](pairs.overlays))
        updates[name] = float(run.steps), None, 1
    pyro.set_rng_seed(options.seed)
    errors, figure = taken_out(entry, pairs)
    metrics: Metrics = {
        "error": missed,
        "squared_error": errors,
        "updates": updates,
        "parameters": {
            name: (float(sum(p.numel() for p in module.parameters())), None, 1)
            for name, module in parameters.items()
        },
    }
    return Result(metrics, {"": figure}, None, entry)
