"""Pairs of images: every image of a batch laid over the one before it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def with_previous(values: Tensor) -> Tensor:
    """Return the maximum of each row and the row before: images overlap, one-hot labels unite."""
    return torch.maximum(values, values.roll(1, 0))


def classes_of_pairs(labels: Tensor, classes: int) -> Tensor:
    """Return 1 for the classes that are in each pair and 0 for others, (B, classes)."""
    return with_previous(F.one_hot(labels, classes))
