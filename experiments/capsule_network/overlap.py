"""Two overlapping digits, named and separated by the capsule network (Sabour et al. 2017).

A pair is made of each image of a batch and the one before it. Both lie on 36x36 pixels, shifted by
up to 4 pixels, as in the paper's MultiMNIST, whose files have more pairs than ours: every epoch has
new ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from capsule_zoo.data import Dataset, load_dataset, transforms
from capsule_zoo.experiments import Options, Result, experiment
from capsule_zoo.experiments.common.overlaps import Overlap, separated
from capsule_zoo.registry import Entry

BORDER = 4  # pixels around a digit, and how far it is shifted
CNN: Mapping[str, Any] = dict(channels=(16, 32), hidden=58)  # as many parameters as the guide


def scattered(images: Tensor, *, generator: torch.Generator) -> Tensor:
    """Return images shifted by up to 4 pixels along each axis."""
    return transforms.Shift(BORDER)(images, generator=generator)


def padded(options: Options) -> Dataset:
    """Return MNIST on 36x36 pixels."""
    data = load_dataset("mnist", root=options.data_root)
    return data.transformed(lambda digits: F.pad(digits, (BORDER,) * 4))


def reader(entry: Entry) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """Return the guide, which reads pairs."""
    return entry.guide, entry.guide.scores


@experiment("capsule-network/overlap", data="mnist", minutes=60)
def overlap(
    options: Options, *, epochs: int = 10, images: int = 10_000, cnn: Mapping[str, Any] = CNN
) -> Result:
    """Name and separate two overlapping digits, beside a convolutional network (an hour).

    Digits lie on 36x36 pixels, shifted by up to 4. `error` is the share of pairs of different
    digits whose two classes are not both found. The networks are trained side by side where there
    are two cores.

    Args:
        epochs: passes over all of MNIST, of both networks, in a full run of an hour.
        images: number of test images; pairs of one class are left out.
        cnn: sizes of the convolutional network.
    """
    what = Overlap("overlapping-capsule-network", padded, scattered, reader)
    return separated(options, what, images, cnn, options.shortened(epochs))
