"""Pairs of overlapping digits of different classes, and entries that take them apart.

Two digits lie over each other. A model explains one of them; its guide sees both, but only through
the capsule of that digit's class (Sabour, Frosst & Hinton 2017, arXiv 1710.09829, section 6). Such
capsules stand beside a network without capsules that names the classes of pairs (`beside_equal`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pyro
import torch
from matplotlib.figure import Figure
from torch import Tensor

from capsule_zoo.data import Dataset, Split
from capsule_zoo.experiments import Job, Options, Result, Study
from capsule_zoo.experiments.common.findings import (
    by_quantity,
    mean_and_error,
    means_of,
    squared_error,
)
from capsule_zoo.experiments.zoo import equal_network as equal
from capsule_zoo.figures.grids import image_rows
from capsule_zoo.models.common.modes import in_eval_mode
from capsule_zoo.records import Metrics, Number, Numbers, Table
from capsule_zoo.registry import Entry, load


@dataclass(frozen=True, eq=False)
class Pairs:
    """Images, and images of other classes that lie over them.

    Attributes:
        images, others: (B, C, H, W) each.
        labels, other_labels: their classes, (B,) each.
    """

    images: Tensor
    labels: Tensor
    others: Tensor
    other_labels: Tensor

    @property
    def overlays(self) -> Tensor:
        """The brighter pixels of both images of every pair, (B, C, H, W)."""
        return torch.maximum(self.images, self.others)

    def missed(self, scores: Tensor) -> Number:
        """Return the share of pairs whose classes do not have the two highest scores (B, C)."""
        highest = scores.topk(2).indices.sort(1).values
        classes = torch.stack([self.labels, self.other_labels], 1).sort(1).values
        return mean_and_error((highest != classes).any(1).float())


def different_pairs(split: Split, scatter: Callable[..., Tensor], seed: int) -> Pairs:
    """Return each image over the one before it, without the pairs of one class.

    Args:
        scatter: a transform that moves images, called with images and a `generator`.
    """
    images = scatter(split.images, generator=torch.Generator().manual_seed(seed))
    others, other_labels = images.roll(1, 0), split.labels.roll(1, 0)
    differ = split.labels != other_labels
    return Pairs(images[differ], split.labels[differ], others[differ], other_labels[differ])


def missed(entry: Entry, scores: Callable[[Tensor], Tensor], pairs: Pairs) -> Number:
    """Return the share of pairs whose two classes an entry's scores do not both find."""
    with torch.no_grad(), in_eval_mode(entry.model), in_eval_mode(entry.guide):
        return pairs.missed(torch.cat([scores(part) for part in pairs.overlays.split(500)]))


def taken_out(
    entry: Entry, split: Split, scatter: Callable[..., Tensor], seed: int
) -> tuple[Numbers, Figure]:
    """Draw single capsules of overlays with the guide's `take_out`.

    Args:
        split, scatter, seed: see `different_pairs`; the seed is also of the drawings.

    Returns:
        Squared errors, sums over pixels, from the image to the drawing of its own capsule, to the
        drawing of the other image's capsule, and to the overlay; and a picture of twelve pairs.
    """
    pairs = different_pairs(split, scatter, seed)
    pyro.set_rng_seed(seed)
    overlays = pairs.overlays
    own = entry.guide.take_out(overlays, pairs.labels)
    other = entry.guide.take_out(overlays, pairs.other_labels)
    drawn = {"own": own, "other": other, "pair": overlays}
    errors = {name: squared_error(found, pairs.images) for name, found in drawn.items()}
    rows = {"pair": overlays, "digit": pairs.images, "its capsule": own, "other's capsule": other}
    shown = {name: images[:12] for name, images in rows.items()}
    return errors, image_rows(shown, "Pairs of digits, and what single capsules draw of them")


@dataclass(frozen=True)
class Overlaid(equal.Search):
    """The settings of the comparison on pairs: `Search`, and the number of test images.

    Args:
        images: number of test images, of which pairs are made; those of one class are left out.
    """

    rates: tuple[float, ...] = (3e-3, 1e-2)
    tried: float = 0.25
    images: int = 10_000


def beside_equal(
    like: str,
    given: Overlaid,
    options: Options,
    read: Callable[[Options], Dataset],
    scatter: Callable[..., Tensor],
) -> Result:
    """Compare an entry that takes pairs apart with an equal network; see `capsule-network/overlap`.

    Args:
        like: name of the entry.
        read: returns the digits.
        scatter: see `different_pairs`.
    """
    learn = partial(learn_pairs, read=read, scatter=scatter)
    outcomes, tried, _ = equal.tuned(learn, like, given, options, ["mnist"])
    found = means_of(outcomes)
    capsules = load(Study(found).folders(options.within("trained"))["mnist-capsules"])
    test = read(options).test[: given.images]
    squares, figure = taken_out(capsules, test, scatter, options.seed)
    names = {"capsules": "mnist-capsules", "cnn": "mnist-plain"}
    errors = {name: equal.under(f"{key}-", tried) for name, key in names.items()}
    metrics: Metrics = {
        **by_quantity({name: found[key] for name, key in names.items()}),
        "squared_error": squares,
        "validation error": Table(errors, "validation_{quantity}_{variant}"),
    }
    return Result(metrics, {"": figure}, None, capsules)


def learn_pairs(
    job: Job[equal.Task[Overlaid]],
    *,
    read: Callable[[Options], Dataset],
    scatter: Callable[..., Tensor],
) -> Numbers:
    """Train one network on pairs; return its error on them, and the facts of its training."""
    data = read(job.options)
    entry, facts = equal.fitted(job, data, scatter)
    is_try, scores = job.variant.is_try, equal.reader_of(entry).scores
    split = data.validation if is_try else data.test[: job.variant.given.images]
    error = missed(entry, scores, different_pairs(split, scatter, job.options.seed))
    return {"validation_error": error} if is_try else {"error": error, **facts}
