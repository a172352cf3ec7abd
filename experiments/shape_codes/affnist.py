"""Shape codes trained on shifted digits, tested on digits under affine maps."""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from capsule_zoo.data import Split, load_dataset, transforms
from capsule_zoo.experiments import Options, Result, experiment
from capsule_zoo.experiments.common.findings import group_by_quantity, mean_and_error, snake_case
from capsule_zoo.experiments.shape_codes.objects import (
    PENALTY,
    PROBED,
    TEMPERATURE,
    best_of,
    create_on_published_parts,
    read_objects,
    train_objects,
)
from capsule_zoo.figures.grids import COLUMNS, image_rows
from capsule_zoo.guides.parts.rotations import center_images
from capsule_zoo.inference.probes import fit_probe
from capsule_zoo.models.parts.part_sets import from_part_sets
from capsule_zoo.records import Number
from capsule_zoo.registry import Entry
from capsule_zoo.zoo.shape_codes.entry import parse_dataset, part_sets

DEGREES, SHEAR, SCALE_X, SCALE_Y = range(4)  # columns of the motions; scales are logarithms
IMAGES = 10_000  # number of digits under affine maps that are tested
# Moves at each step of the search: the columns that change together, and the changes.
SEARCH: tuple[tuple[str, tuple[int, ...], tuple[float, ...]], ...] = (
    ("rotated", (DEGREES,), (-20.0, -10.0, 10.0, 20.0)),
    ("scaled", (SCALE_X, SCALE_Y), (-0.17, 0.17)),
    ("sheared", (SHEAR,), (-0.15, 0.15)),
    ("stretched along x", (SCALE_X,), (-0.12, 0.12)),
    ("stretched along y", (SCALE_Y,), (-0.12, 0.12)),
    ("rotated again", (DEGREES,), (-5.0, 5.0)),
)


class Reading(NamedTuple):
    """Results for N digits that were moved before they were parsed.

    Attributes:
        motions: the motion of each digit, (N, 4).
        explained: log density of the parts in the frame of the original digits, (N,), in nats.
        answers: predicted classes, (N,).
    """

    motions: Tensor
    explained: Tensor
    answers: Tensor


@experiment("shape-codes/affnist", data="affnist", minutes=30)
def affnist(options: Options) -> Result:
    """Classify digits under affine maps by objects of shifted digits (30 minutes).

    The parts are of published weights, frozen, and every digit is seen with its ink in the
    middle. Objects and a linear probe are fitted to shifted training digits alone. Each test digit
    is then moved step by step (rotated, scaled, sheared) to where the objects explain its parts
    best. `accuracy_...` is the probe's accuracy after each step.
    """
    data = load_dataset("affnist", root=options.data_root).transform_images(center_ink)
    entry = create_on_published_parts(64, options.seed, "part-whole-affnist", 0.0175)
    options.say("Parsing all images")
    sets = parse_dataset(data, options.seed, guide=entry.guide)
    train_objects(entry, sets, options)
    training_set = sets.train[:PROBED]
    features = read_objects(entry.guide, training_set.images, TEMPERATURE).features()
    probe = fit_probe(features, training_set.labels, PENALTY)
    test = data.test[:IMAGES]
    options.say(f"Moving {len(test):,} images")
    accuracies, motions = moved_digits(entry, probe, test)
    preview = test.images[:COLUMNS]
    images = {"image": preview, "moved": move_images(preview, motions[: len(preview)])}
    figure = image_rows(
        images, "Digits under affine maps, and moved to where objects explain their parts best"
    )
    rows = {snake_case(name): {"accuracy": number} for name, number in accuracies.items()}
    return Result(group_by_quantity(rows), {"": figure}, None, entry)


def center_ink(images: Tensor) -> Tensor:
    """Center the ink of images (N, C, H, W)."""
    return torch.cat([center_images(batch)[0] for batch in images.split(2000)])


def moved_digits(entry: Entry, probe: Any, test: Split) -> tuple[dict[str, Number], Tensor]:
    """Classify digits, each moved to where the objects explain its parts best.

    Returns:
        The accuracy before the search and after each of its steps, and the best motions found,
        (N, 4).
    """
    best = read_moved(entry, probe, test, torch.zeros(len(test), 4))
    accuracies = {"as they are": accuracy(best, test)}
    for name, columns, amounts in SEARCH:
        readings = [best]
        for amount in amounts:
            motions = best.motions.clone()
            motions[:, list(columns)] += amount
            readings.append(read_moved(entry, probe, test, motions))
        best, _ = best_of(readings, lambda reading: reading.explained)
        accuracies[name] = accuracy(best, test)
    return accuracies, best.motions


def read_moved(entry: Entry, probe: Any, test: Split, motions: Tensor) -> Reading:
    """Infer the objects and classes of digits after `motions` (N, 4).

    Poses of parts grow with the digit. Their density in the frame of the original digit has a
    factor |det L|^3 for each present part, where L is the linear map of the motion.
    """
    images = center_ink(move_images(test.images, motions))
    sets = part_sets(entry.guide.with_scope("parts"), replace(test, images=images))
    objects = read_objects(entry.guide, sets.images, TEMPERATURE)
    present = from_part_sets(sets.images).presence.sum(-1)
    grown = 3 * present * torch.linalg.det(matrices_of(motions)[..., :2]).log()
    answers = torch.from_numpy(probe.predict(objects.features()))
    return Reading(motions, objects.explained + grown, answers)


def matrices_of(motions: Tensor) -> Tensor:
    """Return the affine matrices (N, 2, 3) of motions (N, 4)."""
    degrees, shear, scale_x, scale_y = motions.unbind(-1)
    return transforms.motion(degrees, shear, (scale_x.exp(), scale_y.exp()))


def move_images(images: Tensor, motions: Tensor) -> Tensor:
    """Move images (N, C, H, W) by motions (N, 4)."""
    return transforms.warp_images(images, matrices_of(motions)).clamp(0, 1)


def accuracy(reading: Reading, test: Split) -> Number:
    """Return the fraction of right classes, with its standard error."""
    return mean_and_error((reading.answers == test.labels).double())
