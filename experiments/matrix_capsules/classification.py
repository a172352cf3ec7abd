"""Matrix capsules on MNIST: test error, and the convergence of votes (Hinton et al. 2018)."""

from collections.abc import Mapping
from typing import Any

from capsule_zoo.data import Dataset, load_dataset, transforms
from capsule_zoo.experiments import Options, Result, experiment
from capsule_zoo.experiments.common.findings import mean_and_error, single
from capsule_zoo.experiments.training import load_or_train
from capsule_zoo.inference import Inputs, error_rate
from capsule_zoo.inference.evaluation.vote_history import vote_history
from capsule_zoo.records import Table
from capsule_zoo.registry import Entry
from capsule_zoo.zoo.matrix_capsules.figures import mistakes, votes

SHIFT = transforms.Shift(1)  # random shift of training images by pixels
NETWORK: Mapping[str, Any] = dict(features=32, capsules=(4, 8, 8))  # a quarter of `small`'s votes


def load_digits_and_entry(options: Options) -> tuple[Dataset, Entry]:
    """Load MNIST, and the network of the options' run or one trained for their budget."""
    data = load_dataset("mnist", root=options.data_root)
    return data, load_or_train("matrix-capsules", data, options, inputs=Inputs(SHIFT))


@experiment("matrix-capsules/mnist", minutes=60, of_runs=True)
def mnist(options: Options) -> Result:
    """Train the small preset, two iterations of EM, and measure its test error (an hour)."""
    data, entry = load_digits_and_entry(options)
    options.say(f"Testing on {len(data.test):,} images")
    error = error_rate(entry.model, entry.guide, data.test)
    parameters = single(entry.model.num_parameters)
    figures = {"": mistakes(entry.model, data.test)}
    return Result({"test_error": error, "model_parameters": parameters}, figures, None, entry)


@experiment("matrix-capsules/votes", data="mnist", minutes=60, of_runs=True)
def gather_votes(options: Options, *, images: int = 1000) -> Result:
    """Follow the votes for the winning class from iteration to iteration (an hour).

    `distance_...` is the mean distance of votes to the mean of the class capsule, each vote
    weighted by the class's responsibility for the child. `winner_fraction_...` is the fraction of
    the children that the winning class is responsible for.

    Args:
        images: number of test images.
    """
    data, entry = load_digits_and_entry(options)
    subset = data.test.images[:images]
    history = vote_history(entry.model, subset)
    quantities = {
        "distance_winner": history.mean_distance(history.wins),
        "distance_others": history.mean_distance(~history.wins),
        "winner_fraction": history.winner_fraction(),
    }
    numbers = {
        name: {str(t): mean_and_error(values) for t, values in enumerate(iterations, start=1)}
        for name, iterations in quantities.items()
    }
    return Result({"iteration": Table(numbers)}, {"": votes(entry, subset)}, None, entry)
