"""Matrix capsules on MNIST: test error, votes, and poses that are drawn (Hinton et al. 2018)."""

from collections.abc import Mapping
from itertools import product
from typing import Any

import torch
from pyro.infer import Trace_ELBO
from torch import Tensor

from capsule_zoo.data import Dataset, load_dataset, transforms
from capsule_zoo.experiments import Options, Result, experiment
from capsule_zoo.experiments.common.findings import mean_and_error, squared_error
from capsule_zoo.experiments.training import train, trained
from capsule_zoo.figures.grids import image_rows
from capsule_zoo.guides import ClassPose
from capsule_zoo.inference import Inputs, Pace, error_rate, vote_history
from capsule_zoo.models import VariationalAutoencoder
from capsule_zoo.models.common.modes import in_eval_mode
from capsule_zoo.models.routing.capsule_convolution import POSE, RIGHT_COLUMN
from capsule_zoo.records import Metrics, Numbers, Table
from capsule_zoo.registry import Entry
from capsule_zoo.zoo.matrix_capsules.figures import mistakes, votes

SHIFT = transforms.Shift(1)  # pixels, of training images
NETWORK: Mapping[str, Any] = dict(features=32, capsules=(4, 8, 8))  # a quarter of the small votes
NUDGES = torch.linspace(-2, 2, 9)  # deviations
STANDARDIZED = 2000  # training images whose poses give the scale of the code


def digits_and_entry(options: Options) -> tuple[Dataset, Entry]:
    """Return MNIST, and the network that the options name or one trained for their budget."""
    data = load_dataset("mnist", root=options.data_root)
    return data, trained("matrix-capsules", data, options, inputs=Inputs(SHIFT))


@experiment("matrix-capsules/mnist", minutes=60, of_runs=True)
def mnist(options: Options) -> Result:
    """Train the small preset, two iterations of EM, and measure its test error (an hour)."""
    data, entry = digits_and_entry(options)
    options.say(f"Testing on {len(data.test):,} images")
    metrics: Metrics = {
        "test_error": error_rate(entry.model, entry.guide, data.test),
        "model_parameters": (float(entry.model.num_parameters), None, 1),
    }
    return Result(metrics, {"": mistakes(entry.model, data.test)}, None, entry)


@experiment("matrix-capsules/votes", data="mnist", minutes=60, of_runs=True)
def gathering(options: Options, *, images: int = 1000) -> Result:
    """Follow the votes for the winning class from iteration to iteration (an hour).

    `distance_...` is the mean distance of votes to the mean of the class capsule, each vote
    weighted by the class's responsibility for the child. `share_winner_...` is the share of the
    children that the winning class is responsible for.

    Args:
        images: number of test images.
    """
    data, entry = digits_and_entry(options)
    few = data.test.images[:images]
    history = vote_history(entry.model, few)
    found = {
        "distance_winner": history.mean_distance(history.wins),
        "distance_others": history.mean_distance(~history.wins),
        "share_winner": history.share_of_winner(),
    }
    numbers = {
        name: {str(t): mean_and_error(values) for t, values in enumerate(iterations, start=1)}
        for name, iterations in found.items()
    }
    return Result({"iteration": Table(numbers)}, {"": votes(entry, few)}, None, entry)


@experiment("matrix-capsules/pose", data="mnist", minutes=60, of_runs=True)
def pose(options: Options, *, images: int = 1000) -> Result:
    """Show the effect of each number of a class pose on the decoded image (70 minutes).

    A decoder of the pose of the label's capsule is trained on the poses of the frozen network. Then
    each of the 16 numbers is nudged by deviations of its class. `ink_down` and `ink_across` tell
    how far the center of the ink moves, in pixels per deviation, with the two numbers that the
    coordinates were added to.

    Args:
        images: number of test images.
    """
    data, entry = digits_and_entry(options)
    decoder, guide = decoded(entry, data, options, options.budget / 6)
    few = data.test.images[:images]
    with torch.no_grad(), in_eval_mode(entry.model):
        codes = torch.cat([guide(part) for part in few.split(100)])
        metrics: Numbers = {"squared_error": squared_error(decoder.mean_image(codes), few)}
        for axis, (row, column) in enumerate(RIGHT_COLUMN):
            ends = [nudged(codes, row * POSE + column, by) for by in (-0.5, 0.5)]
            before, after = (ink_center(decoder.mean_image(code)) for code in ends)
            metrics[f"ink_{('down', 'across')[axis]}"] = mean_and_error((after - before)[:, axis])
        rows = {}
        for row, column in product(range(POSE), range(POSE)):
            several = [nudged(codes, row * POSE + column, by.item())[:1] for by in NUDGES]
            rows[f"({row}, {column})"] = decoder.mean_image(torch.cat(several))
    title = "A class pose nudged by -2 to 2 deviations, one element at a time"
    return Result(metrics, {"": image_rows(rows, title)}, None, entry)


def decoded(
    entry: Entry, data: Dataset, options: Options, minutes: float
) -> tuple[VariationalAutoencoder, ClassPose]:
    """Train a decoder of the class poses; return it, and the network as its guide."""
    latent = entry.model.num_classes * POSE * POSE
    decoder = VariationalAutoencoder(data.image_shape, latent)
    guide = ClassPose(decoder, entry.model.to(options.device)).to(options.device)
    known = data.train[:STANDARDIZED]
    guide.standardize(known.images.to(options.device), known.labels.to(options.device))
    pair: Entry = Entry(decoder, {"class_pose": lambda _: guide}, Trace_ELBO())
    how: dict[str, Any] = dict(pace=Pace("linear"), inputs=Inputs(SHIFT, labels=True))
    train(pair, data, options, minutes, name="decoder", **how)
    return decoder, guide


def nudged(codes: Tensor, element: int, by: float) -> Tensor:
    """Return codes (N, classes x 16) with one element of the present class moved by deviations.

    The deviation is the deviation of the element among all codes of the class.
    """
    poses = codes.unflatten(1, (-1, POSE * POSE)).clone()
    label = poses.abs().sum(2).argmax(1)
    for c in label.unique():
        own = label == c
        poses[own, c, element] += by * poses[own, c, element].std(correction=0)
    return poses.flatten(1)


def ink_center(images: Tensor) -> Tensor:
    """Return row and column of the center of the ink, in pixels, (N, 2)."""
    ink = images.mean(1)
    total = ink.sum((1, 2))
    down, across = (torch.arange(n, dtype=ink.dtype) for n in ink.shape[1:])
    return torch.stack([ink.sum(2) @ down / total, ink.sum(1) @ across / total], 1)
