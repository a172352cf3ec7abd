"""Sample quality by a classifier: Frechet distance of its features, and its confidence.

>>> classifier = train_classifier(mnist.train, epochs=3)
>>> seen = classifier.read(samples)                        # features and confidences
>>> frechet(seen.features, classifier.read(mnist.test.images).features)

The distance between two sets of features is the squared Frechet (Wasserstein-2) distance between
the Gaussians with their means and covariances,

    d = |mu_a - mu_b|^2 + tr(C_a + C_b - 2 (C_a C_b)^{1/2}).

It is biased upwards by sampling, so compare only distances computed from equal numbers of images.

References:
    Heusel et al. 2017 (arXiv 1706.08500), who use the features of an Inception network.
    Chong & Forsyth 2020 (arXiv 1911.07023) on the bias.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from capsule_zoo.data import Batches, Split
from capsule_zoo.data.splits import labels_of
from capsule_zoo.models.checks import check_labels, check_whole
from capsule_zoo.models.common.modes import eval_mode, use_seed


class Reading(NamedTuple):
    """The features and predictions of a classifier for N images.

    Attributes:
        features: float64, (N, features).
        confidence: the probability of the likeliest class, (N,).
        classes: the likeliest class, (N,).
    """

    features: np.ndarray
    confidence: np.ndarray
    classes: np.ndarray


class FeatureClassifier(nn.Module):
    """A small convolutional network whose last hidden layer serves as features.

    Args:
        image_shape: (channels, height, width).
        num_classes, features: sizes of the last two layers.
    """

    def __init__(
        self, image_shape: tuple[int, int, int], num_classes: int, features: int = 64
    ) -> None:
        super().__init__()
        colors, height, width = image_shape
        quarter = -(-height // 4), -(-width // 4)
        self.maps = nn.Sequential(
            nn.Conv2d(colors, 24, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2, ceil_mode=True),
            nn.Conv2d(24, 48, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveMaxPool2d(quarter),
            nn.Flatten(),
            nn.Dropout(0.25),
            nn.Linear(48 * math.prod(quarter), features),
            nn.ReLU(),
        )
        self.classes = nn.Linear(features, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Compute the logits (B, classes) of images (B, C, H, W)."""
        return self.classes(self.maps(images - 0.5))

    @torch.no_grad()
    def read(self, images: Tensor, batch_size: int = 1000) -> Reading:
        """Compute features and predictions for images (N, C, H, W)."""
        with eval_mode(self):
            features = torch.cat([self.maps(x - 0.5) for x in images.split(batch_size)])
            belief, classes = self.classes(features).softmax(-1).max(-1)
        return Reading(features.double().numpy(), belief.double().numpy(), classes.numpy())


def train_classifier(
    split: Split, num_classes: int = 10, epochs: int = 3, batch_size: int = 128, seed: int = 0
) -> FeatureClassifier:
    """Train a classifier on labeled images by Adam, with a rate that falls to zero.

    Raises:
        ValueError: no epoch, or the images have no labels, or more classes.
    """
    check_whole(1, epochs=epochs)
    check_labels(labels_of(split), num_classes)
    with use_seed(seed):
        channels, height, width = split.images.shape[1:]
        classifier = FeatureClassifier((channels, height, width), num_classes).train()
        batches = Batches(split, batch_size, seed)
        optimizer = torch.optim.Adam(classifier.parameters(), lr=2e-3)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, epochs * len(batches))
        for epoch in range(epochs):
            for images, labels in batches.epoch(epoch):
                optimizer.zero_grad(set_to_none=True)
                F.cross_entropy(classifier(images), labels).backward()
                optimizer.step()
                schedule.step()
    return classifier.eval()


def frechet_distance(a: np.ndarray, b: np.ndarray) -> float:
    """Compute the squared Frechet distance of Gaussians fitted to two sets of features, (N, D).

    Raises:
        ValueError: fewer than two rows, or different numbers of features.
    """
    if min(len(a), len(b)) < 2 or a.shape[1:] != b.shape[1:]:
        raise ValueError(
            "a and b must be (N, features) with N of at least 2 and equally many features, not "
            f"{a.shape} and {b.shape}"
        )
    return gaussian_distance(a.mean(0), np.cov(a.T), b.mean(0), np.cov(b.T))


def gaussian_distance(
    mean_a: np.ndarray, covariance_a: np.ndarray, mean_b: np.ndarray, covariance_b: np.ndarray
) -> float:
    """Compute the squared Frechet distance of two Gaussians; covariances may be singular."""
    covariance_a, covariance_b = np.atleast_2d(covariance_a), np.atleast_2d(covariance_b)
    values, vectors = np.linalg.eigh(covariance_a)
    root = (vectors * np.sqrt(values.clip(min=0))) @ vectors.T  # the symmetric square root
    # (C_a C_b)^{1/2} has the trace of (C_a^{1/2} C_b C_a^{1/2})^{1/2}, whose argument is symmetric
    overlap = np.linalg.eigvalsh(root @ covariance_b @ root).clip(min=0)
    spread = np.trace(covariance_a) + np.trace(covariance_b) - 2 * np.sqrt(overlap).sum()
    return float(np.square(mean_a - mean_b).sum() + spread)


def frechet(a: np.ndarray, b: np.ndarray, blocks: int = 20) -> tuple[float, float, int]:
    """Compute the Frechet distance of two sets of features, with its error and the smaller size.

    The standard error is a jackknife over blocks that are left out of both sets at once. Unlike a
    bootstrap it repeats no row, so it does not distort the covariances.
    """
    without = [
        frechet_distance(_all_but(a, i, blocks), _all_but(b, i, blocks)) for i in range(blocks)
    ]
    error = np.sqrt((blocks - 1) * np.var(without))
    return frechet_distance(a, b), float(error), min(len(a), len(b))


def _all_but(rows: np.ndarray, block: int, blocks: int) -> np.ndarray:
    return rows[np.arange(len(rows)) % blocks != block]
