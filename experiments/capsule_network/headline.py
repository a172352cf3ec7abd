"""The capsule network on MNIST: errors, routings, reconstruction (Sabour et al. 2017)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pyro

from capsule_zoo.data import load_dataset, transforms
from capsule_zoo.experiments import Options, Result, experiment
from capsule_zoo.experiments.common.findings import by_variant, mean_and_error, squared_error
from capsule_zoo.experiments.study import Job, Study
from capsule_zoo.experiments.training import train, trained
from capsule_zoo.inference import Inputs, reconstruct
from capsule_zoo.inference.evaluation.classification import error_rate
from capsule_zoo.records import Metrics
from capsule_zoo.registry import Entry, create
from capsule_zoo.zoo.capsule_network.entry import ROUTINGS
from capsule_zoo.zoo.capsule_network.figures import dimensions, reconstructions

SHIFT = transforms.Shift(2)  # pixels, of training images, as in the paper
BLIND = 1000.0  # a pixel's deviation for which the image has no influence on the capsules


@experiment("capsule-network/mnist", minutes=90, role="comparison", lead="dimensions", of_runs=True)
def mnist(options: Options) -> Result:
    """Train the small preset on all of MNIST with shifts by two pixels (90 minutes).

    The weights are trained by dynamic routing. `error_<routing>` is the error rate of the same
    weights when another routing reads the votes.
    """
    data = load_dataset("mnist", root=options.data_root)
    entry = trained("capsule-network", data, options, inputs=Inputs(SHIFT))
    options.say(f"Classifying {len(data.test):,} test images")
    painted = reconstruct(entry.model, entry.guide, data.test)
    metrics: Metrics = {
        "test_error": error_rate(entry.model, entry.guide, data.test),
        "validation_error": error_rate(entry.model, entry.guide, data.validation),
        "error": {
            name: error_rate(entry.model, entry.guide.with_routing(routing), data.test)
            for name, routing in ROUTINGS.items()
        },
        "squared_error": squared_error(painted, data.test.images),
        "parameters": parameters(entry),
    }
    figures = {
        "reconstructions": reconstructions(entry, data.test.images),
        "dimensions": dimensions(entry, data.test.images[data.test.labels == 4]),
    }
    return Result(metrics, figures, None, entry)


def parameters(entry: Entry) -> tuple[float, None, int]:
    """Return the number of parameters of the guide and the decoder."""
    return float(entry.guide.num_parameters + entry.model.num_parameters), None, 1


@dataclass(frozen=True)
class Ablation:
    """One row of the paper's table 1, and the data and length of its training.

    Attributes:
        iterations: of dynamic routing.
        draws: whether the image is part of the loss.
        images, epochs: training images and passes over them.
    """

    iterations: int
    draws: bool
    images: int
    epochs: int

    def entry(self, image_shape: tuple[int, int, int]) -> Entry:
        """Return an untrained entry."""
        routing = "dynamic" if self.iterations > 1 else "uniform"
        usual = create("capsule-network", image_shape=image_shape, routing=routing)
        if self.draws:
            return usual
        sizes = {"sigma_image": BLIND, "label_weight": usual.model.label_weight}
        return create("capsule-network", image_shape=image_shape, routing=routing, **sizes)


def learn(job: Job[Ablation]) -> float:
    """Train one row of the table and return its test error."""
    row, options = job.variant, job.options
    pyro.set_rng_seed(options.seed)
    data = load_dataset("mnist", root=options.data_root)
    entry = row.entry(data.image_shape)
    few = replace(data, train=data.train[: row.images])
    train(entry, few, options, epochs=row.epochs, inputs=Inputs(SHIFT))
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
    length = options.shortened(epochs)
    rows = {
        f"{word}_{'drawing' if draws else 'blind'}": Ablation(iterations, draws, images, length)
        for word, iterations in (("one", 1), ("three", 3))
        for draws in (False, True)
    }
    options.say(f"Training {len(rows)} networks from {seeds} seeds each, {length} epochs")
    found = Study(rows, seeds).run(learn, replace(options, minutes=None))
    return Result({"error": {name: mean_and_error(own) for name, own in by_variant(found).items()}})
