"""Frechet distances against closed forms and scipy; the classifier learns what can be learned."""

import numpy as np
import pytest
import scipy.linalg
import torch

from capsule_zoo.data import Split
from capsule_zoo.inference.sample_quality import (
    FeatureClassifier,
    frechet,
    frechet_distance,
    gaussian_distance,
    train_classifier,
)


def covariance(generator, size=4, rank=None):
    root = generator.normal(size=(size, rank or size))
    return root @ root.T


def test_distance_of_gaussians_with_commuting_covariances_is_of_means_and_standard_deviations():
    generator = np.random.default_rng(0)
    axes = scipy.linalg.qr(generator.normal(size=(4, 4)))[0]
    means, scales = generator.normal(size=(2, 4)), generator.uniform(0.1, 2, size=(2, 4))
    covariances = [axes @ np.diag(d**2) @ axes.T for d in scales]
    distance = gaussian_distance(means[0], covariances[0], means[1], covariances[1])
    expected = np.square(means[0] - means[1]).sum() + np.square(np.subtract(*scales)).sum()
    assert distance == pytest.approx(expected, rel=1e-10)


def test_distance_is_that_of_the_matrix_square_root_and_symmetric():
    generator = np.random.default_rng(1)
    a, b = covariance(generator), covariance(generator)
    mean = np.zeros(4)
    root = scipy.linalg.sqrtm(a @ b)
    expected = np.trace(a) + np.trace(b) - 2 * np.trace(root.real)
    assert gaussian_distance(mean, a, mean, b) == pytest.approx(expected, rel=1e-8)
    assert gaussian_distance(mean, b, mean, a) == pytest.approx(expected, rel=1e-8)


def test_distance_of_singular_gaussians():
    """The distance of rank-one Gaussians along u and v is |u|^2 + |v|^2 - 2 |u.v|."""
    u, v, mean = np.array([1.0, 2.0, 0.0]), np.array([0.5, 0.0, 3.0]), np.zeros(3)
    distance = gaussian_distance(mean, np.outer(u, u), mean, np.outer(v, v))
    assert distance == pytest.approx(u @ u + v @ v - 2 * abs(u @ v), abs=1e-7)


def test_equal_features_are_at_distance_zero_and_moved_ones_at_the_squared_way():
    features = np.random.default_rng(2).normal(size=(50, 6))
    assert frechet_distance(features, features[::-1]) == pytest.approx(0, abs=1e-8)
    assert frechet_distance(features, features + 2) == pytest.approx(6 * 4, rel=1e-8)


def test_jackknife_error_is_the_spread_over_repeated_samples():
    generator = np.random.default_rng(3)
    estimates = [
        frechet(generator.normal(size=(400, 3)), 0.7 + generator.normal(size=(400, 3)))
        for _ in range(200)
    ]
    values, errors, counts = (np.array(column) for column in zip(*estimates, strict=True))
    assert (counts == 400).all()
    # The spread of 200 values is known to 5 %; the mean jackknife of 20 blocks to 1.2 %.
    assert errors.mean() == pytest.approx(values.std(), rel=0.25)


def halves(number, seed):
    """Return dark images with a bright left half or right half."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(2, (number,), generator=generator)
    images = 0.3 * torch.rand(number, 1, 9, 10, generator=generator)
    for i, label in enumerate(labels):
        images[i, ..., 5 * label : 5 * label + 5] += 0.5
    return Split(images, labels)


def test_the_classifier_learns():
    first = train_classifier(halves(600, 0), 2, epochs=3, seed=7)
    fresh = halves(200, 1)
    predictions = first.read(fresh.images, batch_size=64)
    assert (predictions.classes == fresh.labels.numpy()).mean() > 0.98
    assert predictions.features.shape == (200, 64) and (predictions.features >= 0).all()
    assert (predictions.confidence > 0.5 - 1e-9).all() and (predictions.confidence <= 1).all()
    noise = first.read(torch.full((1, 1, 9, 10), 0.4)).confidence
    assert noise < predictions.confidence.mean()


def test_reading_does_not_depend_on_the_batches():
    torch.manual_seed(0)
    classifier = FeatureClassifier((3, 7, 6), 4)
    images = torch.rand(10, 3, 7, 6)
    whole, parts = classifier.read(images), classifier.read(images, batch_size=3)
    np.testing.assert_allclose(whole.features, parts.features, atol=1e-6)
    assert classifier.training
