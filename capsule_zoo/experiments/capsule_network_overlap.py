"""Two overlapping digits, named and separated by the capsule network (Sabour et al. 2017).

A pair is made of each image of a batch and the one before it. Both lie on 36x36 pixels, shifted by
up to 4 pixels, as in the paper's MultiMNIST, whose files have more pairs than ours: every epoch has
new ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyro
import torch
import torch.nn.functional as F
from torch import Tensor

from capsule_zoo.data import load_dataset, transforms
from capsule_zoo.entries.capsule_network import TRAINING
from capsule_zoo.experiments import Options, Result, experiment
from capsule_zoo.experiments.overlaps import different_pairs, plain_network, taken_out
from capsule_zoo.experiments.training import train
from capsule_zoo.models.blocks.modes import in_eval_mode
from capsule_zoo.records import Metrics, Numbers
from capsule_zoo.registry import create

BORDER = 4  # pixels around a digit, and how far it is shifted
CNN: Mapping[str, Any] = dict(channels=(16, 32), hidden=58)  # as many parameters as the guide


def scattered(images: Tensor, *, generator: torch.Generator) -> Tensor:
    """Return images shifted by up to 4 pixels along each axis."""
    return transforms.Shift(BORDER)(images, generator=generator)


@experiment("capsule-network/overlap", data="mnist", minutes=60)
def overlap(
    options: Options, *, epochs: int = 10, images: int = 10_000, cnn: Mapping[str, Any] = CNN
) -> Result:
    """Name and separate two overlapping digits, beside a convolutional network (an hour).

    Digits lie on 36x36 pixels, shifted by up to 4. `error` is the share of pairs of different
    digits whose two classes are not both found.

    Args:
        epochs: passes over all of MNIST, of both networks, in a full run of an hour.
        images: number of test images; pairs of one class are left out.
        cnn: sizes of the convolutional network.
    """
    options.refuse_run()
    data = load_dataset("mnist", root=options.data_root)
    data = data.transformed(lambda digits: F.pad(digits, (BORDER,) * 4))
    pyro.set_rng_seed(options.seed)
    capsules = create("overlapping-capsule-network", image_shape=data.image_shape)
    plain = plain_network(data.image_shape, cnn, TRAINING)
    pairs = different_pairs(data.test[:images], scattered, options.seed)
    missed = Numbers()
    for name, entry in {"capsules": capsules, "cnn": plain}.items():
        options.say(f"Training: {name}")
        length = options.shortened(epochs)
        train(entry, data, options, name=name, epochs=length, transform=scattered)
        reader: Any = entry.model if name == "cnn" else entry.guide
        with torch.no_grad(), in_eval_mode(reader):
            scores = torch.cat([reader.scores(part) for part in pairs.overlays.split(500)])
        right, error, number = pairs.both_right(scores)
        missed[name] = (1 - right, error, number)
    errors, figure = taken_out(capsules, pairs)
    metrics: Metrics = {
        "error": missed,
        "squared_error": errors,
        "parameters": {
            "capsules": (float(capsules.guide.num_parameters), None, 1),
            "cnn": (float(plain.model.num_parameters), None, 1),
        },
    }
    return Result(metrics, {"": figure}, None, capsules)
