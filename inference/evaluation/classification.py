"""Classification by a model and its guide: predicted classes, error rate, attacks.

>>> classify(model, guide, images)                                           # (N,)
>>> error_rate(model, guide, split)
>>> error_rate(model, guide, fgsm(model, split, epsilon=0.05))               # under attack
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from capsule_zoo.data import Split
from capsule_zoo.data.progress import track
from capsule_zoo.data.splits import labels_of
from capsule_zoo.inference.check import name_of
from capsule_zoo.inference.evaluation.prepare import (
    Images,
    open_images,
    prepare_images,
    split_batches,
    stream_images,
)
from capsule_zoo.inference.functions import require_model
from capsule_zoo.inference.isolation import isolated_parameters
from capsule_zoo.inference.other_model import warn_of_another_model
from capsule_zoo.models.base import Model
from capsule_zoo.models.checks import check_at_least, check_whole
from capsule_zoo.models.common.modes import eval_mode
from capsule_zoo.models.networks.classifier import Classifier


class Fraction(NamedTuple):
    """A fraction of predictions, with its binomial standard error and the sample size."""

    value: float
    se: float
    n: int

    @classmethod
    def of(cls, answers: Tensor) -> Self:
        """Return the fraction of `answers` (N,) that are True.

        Where all answers agree, the error is not 0, but that of (N value + 1) / (N + 2), Laplace's
        rule of succession.
        """
        value, count = answers.double().mean().item(), len(answers)
        assumed = value if 0 < value < 1 else (count * value + 1) / (count + 2)
        return cls(value, (assumed * (1 - assumed) / count) ** 0.5, count)


def predicts_labels(model: nn.Module, guide: nn.Module) -> bool:
    """Return True for a classifier, and for a guide that predicts labels."""
    return isinstance(model, Classifier) or hasattr(guide, "predict")


@require_model
def classify(model: Model, guide: nn.Module, images: Images, *, batch_size: int = 100) -> Tensor:
    """Predict the likeliest labels (N,) of images (N, C, H, W) by the model or the guide.

    `encode(model, guide, images)["label"]` gives the probability of each class of a classifier.

    Raises:
        ValueError: neither predicts classes, or the model does not take the images.
    """
    check_whole(1, batch_size=batch_size)
    program = _classifier(model, guide)
    batches = stream_images(model, images, guide, rows=batch_size)
    with _prediction_mode(model, guide, batches[:2]):
        parts = track(batches.split(batch_size), "classifying", "batches")
        return torch.cat([program.predict(batch) for batch in parts])


@require_model
def error_rate(model: Model, guide: nn.Module, split: Images, *, batch_size: int = 100) -> Fraction:
    """Return the fraction of images whose label by `classify` is wrong.

    Args:
        split: images with labels: a `Split`, a `Dataset`, of which the test split is classified, or
            a torch `Dataset` or `DataLoader`, which is read batch by batch.

    Raises:
        ValueError: as for `classify`; or there are no labels, or one that is no class of the model.
    """
    check_whole(1, batch_size=batch_size)
    program = _classifier(model, guide)
    images, labels = open_images(model, split, guide, labels=True, ordered=False)
    with _prediction_mode(model, guide, images[:2]):
        parts = track(
            split_batches(images, labels, batch_size),
            "classifying",
            "batches",
            -(-len(images) // batch_size),
        )
        wrong = [program.predict(x) != y for x, y in parts]
    return Fraction.of(torch.cat(wrong))


def _classifier(model: Model, guide: nn.Module) -> Any:
    """Return the model or the guide, whichever predicts classes."""
    program = next((part for part in (model, guide) if hasattr(part, "predict")), None)
    if program is None:
        raise ValueError(
            f"{name_of(model)} tells no classes; fit a linear probe on what its guide "
            "infers: see capsule_zoo.inference.probes.linear_probe"
        )
    return program


@contextmanager
def _prediction_mode(model: Model, guide: nn.Module, example: Tensor) -> Iterator[None]:
    """Open the context in which classes are predicted, after a check on example images."""
    with isolated_parameters(model, guide), eval_mode(model, guide), torch.no_grad():
        if not hasattr(model, "predict"):
            warn_of_another_model(model, guide, example)
        yield


@require_model
@torch.inference_mode(False)
def fgsm(
    model: Model,
    split: Split,
    epsilon: float,
    batch_size: int = 100,
    steps: int = 1,
    *,
    guide: nn.Module | None = None,
) -> Split:
    """Return the split under a white-box attack that changes every pixel by at most epsilon.

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
        guide: guide whose class scores are attacked if the model has none, as the scores of the
            capsule network.

    Raises:
        ValueError: a negative epsilon, no step, no labels, or no scores of classes.

    References: Goodfellow, Shlens & Szegedy 2015, "Explaining and Harnessing Adversarial Examples"
    (arXiv 1412.6572), section 4; Kurakin, Goodfellow & Bengio 2017, "Adversarial Examples in the
    Physical World" (arXiv 1607.02533), section 2.2.
    """
    check_at_least(0, epsilon=epsilon)
    check_whole(1, steps=steps)
    stride = min(epsilon, 2 * epsilon / steps)
    program: Any = next((part for part in (model, guide) if hasattr(part, "scores")), None)
    if program is None:
        raise ValueError(f"{name_of(model)} has no scores of classes; name a guide with some")
    least, most = model.pixel_range
    attacked, pixels = [], prepare_images(model, split, guide)
    targets = labels_of(split).to(pixels.device)
    with eval_mode(program):
        batches = zip(*(x.split(batch_size) for x in (pixels, targets)), strict=True)
        for images, labels in batches:
            low, high = (images - epsilon).clamp(min=least), (images + epsilon).clamp(max=most)
            moved = images
            for _ in range(steps):
                at = moved.clone().requires_grad_()
                loss = F.cross_entropy(program.scores(at), labels, reduction="sum")
                (slope,) = torch.autograd.grad(loss, at)
                moved = torch.clamp(moved + stride * slope.sign(), low, high)
            attacked.append(moved)
    return replace(split, images=torch.cat(attacked))
