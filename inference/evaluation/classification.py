"""How often a classifier is wrong, on images as they are and under attack.

>>> error_rate(model, split)
>>> error_rate(model, fgsm(model, split, epsilon=0.05))
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from capsule_zoo.data import Split
from capsule_zoo.models.checks import check_at_least
from capsule_zoo.models.classifier import Classifier
from capsule_zoo.models.modes import in_eval_mode


class Share(NamedTuple):
    """A share of answers, right or wrong, its binomial standard error, and how many were asked."""

    value: float
    se: float
    n: int

    @classmethod
    def of(cls, answers: Tensor) -> Self:
        """Of those that are True, (N,)."""
        value, count = answers.double().mean().item(), len(answers)
        return cls(value, (value * (1 - value) / count) ** 0.5, count)


@torch.no_grad()
def predictions(model: Classifier, images: Tensor, batch_size: int = 100) -> Tensor:
    """The likeliest labels of images (N, C, H, W), (N,)."""
    with in_eval_mode(model):
        return torch.cat([model.predict(batch) for batch in images.split(batch_size)])


def error_rate(model: Classifier, split: Split) -> Share:
    """How often the likeliest label is not the right one."""
    return Share.of(predictions(model, split.images) != split.labels)


def fgsm(model: Classifier, split: Split, epsilon: float, batch_size: int = 100) -> Split:
    """The split under a white-box attack: every pixel moved by epsilon, up or down.

    Each goes to where the cross-entropy of the label under the model's scores grows, whatever the
    model is trained by: the spread loss has no slope where its margin is kept, so that an attack on
    it would leave the surest answers in peace. Pixels stay in the model's range.

    Args:
        epsilon: in units of a pixel's value.

    Raises:
        ValueError: a negative epsilon.

    Reference: Goodfellow, Shlens & Szegedy 2015, "Explaining and Harnessing Adversarial Examples"
    (arXiv 1412.6572), section 4.
    """
    check_at_least(0, epsilon=epsilon)
    moved = []
    with in_eval_mode(model):
        batches = zip(*(x.split(batch_size) for x in (split.images, split.labels)), strict=True)
        for images, labels in batches:
            pixels = images.clone().requires_grad_()
            loss = F.cross_entropy(model.scores(pixels), labels, reduction="sum")
            (slope,) = torch.autograd.grad(loss, pixels)
            moved.append((images + epsilon * slope.sign()).clamp(*model.pixel_range))
    return replace(split, images=torch.cat(moved))
