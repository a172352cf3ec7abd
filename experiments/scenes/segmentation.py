"""Segmentation, positions and classes of the objects of scenes.

The adjusted Rand index of the pixels of true objects (foreground ARI) is the measure of IODINE,
MONet and slot attention: Locatello et al. 2020 (arXiv 2006.15055), table 1, have .913 on
multi-dSprites and .995 on Tetrominoes. Our data follow theirs but are our own.
"""

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import torch
from scipy import ndimage
from torch import Tensor

from capsule_zoo.data import Split, load_dataset
from capsule_zoo.data.scenes import CELL, boxes_of, tetromino_bank
from capsule_zoo.experiments import Job, Options, Result, Study, create_untrained, experiment, train
from capsule_zoo.experiments.common.findings import group_by_quantity, mean_and_error, with_worst
from capsule_zoo.experiments.scenes.counts import DATA, PLACES, right_counts
from capsule_zoo.experiments.shape_codes.objects import measure_clusters, read_objects
from capsule_zoo.inference import Checks
from capsule_zoo.inference.objects import (
    FoundObjects,
    box_overlap,
    box_overlaps,
    find_objects,
    foreground_ari,
)
from capsule_zoo.inference.segmentation import adjusted_rand_index
from capsule_zoo.models.scenes.pictures import crop
from capsule_zoo.records import Number
from capsule_zoo.registry import Entry, load
from capsule_zoo.zoo.scenes.figures import found_objects
from capsule_zoo.zoo.shape_codes.entry import part_sets

Cells = frozenset[tuple[int, ...]]
READER = "shape-codes-mnist"
MET = 0.3  # overlap of boxes above which a digit counts as found
INK = 0.3  # brightness above which a pixel is ink
FAINT = 0.03  # covered fraction of a pixel below which an object ends
BRIGHTER = 1.2  # factor of brightness, because shrunk and enlarged strokes are paler
CRUMB = 0.2  # ink of a piece, relative to the largest piece, below which it is of another digit
DIGITS = "multi-mnist"
LENGTH = 12.0  # training time on each data set, in minutes of the processor
TEST_SCENES = 2000  # test scenes of each data set, at most; sprites and tetrominoes have 1,000
FINDING: dict[str, dict[str, Any]] = {  # arguments of `find_objects`, chosen on training scenes
    DIGITS: dict(temperature=PLACES, draws=20),
    "multi-sprites": dict(draws=20),
    "tetrominoes": dict(temperature=0.5, draws=60),
}
SIZES: dict[str, dict[str, Any]] = {
    DIGITS: dict(counts="learned"),
    "multi-sprites": dict(
        slots=6,
        window=20,
        size=18.0,
        size_spread=0.25,
        sigma_image=0.2,
        counts="learned",
        ground="color",
        thing_settings=dict(latent=10, guide=dict(hidden=64)),
    ),
    "tetrominoes": dict(
        slots=3,
        window=20,
        size=20.0,
        size_spread=0.05,
        sigma_image=0.2,
        counts="learned",
        blur=0.12,
        temperature=0.125,
        thing_settings=dict(latent=8, guide=dict(hidden=64)),
    ),
}


@experiment("scenes/segmentation", data="multi-mnist", minutes=200)
def segmentation(options: Options, *, seeds: int = 5) -> Result:
    """Segment digits, sprites and tetrominoes, and classify the digits (over three core-hours).

    `ari_...` is over the pixels of objects, in scenes of two or more; a pixel may be assigned to
    the ground, which then counts as one more segment. `iou` is the overlap of the box of every true
    digit's ink with the best box. `cluster_accuracy` is the fraction of the found digits whose kind
    stands for their class: a window around each digit is encoded by `shape-codes-mnist`, which
    learned kinds without labels. `..._worst` is of the worst seed. Digits and tetrominoes are found
    with sampled positions of attention, as in `scenes/counts`, at temperatures of .1 and .5.

    Args:
        seeds: number of seeds.
    """
    study = Study(SIZES, seeds)
    outcomes = study.run(one_set, options)
    rows = {name.replace("-", "_"): with_worst(numbers) for name, numbers in outcomes.items()}
    metrics: dict[str, Any] = group_by_quantity(rows)
    for name in [name for name, sets in metrics.items() if len(sets) == 1]:  # of digits alone
        metrics[name] = metrics[name]["multi_mnist"]
    splits = {n: load_dataset(n, options.data_root).test[:TEST_SCENES] for n in SIZES}
    best, ambiguous = best_of_pieces(splits["tetrominoes"].images)
    metrics["ari"]["tetrominoes_best"], metrics["ambiguous_tetrominoes"] = best, ambiguous
    folders = study.folders(options)
    filled = {n: split.images[split.labels > 0] for n, split in splits.items()}  # scenes to draw
    figures = {n.replace("-", "_"): found_objects(load(folders[n]), filled[n]) for n in SIZES}
    return Result(metrics, figures)


def one_set(job: Job[dict[str, Any]]) -> dict[str, Number]:
    """Train an entry of the job's arguments on its data set, and measure the segmentation."""
    name, options = job.name, job.options
    data = load_dataset(DATA if name == DIGITS else name, options.data_root)
    entry = create_untrained("scenes", data, options, **job.variant)
    test, digits = data.test[:TEST_SCENES], name == DIGITS
    minutes, checks = options.minutes or LENGTH, Checks(clock="processor")
    train(entry, data, options, minutes, batch_size=64 if digits else 16, checks=checks)
    objects, numbers = measure_objects(entry, test, **FINDING[name])
    if digits:
        overlaps = box_overlaps(objects.boxes, objects.presence, test.objects)
        numbers["iou"] = mean_and_error(overlaps)
        labelled = load_dataset("mnist", options.data_root).train
        numbers["cluster_accuracy"] = name_digits(test, objects, labelled)
    return numbers


