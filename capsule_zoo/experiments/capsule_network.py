"""The capsule network on MNIST: errors, routings, reconstruction (Sabour et al. 2017)."""

from __future__ import annotations

import torch

from capsule_zoo.data import Split, load_dataset, transforms
from capsule_zoo.entries.capsule_network import ROUTINGS
from capsule_zoo.experiments import Options, Result, experiment
from capsule_zoo.experiments.findings import squared_error
from capsule_zoo.experiments.training import trained
from capsule_zoo.figures.capsule_network import dimensions, reconstructions
from capsule_zoo.inference import reconstruct
from capsule_zoo.inference.evaluation.classification import error_rate
from capsule_zoo.records import Metrics
from capsule_zoo.registry import Entry

SHIFT = transforms.Shift(2)  # pixels, of training images, as in the paper


@experiment("capsule-network/mnist", minutes=90, role="comparison", lead="dimensions")
def mnist(options: Options) -> Result:
    """Train the small preset on all of MNIST with shifts by two pixels (90 minutes).

    The weights are trained by dynamic routing. `error_<routing>` is the error rate of the same
    weights when another routing reads the votes.
    """
    data = load_dataset("mnist", root=options.data_root)
    entry = trained("capsule-network", data, options, transform=SHIFT)
    options.say(f"Classifying {len(data.test):,} test images")
    painted = reconstruct(entry.model, entry.guide, data.test)
    metrics: Metrics = {
        "test_error": error_rate(entry.guide, data.test),
        "validation_error": error_rate(entry.guide, data.validation),
        "error": {
            name: error_rate(entry.guide.with_routing(routing), data.test)
            for name, routing in ROUTINGS.items()
        },
        "squared_error": squared_error(painted, data.test.images),
        "parameters": parameters(entry),
    }
    figures = {
        "reconstructions": reconstructions(entry, data.test.images),
        "dimensions": dimensions(entry, first_right(entry, data.test)),
    }
    return Result(metrics, figures, None, entry)


def parameters(entry: Entry) -> tuple[float, None, int]:
    """Return the number of parameters of the guide and the decoder."""
    return float(entry.guide.num_parameters + entry.model.num_parameters), None, 1


def first_right(entry: Entry, split: Split) -> torch.Tensor:
    """Return the images, beginning with one of a class that is drawn well in the paper, a four."""
    return split.images[(split.labels == 4).nonzero()[:1, 0]]
