"""The capsule network: errors, routings, reconstruction, and two digits (Sabour et al. 2017).

A pair of digits is made of each image of a batch and the one before it. Both lie on 36x36 pixels,
shifted by up to 4 pixels, as in the paper's MultiMNIST. Its files have more pairs than ours; every
epoch has new ones.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pyro
import torch
import torch.nn.functional as F

from capsule_zoo.data import Dataset, load_dataset, transforms
from capsule_zoo.experiments import Job, Options, Result, Study, experiment, train, trained
from capsule_zoo.experiments.capsule_network.overlaps import Overlaid, beside_equal
from capsule_zoo.experiments.common.findings import mean_and_error, single, squared_error
from capsule_zoo.experiments.training import on_device
from capsule_zoo.inference import Inputs, error_rate, reconstruct
from capsule_zoo.records import Metrics
from capsule_zoo.registry import Entry, create
from capsule_zoo.zoo.capsule_network.entry import ROUTINGS
from capsule_zoo.zoo.capsule_network.figures import dimensions, reconstructions

SHIFT = transforms.Shift(2)  # pixels, of training images, as in the paper
BLIND = 1000.0  # a pixel's deviation for which the image has no influence on the capsules
BORDER = 4  # pixels around a digit, and how far it is shifted


@experiment("capsule-network/mnist", minutes=90, of_runs=True)
def mnist(
    options: Options,
    *,
    lr: float = 5e-3,
    decoder_lr: float = 1e-3,
    decay: float = 0.1,
    batch_size: int = 64,
    sizes: Mapping[str, Any] | None = None,
) -> Result:
    """Train the small preset on all of MNIST with shifts by two pixels (90 minutes).

    The weights are trained by dynamic routing. `error_<routing>` is the error rate of the same
    weights when another routing reads the votes.

    Args:
        lr: first learning rate of the capsules, which falls to 0.
        decoder_lr: the same of the decoder.
        decay: weight decay (AdamW).
        batch_size: images of an update.
        sizes: arguments of the entry, such as its preset.
    """
    data = load_dataset("mnist", root=options.data_root)
    adam = partial(torch.optim.AdamW, weight_decay=decay, fused=True)
    how: dict[str, Any] = dict(optimizer=adam, batch_size=batch_size, inputs=Inputs(SHIFT))
    rates = {"model": decoder_lr, "guide": lr}
    entry = trained("capsule-network", data, options, sizes, lr=rates, **how)
    options.say(f"Classifying {len(data.test):,} test images")
    with on_device(entry, options):
        painted = reconstruct(entry.model, entry.guide, data.test).cpu()
        metrics: Metrics = {
            "test_error": error_rate(entry.model, entry.guide, data.test),
            "validation_error": error_rate(entry.model, entry.guide, data.validation),
            "error": {
                name: error_rate(entry.model, entry.guide.with_routing(routing), data.test)
                for name, routing in ROUTINGS.items()
            },
            "squared_error": squared_error(painted, data.test.images),
            "parameters": single(entry.guide.num_parameters + entry.model.num_parameters),
        }
    figures = {
        "reconstructions": reconstructions(entry, data.test.images),
        "dimensions": dimensions(entry, data.test.images[data.test.labels == 4]),
    }
    return Result(metrics, figures, None, entry)


ROWS = {
    "one_blind": ("uniform", False),
    "one_drawing": ("uniform", True),
    "three_blind": ("dynamic", False),
    "three_drawing": ("dynamic", True),
}


def entry_of(row: str, image_shape: tuple[int, int, int]) -> Entry:
    """Return an untrained entry of a row of the paper's table 1: its iterations, and its loss."""
    routing, draws = ROWS[row]
    usual = create("capsule-network", image_shape=image_shape, routing=routing)
    if draws:
        return usual
    sizes = {"sigma_image": BLIND, "label_weight": usual.model.label_weight}
    return create("capsule-network", image_shape=image_shape, routing=routing, **sizes)


def learn(job: Job[tuple[int, int]]) -> float:
    """Train the row of the job's name, on some images for some epochs; return its test error."""
    (images, epochs), options = job.variant, job.options
    pyro.set_rng_seed(options.seed)
    data = load_dataset("mnist", root=options.data_root)
    entry = entry_of(job.name, data.image_shape)
    few = replace(data, train=data.train[:images])
    train(entry, few, options, epochs=epochs, inputs=Inputs(SHIFT))
    return error_rate(entry.model, entry.guide, data.test).value


@experiment("capsule-network/ablation", data="mnist", minutes=60)
def ablation(options: Options, *, seeds: int = 3, images: int = 10_000, epochs: int = 10) -> Result:
    """Train with one and three iterations, with and without the drawing (an hour).

    `error_<row>` is the mean test error over the seeds.

    Args:
        seeds: number of seeds of each row.
        images: number of training images.
        epochs: passes over them, in a full run of an hour.
    """
    rows = dict.fromkeys(ROWS, (images, options.shortened(epochs)))
    found = Study(rows, seeds).run(learn, replace(options, minutes=None))
    return Result({"error": {name: mean_and_error(own) for name, own in found.items()}})


def padded(options: Options) -> Dataset:
    """Return MNIST on 36x36 pixels."""
    data = load_dataset("mnist", root=options.data_root)
    return data.transformed(lambda digits: F.pad(digits, (BORDER,) * 4))


@experiment("capsule-network/overlap", data="mnist", minutes=20)
def overlap(options: Options, chosen: Overlaid) -> Result:
    """Name and separate two overlapping digits, beside an equal network (20 core-minutes).

    Digits lie on 36x36 pixels, shifted by up to 4. `cnn` has the stem and as many weights, and
    no capsules; both are tuned on pairs of validation images, as in `equal-network`. `error` is
    the share of pairs of different digits whose two classes are not both found, a mean over the
    seeds. `squared_error` is of drawings from the first seed, explained at `taken_out`.
    """
    given = replace(chosen, sizes=chosen.sizes or {"channels": 16})
    scatter = transforms.Shift(BORDER)
    return beside_equal("overlapping-capsule-network", given, options, padded, scatter)