def measure_objects(
    entry: Entry, test: Split, **arguments: Any
) -> tuple[FoundObjects, dict[str, Number]]:
    """Find the objects of scenes; return them, their ARI and the fraction of right counts."""
    objects = find_objects(entry.model, entry.guide, test.images, **arguments)
    ari = foreground_ari(objects.numbers, test.objects)
    right = mean_and_error(right_counts(objects, test))
    return objects, {"ari": mean_and_error(ari[~ari.isnan()]), "count_accuracy": right}


def best_of_pieces(images: Tensor) -> tuple[Number, Number]:
    """Return the largest expected ARI on tetrominoes, and the fraction of ambiguous scenes.

    Pieces of one color that touch may be cut in several ways, which are equally likely.
    """
    pieces = [frozenset(map(tuple, piece.nonzero().tolist())) for piece in tetromino_bank()]
    best, ambiguous = [], []
    for cells in images[..., CELL // 2 :: CELL, CELL // 2 :: CELL]:
        colors = {
            (r, c): tuple(cells[:, r, c].tolist()) for r, c in cells.any(0).nonzero().tolist()
        }
        one = [{at for at in colors if colors[at] == color} for color in set(colors.values())]
        cut = [sum(parts, ()) for parts in product(*(cuts(frozenset(c), pieces) for c in one))]
        ways = [[next(n for n, p in enumerate(w) if at in p) for at in colors] for w in cut]
        owners = torch.tensor(ways)
        every = torch.ones_like(owners, dtype=torch.bool)
        agreement = [adjusted_rand_index(owners, w.expand_as(owners), every) for w in owners]
        best.append(max(scores.mean().item() for scores in agreement))
        ambiguous.append(float(len(cut) > 1))
    return mean_and_error(best), mean_and_error(ambiguous)


def cuts(cells: Cells, pieces: Sequence[Cells]) -> list[tuple[Cells, ...]]:
    """Return all partitions of cells into pieces."""
    if not cells:
        return [()]
    row, column = min(cells)
    moved = {
        frozenset((row + r - down, column + c - right) for r, c in piece)
        for piece in pieces
        for down, right in piece
    }
    return [(one, *rest) for one in moved if one <= cells for rest in cuts(cells - one, pieces)]


def name_digits(scenes: Split, objects: FoundObjects, labelled: Split) -> Number:
    """Return the fraction of true digits that are found with a kind of their class.

    A window around each found digit, in MNIST's scale and position, is encoded by `READER`, without
    small separate pieces. The class of a kind is the commonest class of its training digits,
    `labelled`.
    """
    codes = load(READER)
    scene, digit = (scenes.objects.classes >= 0).nonzero(as_tuple=True)
    overlaps = box_overlap(scenes.objects.boxes[:, :, None], objects.boxes[:, None])
    best = torch.where(objects.presence[:, None], overlaps, 0)[scene, digit].max(-1)
    met = best.values > MET
    if not met.any():
        return 0.0, 0.0, len(met)
    owners = torch.where(objects.cover >= FAINT, objects.owners, 0)[scene[met]]
    windows = windows_of(scenes.images[scene[met]], owners, best.indices[met])
    splits = labelled, Split(windows, scenes.objects.classes[scene, digit][met])
    sets = [part_sets(codes.guide.with_scope("parts"), split).images for split in splits]
    beliefs = [read_objects(codes.guide, parts).belief for parts in sets]
    fraction, _, _ = measure_clusters(beliefs, [split.labels for split in splits])[
        "cluster_accuracy"
    ]
    right = fraction * met.float().mean().item()
    return right, (right * (1 - right) / len(met)) ** 0.5, len(met)


def windows_of(images: Tensor, owners: Tensor, slot: Tensor) -> Tensor:
    """Crop one object of each image into MNIST's format, (n, 1, 28, 28).

    The ink's longer side is 20 of 28 pixels, and its center of mass is the center of pixel 14,
    counted from 0.

    Args:
        owners: the object of every pixel, (n, H, W).
        slot: the number of the cropped object, from 0, (n,).
    """
    ink = without_crumbs(images * (owners == 1 + slot[:, None, None])[:, None])
    box = boxes_of(ink[:, 0] > INK)
    height, width = images.shape[-2:]
    side = (box[:, 2:] - box[:, :2]).amax(-1).clamp_min(4)
    mass = ink[:, 0].sum((1, 2)).clamp_min(1e-6)
    x = (ink[:, 0].sum(1) * torch.linspace(-1 + 1 / width, 1 - 1 / width, width)).sum(1) / mass
    y = (ink[:, 0].sum(2) * torch.linspace(-1 + 1 / height, 1 - 1 / height, height)).sum(1) / mass
    pose = torch.stack([(side * 28 / 20).log(), x - side / 20 / width, y - side / 20 / height], -1)
    usual = torch.tensor([1 / width, 1 / height])
    return (BRIGHTER * crop(ink, pose, (28, 28), usual, mode="bicubic")).clamp(0, 1)


def without_crumbs(ink: Tensor) -> Tensor:
    """Remove small pieces, which belong to other digits, from digits (n, 1, H, W); see `CRUMB`."""
    whole = ink.clone()
    for digit in whole[:, 0].numpy():
        pieces, number = ndimage.label(digit > 0.1, np.ones((3, 3)))
        weight = ndimage.sum_labels(digit, pieces, range(1, 1 + number))
        crumbs = 1 + np.flatnonzero(weight < CRUMB * weight.max(initial=0))
        digit[np.isin(pieces, crumbs)] = 0
    return whole
