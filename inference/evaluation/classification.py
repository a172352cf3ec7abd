"""Error rates of a classifier, on unchanged images and under attack.

>>> error_rate(model, split)
>>> error_rate(model, fgsm(model, split, epsilon=0.05))
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, Protocol, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from capsule_zoo.data import Split
from capsule_zoo.models.checks import check_at_least
from capsule_zoo.models.common.modes import in_eval_mode
from capsule_zoo.models.networks.classifier import Classifier


class Share(NamedTuple):
    """A share of answers, right or wrong, with its binomial standard error and the sample size."""

    value: float
    se: float
    n: int

    @classmethod
    def of(cls, answers: Tensor) -> Self:
        """Return the share of answers (N,) that are True."""
        value, count = answers.double().mean().item(), len(answers)
        return cls(value, (value * (1 - value) / count) ** 0.5, count)


class Predicts(Protocol):
    """A module that predicts labels: a classifier, or a guide that infers class capsules."""

    def predict(self, images: Tensor) -> Tensor:
        """Return the likeliest labels (B,) of images (B, C, H, W)."""


def predictor_of(model: nn.Module, guide: nn.Module) -> Predicts | None:
    """Return what is trained to predict labels: a classifier, a guide that predicts, or None."""
    if isinstance(model, Classifier):
        return model
    return cast(Predicts, guide) if hasattr(guide, "predict") else None


@torch.no_grad()
def predictions(program: Predicts, images: Tensor, batch_size: int = 100) -> Tensor:
    """Return the likeliest labels (N,) of images (N, C, H, W)."""
    with in_eval_mode(cast(nn.Module, program)):
        return torch.cat([program.predict(batch) for batch in images.split(batch_size)])


def error_rate(program: Predicts, split: Split) -> Share:
    """Return the share of images whose likeliest label is not the correct one."""
    return Share.of(predictions(program, split.images) != split.labels)


def fgsm(
    model: Classifier, split: Split, epsilon: float, batch_size: int = 100, steps: int = 1
) -> Split:
    """Return the split under a white-box attack that moves every pixel by at most epsilon.

    Each pixel moves in the direction that increases the cross-entropy of the true label.
    Cross-entropy is used even for models trained with the spread loss: that loss has zero gradient
    once its margin is met, so an attack on it would spare the most confident predictions. Pixels
    stay in the model's range.

    With one step this is the fast gradient sign method. With several it is the basic iterative
    method: every step follows the sign of a new gradient, for 2 epsilon / steps, and the pixels
    return to within epsilon of where they began.

    Args:
        epsilon: size of the largest change, in units of a pixel's value.
        steps: number of gradients.

    Raises:
        ValueError: a negative epsilon, or no step.

    References: Goodfellow, Shlens & Szegedy 2015, "Explaining and Harnessing Adversarial Examples"
    (arXiv 1412.6572), section 4; Kurakin, Goodfellow & Bengio 2017, "Adversarial Examples in the
    Physical World" (arXiv 1607.02533), section 2.2.
    """
    check_at_least(0, epsilon=epsilon)
    check_at_least(1, steps=steps)
    stride = min(epsilon, 2 * epsilon / steps)
    least, most = model.pixel_range
    attacked = []
    with in_eval_mode(model):
        batches = zip(*(x.split(batch_size) for x in (split.images, split.labels)), strict=True)
        for images, labels in batches:
            low, high = (images - epsilon).clamp(min=least), (images + epsilon).clamp(max=most)
            moved = images
            for _ in range(steps):
                pixels = moved.clone().requires_grad_()
                loss = F.cross_entropy(model.scores(pixels), labels, reduction="sum")
                (slope,) = torch.autograd.grad(loss, pixels)
                moved = torch.clamp(moved + stride * slope.sign(), low, high)
            attacked.append(moved)
    return replace(split, images=torch.cat(attacked))
