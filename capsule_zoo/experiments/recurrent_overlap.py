"""Two digits, one over the other, taken apart by masking capsules.

The model explains one digit of the two. Its guide sees both, but only the capsule of the digit's
class speaks to it; the margin loss asks for the capsules of both. To take digits apart is thus
inference, and the loss bounds log p(digit) whatever else the guide looks at.

Pairs are made within a batch, of each image and the one before it, shifted by up to 4 pixels.
Reference: Sabour, Frosst & Hinton 2017 (arXiv 1710.09829), section 6, on MultiMNIST.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyro
import torch
import torch.nn.functional as F
from torch import Tensor

from capsule_zoo.data import Binarize, Dataset, Split
from capsule_zoo.data.transforms import Shift
from capsule_zoo.experiments import Options, Result, experiment
from capsule_zoo.experiments.energy import binary_mnist
from capsule_zoo.experiments.findings import mean_and_error, squared_error
from capsule_zoo.experiments.recurrent_capsules import WEIGHED
from capsule_zoo.experiments.training import train
from capsule_zoo.figures.grids import image_rows
from capsule_zoo.guides import DynamicRouting, RecurrentEncoder
from capsule_zoo.models import RecurrentCapsules
from capsule_zoo.models.blocks.vector_capsules import margin_loss
from capsule_zoo.models.modes import in_eval_mode
from capsule_zoo.models.recurrent_capsules import PRESETS, Drawing
from capsule_zoo.records import Metrics
from capsule_zoo.registry import Entry, create


def with_previous(values: Tensor) -> Tensor:
    """The larger of each row and the one before it: images overlap, one-hot labels unite."""
    return torch.maximum(values, values.roll(1, 0))


def scattered(images: Tensor, *, generator: torch.Generator) -> Tensor:
    """Images shifted by up to 4 pixels along each axis, and binarised."""
    return Binarize()(Shift(4)(images, generator=generator), generator=generator)


class OverlappingCapsules(RecurrentCapsules):
    """Explains images (B, C, H, W), and the classes of each of them and the one before."""

    def forward(
        self, images: Tensor | None = None, labels: Tensor | None = None, batch_size: int = 1
    ) -> Tensor:
        drawn = super().forward(images, None, batch_size)
        self.check_labels(labels)
        if labels is not None:
            there = with_previous(F.one_hot(labels, self.num_classes))
            loss = margin_loss(self.classify(with_previous(drawn)), there)
            pyro.factor("label", -self.label_weight * loss.sum())
        return drawn


class OverlappingEncoder(RecurrentEncoder):
    """Sees each image under the one before, and draws it by the capsule of its label."""

    def forward(
        self, images: Tensor, labels: Tensor | None = None, attend: Tensor | None = None
    ) -> list[Drawing]:
        if labels is not None:
            attend = F.one_hot(labels, self.model.num_classes)
        return super().forward(with_previous(images), attend=attend)

    @torch.no_grad()
    def take_out(self, pairs: Tensor, labels: Tensor) -> Tensor:
        """Mean image of what pairs (B, C, H, W) hold of classes (B,)."""
        attend = F.one_hot(labels, self.model.num_classes)
        with in_eval_mode(self):
            return super().forward(pairs, attend=attend)[-1].mean


def overlapping(data: Dataset) -> Entry:
    """The entry `recurrent-capsules` with model and guide for pairs."""
    sizes: dict[str, Any] = dict(image_shape=data.image_shape, classes=data.num_classes)
    model = OverlappingCapsules(DynamicRouting(fair=False), **sizes, **PRESETS["small"])
    entry = create("recurrent-capsules", **sizes)
    return replace(entry, model=model, guide=OverlappingEncoder(model))


def different_pairs(split: Split, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Test digits, their labels, and those of the digits over them, which are of other classes."""
    images = scattered(split.images, generator=torch.Generator().manual_seed(seed))
    others, other_labels = images.roll(1, 0), split.labels.roll(1, 0)
    differ = split.labels != other_labels
    return images[differ], split.labels[differ], others[differ], other_labels[differ]


@experiment("recurrent-capsules/overlap", data="mnist")
def overlap(options: Options) -> Result:
    """Overlapping digits taken apart by masking all capsules but one (90 minutes).

    Squared errors are sums over pixels, to the digit: of what its own capsule draws, of what the
    other digit's capsule draws, and of the pair as it is.
    """
    options.refuse_run()
    data = binary_mnist(options)
    entry = overlapping(data)
    train(entry, data, options, options.minutes or 90, transform=scattered, labels=True)
    digits, labels, others, other_labels = different_pairs(data.test[:WEIGHED], options.seed)
    pairs = torch.maximum(digits, others)
    pyro.set_rng_seed(options.seed)
    own = entry.guide.take_out(pairs, labels)
    other = entry.guide.take_out(pairs, other_labels)
    shown = {"own": own, "other": other, "pair": pairs}
    errors = {name: squared_error(found, digits) for name, found in shown.items()}
    with torch.no_grad():
        longest = entry.model.classify(pairs).topk(2).indices.sort(1).values
    right = (longest == torch.stack([labels, other_labels], 1).sort(1).values).all(1).float()
    metrics: Metrics = {"squared_error": errors, "both_classes": mean_and_error(right)}
    shown = {"pair": pairs, "digit": digits, "its capsule": own}
    rows = {name: images[:12] for name, images in {**shown, "other's capsule": other}.items()}
    figure = image_rows(rows, "Pairs of digits, and what single capsules draw of them")
    return Result(metrics, {"": figure})
