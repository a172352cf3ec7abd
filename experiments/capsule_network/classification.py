"""The capsule network: errors, routings and reconstruction (Sabour et al. 2017)."""

from dataclasses import replace
from functools import partial
from typing import Any

import pyro
import torch

from capsule_zoo.data import load_dataset, transforms
from capsule_zoo.experiments import Job, Options, Result, Study, experiment, load_or_train, train
from capsule_zoo.experiments.common.findings import mean_and_error, single, squared_error
from capsule_zoo.experiments.training import use_device
from capsule_zoo.inference import Inputs, error_rate, reconstruct
from capsule_zoo.records import Metrics
from capsule_zoo.registry import Entry, create
from capsule_zoo.zoo.capsule_network.entry import ROUTINGS
from capsule_zoo.zoo.capsule_network.figures import dimensions, reconstructions

SHIFT = transforms.Shift(2)  # random shift of training images by pixels, as in the paper
BLIND = 1000.0  # a pixel's standard deviation at which the image does not influence the capsules
RATES = {"model": 1e-3, "guide": 5e-3}  # first learning rates of the decoder and the capsules
IMAGES, EPOCHS = 10_000, 10  # training images of the ablation, and passes over them in an hour
ROWS = {  # rows of the paper's table 1: iterations, and whether images are reconstructed
    "one_blind": ("uniform", False),
    "one_drawing": ("uniform", True),
    "three_blind": ("dynamic", False),
    "three_drawing": ("dynamic", True),
}


@experiment("capsule-network/mnist", minutes=90, of_runs=True)
def mnist(options: Options) -> Result:
    """Train the small preset on all of MNIST with shifts by two pixels (90 minutes).

    The weights are trained by dynamic routing, with weight decay (AdamW). `error_<routing>` is the
    error rate of these weights under another routing of the votes.
    """
    data = load_dataset("mnist", root=options.data_root)
    adam = partial(torch.optim.AdamW, weight_decay=0.1, fused=True)
    arguments: dict[str, Any] = dict(optimizer=adam, batch_size=64, inputs=Inputs(SHIFT), lr=RATES)
    entry = load_or_train("capsule-network", data, options, **arguments)
    options.say(f"Classifying {len(data.test):,} test images")
    with use_device(entry, options):
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


def create_row(row: str, image_shape: tuple[int, int, int]) -> Entry:
    """Return an untrained entry with the iterations and loss of a row of the paper's table 1."""
    routing, draws = ROWS[row]
    entry = create("capsule-network", image_shape=image_shape)
    if not draws:
        blind = {"sigma_image": BLIND, "label_weight": entry.model.label_weight}
        entry = create("capsule-network", image_shape=image_shape, **blind)
    return entry.use_guide(routing)


def learn(job: Job[int]) -> float:
    """Train the row that the job names for the job's epochs, and return its test error."""
    options = job.options
    pyro.set_rng_seed(options.seed)
    data = load_dataset("mnist", root=options.data_root)
    entry = create_row(job.name, data.image_shape)
    subset = replace(data, train=data.train[:IMAGES])
    train(entry, subset, options, epochs=job.variant, inputs=Inputs(SHIFT))
    return error_rate(entry.model, entry.guide, data.test).value


@experiment("capsule-network/ablation", data="mnist", minutes=60)
def ablation(options: Options, *, seeds: int = 3) -> Result:
    """Train with one and three iterations, with and without reconstruction (an hour).

    `error_<row>` is the mean test error over the seeds.

    Args:
        seeds: number of seeds of each row.
    """
    rows = dict.fromkeys(ROWS, options.shorten_steps(EPOCHS))
    errors = Study(rows, seeds).run(learn, replace(options, minutes=None))
    return Result({"error": {name: mean_and_error(row) for name, row in errors.items()}})
