"""Pairs of overlapping digits of different classes, and capsules that separate them.

A pair is an image and the one before it, on 36x36 pixels, shifted by up to 4 as in the paper's
MultiMNIST; every epoch has new pairs. The model explains one of them; its guide sees both, but only
through the capsule of that digit's class (Sabour, Frosst & Hinton 2017, arXiv 1710.09829, section
6). A network without capsules that names the classes of pairs is the baseline.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyro
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor

from capsule_zoo.data import Dataset, Split, load_dataset, transforms
from capsule_zoo.experiments import Job, Options, Result, Study, experiment
from capsule_zoo.experiments.common.findings import (
    group_by_quantity,
    mean_and_error,
    means_of,
    squared_error,
)
from capsule_zoo.experiments.zoo import equal_network as equal
from capsule_zoo.figures.grids import COLUMNS, image_rows
from capsule_zoo.models.common.modes import eval_mode
from capsule_zoo.records import Metrics, Number, Numbers, Table
from capsule_zoo.registry import Entry, load

BORDER = 4  # pixels of the border around a digit, and of its largest shift
SCATTER = transforms.Shift(BORDER)
SIZES: Mapping[str, Any] = {"preset": "overlapping", **equal.VECTOR_CAPSULES}


@dataclass(frozen=True, eq=False)
class Pairs:
    """Pairs of images: images, and images of other classes that lie over them.

    Attributes:
        images, others: (B, C, H, W) each.
        labels, other_labels: classes of `images` and `others`, (B,) each.
    """

    images: Tensor
    labels: Tensor
    others: Tensor
    other_labels: Tensor

    @property
    def overlays(self) -> Tensor:
        """The overlay of every pair, the brighter of both pixels, (B, C, H, W)."""
        return torch.maximum(self.images, self.others)

    def missed_fraction(self, scores: Tensor) -> Number:
        """Return the fraction of pairs whose classes do not have the two highest scores (B, C)."""
        highest = scores.topk(2).indices.sort(1).values
        classes = torch.stack([self.labels, self.other_labels], 1).sort(1).values
        return mean_and_error((highest != classes).any(1).float())


def different_pairs(split: Split, seed: int) -> Pairs:
    """Pair each image with the one before it, both shifted, and leave out pairs of one class."""
    images = SCATTER(split.images, generator=torch.Generator().manual_seed(seed))
    others, other_labels = images.roll(1, 0), split.labels.roll(1, 0)
    differ = split.labels != other_labels
    return Pairs(images[differ], split.labels[differ], others[differ], other_labels[differ])


def take_out(entry: Entry, split: Split, seed: int) -> tuple[Numbers, Figure]:
    """Measure the reconstructions of single capsules of overlays, by the guide's `take_out`.

    Returns:
        Squared errors, sums over pixels, from the image to the reconstruction of its own capsule,
        to the reconstruction of the other image's capsule, and to the overlay; and a figure of
        eight pairs.
    """
    pairs = different_pairs(split, seed)
    pyro.set_rng_seed(seed)
    overlays = pairs.overlays
    drawing = entry.guide.take_out(overlays, pairs.labels)
    other = entry.guide.take_out(overlays, pairs.other_labels)
    rows = {"pair": overlays, "digit": pairs.images, "its capsule": drawing}
    rows["other's capsule"] = other
    drawn = {"own": drawing, "other": other, "pair": overlays}
    errors = {name: squared_error(images, pairs.images) for name, images in drawn.items()}
    preview = {name: images[:COLUMNS] for name, images in rows.items()}
    return errors, image_rows(preview, "Pairs of digits, and what single capsules draw of them")


@experiment(
    "capsule-network/overlap",
    data="mnist",
    minutes=20,
    defaults=dict(rates=(3e-3, 1e-2), tried=0.25),
)
def overlap(options: Options, settings: equal.Search) -> Result:
    """Classify and separate overlapping digits, compared with an equal network (20 core-minutes).

    Digits lie on 36x36 pixels, shifted by up to 4. `cnn` has the stem and as many weights, and
    no capsules; both are tuned on pairs of validation images, as in `equal-network`. `error` is
    the fraction of pairs of different digits whose two classes are not both found, a mean over the
    seeds. `squared_error` is of reconstructions of the first seed; see `take_out`.
    """
    outcomes, tries, _ = equal.tune(
        learn_pairs, "capsule-network", SIZES, settings, options, ["mnist"]
    )
    numbers = means_of(outcomes)
    entry = load(Study(numbers).folders(options.within("trained"))["mnist-capsules"])
    squares, figure = take_out(entry, load_padded(options).test, options.seed)
    names = {"capsules": "mnist-capsules", "cnn": "mnist-plain"}
    errors = {name: equal.under(f"{key}-", tries) for name, key in names.items()}
    metrics: Metrics = {
        **group_by_quantity({name: numbers[key] for name, key in names.items()}),
        "squared_error": squares,
        "validation error": Table(errors, "validation_{quantity}_{variant}"),
    }
    return Result(metrics, {"": figure}, None, entry)


def load_padded(options: Options) -> Dataset:
    """Load MNIST on 36x36 pixels."""
    data = load_dataset("mnist", root=options.data_root)
    return data.transform_images(lambda digits: F.pad(digits, (BORDER,) * 4))


def learn_pairs(job: Job[equal.Task]) -> Numbers:
    """Train one network on pairs; return its error on pairs, and the facts of its training."""
    data, is_try = load_padded(job.options), job.variant.is_try
    entry, facts = equal.fit_network(job, data, SCATTER)
    split = data.validation if is_try else data.test
    pairs = different_pairs(split, job.options.seed)
    with torch.no_grad(), eval_mode(entry.model), eval_mode(entry.guide):
        scores = map(equal.reader_of(entry).scores, pairs.overlays.split(500))
        error = pairs.missed_fraction(torch.cat([*scores]))
    return {"validation_error": error} if is_try else {"error": error, **facts}
