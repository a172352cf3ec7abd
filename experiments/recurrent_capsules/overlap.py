"""Two overlapping digits, separated by masking capsules.

The model explains one digit of the two. Its guide sees both, but only through the capsule of the
digit's class. The margin loss asks for the capsules of both classes. Separating digits is thus
inference, and without labels the loss bounds log p(digit).

A pair is made of each image of a batch and the one before it, shifted by up to 4 pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from capsule_zoo.data import Binarize
from capsule_zoo.data.transforms import Shift
from capsule_zoo.experiments import Options, Result, experiment
from capsule_zoo.experiments.common.energy import binary_mnist
from capsule_zoo.experiments.common.overlaps import Overlap, separated
from capsule_zoo.registry import Entry

CNN: Mapping[str, Any] = dict(channels=(32, 64), hidden=129)  # as many parameters as the capsules


def scattered(images: Tensor, *, generator: torch.Generator) -> Tensor:
    """Return images shifted by up to 4 pixels along each axis, and binarized."""
    return Binarize()(Shift(4)(images, generator=generator), generator=generator)


def reader(entry: Entry) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """Return the capsules that look at pairs."""
    return entry.model.reader, entry.model.classify


@experiment("recurrent-capsules/overlap", data="mnist", minutes=90)
def overlap(options: Options, *, images: int = 1000, cnn: Mapping[str, Any] = CNN) -> Result:
    """Separate overlapping digits by masking all capsules but one (90 minutes).

    Squared errors are sums over pixels, to the digit: of the drawing of its own capsule, of the
    drawing of the other digit's capsule, and of the pair as it is. A convolutional network with as
    many parameters as the capsules that read the pair is trained for half of the minutes, with the
    same settings, and names the classes only. `error` is the share of pairs whose two classes are
    not both found.

    Args:
        images: number of test images; pairs of one class are left out.
        cnn: sizes of the convolutional network.
    """
    what = Overlap("overlapping-capsules", binary_mnist, scattered, reader)
    return separated(options, what, images, cnn)
