"""Pairs of overlapping test images of different classes, and networks that take them apart.

Two digits lie over each other. A model explains one of them; its guide sees both, but only through
the capsule of that digit's class. A network without capsules names the classes only (Sabour, Frosst
& Hinton 2017, arXiv 1710.09829, section 6).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pyro
import torch
from matplotlib.figure import Figure
from pyro.infer import Trace_ELBO
from torch import Tensor, nn

from capsule_zoo.data import Dataset, Split
from capsule_zoo.experiments import Job, Options, Result, Study, train
from capsule_zoo.experiments.common.findings import (
    by_quantity,
    mean_and_error,
    means_of,
    single,
    squared_error,
)
from capsule_zoo.figures.grids import image_rows
from capsule_zoo.guides import ExactLabel
from capsule_zoo.inference import Inputs
from capsule_zoo.models.baselines.cnn import OverlappingClassifier
from capsule_zoo.models.common.modes import in_eval_mode
from capsule_zoo.records import Number, Numbers
from capsule_zoo.registry import Entry, create, load


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

    def both_right(self, scores: Tensor) -> Number:
        """Return the share of pairs whose classes have the two highest scores (B, classes)."""
        highest = scores.topk(2).indices.sort(1).values
        classes = torch.stack([self.labels, self.other_labels], 1).sort(1).values
        return mean_and_error((highest == classes).all(1).float())

    def missed(self, scores: Tensor) -> Number:
        """Return the share of pairs whose two classes are not both found; see `both_right`."""
        right, error, count = self.both_right(scores)
        return 1 - right, error, count


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


def taken_out(entry: Entry, pairs: Pairs) -> tuple[Numbers, Figure]:
    """Draw single capsules of overlays with the guide's `take_out`.

    Returns:
        Squared errors, sums over pixels, from the image to the drawing of its own capsule, to the
        drawing of the other image's capsule, and to the overlay; and a picture of twelve pairs.
    """
    overlays = pairs.overlays
    own = entry.guide.take_out(overlays, pairs.labels)
    other = entry.guide.take_out(overlays, pairs.other_labels)
    drawn = {"own": own, "other": other, "pair": overlays}
    errors = {name: squared_error(found, pairs.images) for name, found in drawn.items()}
    rows = {"pair": overlays, "digit": pairs.images, "its capsule": own, "other's capsule": other}
    shown = {name: images[:12] for name, images in rows.items()}
    return errors, image_rows(shown, "Pairs of digits, and what single capsules draw of them")


@dataclass(frozen=True)
class Overlap:
    """An entry that separates overlapping digits, and the digits.

    Attributes:
        entry: name of the entry.
        data: function of the options that returns the digits.
        scatter: a transform that moves digits, as in `different_pairs`.
        reader: function of the entry that returns its network of pairs, whose parameters count, and
            the function that gives scores (B, classes) to overlays.
    """

    entry: str
    data: Callable[[Options], Dataset]
    scatter: Callable[..., Tensor]
    reader: Callable[[Entry], tuple[nn.Module, Callable[[Tensor], Tensor]]]


def separated(options: Options, what: Overlap, images: int, cnn: Mapping[str, Any]) -> Result:
    """Train an entry and a convolutional network side by side, and let both read pairs.

    Each has half of the minutes.

    `error` is the share of pairs of different digits whose two classes are not both found;
    `squared_error` is explained at `taken_out`.

    Args:
        images: number of test images, of which pairs are made.
        cnn: sizes of the convolutional network.
    """
    timed = replace(options, minutes=options.budget)
    study = Study(dict.fromkeys(("capsules", "cnn"), what))
    options.say(f"Training {' and '.join(study.variants)}")
    found = means_of(study.run(learn, timed, images=images, cnn=cnn))
    capsules = load(study.folders(timed)["capsules"])
    pairs = different_pairs(what.data(options).test[:images], what.scatter, options.seed)
    pyro.set_rng_seed(options.seed)
    errors, figure = taken_out(capsules, pairs)
    return Result({**by_quantity(found), "squared_error": errors}, {"": figure}, None, capsules)


def learn(job: Job[Overlap], *, images: int, cnn: Mapping[str, Any]) -> Numbers:
    """Train the network of the job's name; return its error on pairs, parameters and updates."""
    what, options = job.variant, job.options
    data = what.data(options)
    training = create(what.entry, image_shape=data.image_shape).training
    pyro.set_rng_seed(options.seed)
    if job.name == "cnn":
        plain = OverlappingClassifier(data.image_shape, **cnn)
        guides = {"exact": lambda entry: ExactLabel(entry.model)}
        entry: Entry = Entry(plain, guides, Trace_ELBO(), dict(training))
        network: nn.Module = plain
        scores = plain.scores
    else:
        entry = create(what.entry, image_shape=data.image_shape)
        network, scores = what.reader(entry)
    run = train(entry, data, options, options.budget, inputs=Inputs(what.scatter, labels=True))
    pairs = different_pairs(data.test[:images], what.scatter, options.seed)
    return {
        "error": missed(entry, scores, pairs),
        "updates": single(run.steps),
        "parameters": single(sum(p.numel() for p in network.parameters())),
    }
