"""Two overlapping digits, named and separated by the capsule network (Sabour et al. 2017).

A pair is made of each image of a batch and the one before it. Both lie on 36x36 pixels, shifted by
up to 4 pixels, as in the paper's MultiMNIST, whose files have more pairs than ours: every epoch has
new ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pyro
import torch
import torch.nn.functional as F
from torch import Tensor

from capsule_zoo.data import Dataset, load_dataset, transforms
from capsule_zoo.experiments import Options, Result, experiment
from capsule_zoo.experiments.common.findings import by_quantity, over_seeds
from capsule_zoo.experiments.common.overlaps import different_pairs, plain_network, taken_out
from capsule_zoo.experiments.study import Job, Study
from capsule_zoo.experiments.training import train
from capsule_zoo.inference import Inputs
from capsule_zoo.models.common.modes import in_eval_mode
from capsule_zoo.records import Numbers
from capsule_zoo.registry import create, load
from capsule_zoo.zoo.capsule_network.entry import TRAINING

BORDER = 4  # pixels around a digit, and how far it is shifted
CNN: Mapping[str, Any] = dict(channels=(16, 32), hidden=58)  # as many parameters as the guide


def scattered(images: Tensor, *, generator: torch.Generator) -> Tensor:
    """Return images shifted by up to 4 pixels along each axis."""
    return transforms.Shift(BORDER)(images, generator=generator)


@dataclass(frozen=True)
class Task:
    """The training and the test of one of the two networks.

    Attributes:
        epochs: passes over the training images.
        images: number of test images, of which pairs are made.
        cnn: sizes of the convolutional network.
    """

    epochs: int
    images: int
    cnn: Mapping[str, Any]


def padded(options: Options) -> Dataset:
    """Return MNIST on 36x36 pixels."""
    data = load_dataset("mnist", root=options.data_root)
    return data.transformed(lambda digits: F.pad(digits, (BORDER,) * 4))


@experiment("capsule-network/overlap", data="mnist", minutes=60)
def overlap(
    options: Options, *, epochs: int = 10, images: int = 10_000, cnn: Mapping[str, Any] = CNN
) -> Result:
    """Name and separate two overlapping digits, beside a convolutional network (an hour).

    Digits lie on 36x36 pixels, shifted by up to 4. `error` is the share of pairs of different
    digits whose two classes are not both found. The networks are trained side by side where there
    are two cores.

    Args:
        epochs: passes over all of MNIST, of both networks, in a full run of an hour.
        images: number of test images; pairs of one class are left out.
        cnn: sizes of the convolutional network.
    """
    options.refuse_run()
    length = options.shortened(epochs)
    tasks = dict.fromkeys(("capsules", "cnn"), Task(length, images, cnn))
    options.say(f"Training {' and '.join(tasks)}, {length} epochs")
    whole = replace(options, minutes=None)
    study = Study(tasks)
    outcomes = study.run(learn, whole)
    capsules = load(study.folders(whole)["capsules"])
    pairs = different_pairs(padded(options).test[:images], scattered, options.seed)
    errors, figure = taken_out(capsules, pairs)
    found = by_quantity({name: over_seeds([outcomes[name, options.seed]]) for name in tasks})
    return Result({**found, "squared_error": errors}, {"": figure}, None, capsules)


def learn(job: Job[Task]) -> Numbers:
    """Train the network of the job's name, and return its error on pairs and its parameters."""
    task, options = job.variant, job.options
    data = padded(options)
    pyro.set_rng_seed(options.seed)
    reader: Any
    if job.name == "capsules":
        entry = create("overlapping-capsule-network", image_shape=data.image_shape)
        reader = entry.guide
    else:
        entry = plain_network(data.image_shape, task.cnn, TRAINING)
        reader = entry.model
    train(entry, data, options, epochs=task.epochs, inputs=Inputs(scattered))
    pairs = different_pairs(data.test[: task.images], scattered, options.seed)
    with torch.no_grad(), in_eval_mode(reader):
        scores = torch.cat([reader.scores(part) for part in pairs.overlays.split(500)])
    return {
        "error": pairs.missed(scores),
        "parameters": (float(reader.num_parameters), None, 1),
    }
