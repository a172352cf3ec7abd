"""The linear probe: perfect on separable latents, chance on noise, blind to test labels."""

import numpy as np
import pytest
import torch

from capsule_zoo.guides import PartWholeGuide
from capsule_zoo.inference.probes import cluster_accuracy, latents, linear_probe, probe_scores
from capsule_zoo.models import PartWholeCapsules
from capsule_zoo.models.parts.painted_parts import Painting
from capsule_zoo.settings import configure


def test_separable_latents_are_told_apart_and_noise_is_not():
    generator = np.random.default_rng(0)
    labels = torch.from_numpy(generator.integers(0, 4, 2000))
    means = 6 * np.eye(4)[labels.numpy()]
    features = means + generator.normal(size=(2000, 4))
    fitted = linear_probe(features[:1000], labels[:1000], features[1000:], labels[1000:])
    assert fitted.value > 0.99 and fitted.n == 1000
    numbers = labels.numpy()  # as scikit-learn's users have them
    halves = features[:1000], numbers[:1000], features[1000:], numbers[1000:]
    assert linear_probe(*halves) == fitted
    assert cluster_accuracy(*halves).value > 0.99
    noise = generator.normal(size=(2000, 4))
    chance = linear_probe(noise[:1000], labels[:1000], noise[1000:], labels[1000:])
    assert abs(chance.value - 0.25) < 5 * (0.25 * 0.75 / 1000) ** 0.5
    assert chance.se == pytest.approx((chance.value * (1 - chance.value) / 1000) ** 0.5)


def test_information_is_that_of_the_class_no_more_and_nothing_on_noise():
    generator = np.random.default_rng(0)
    labels = torch.from_numpy(generator.integers(0, 4, 4000))
    halves = slice(2000), slice(2000, None)
    entropy = -sum(p * np.log(p) for p in np.bincount(labels[halves[1]]) / 2000)
    for code, expected in (
        (np.eye(4)[labels], entropy),
        (np.eye(2)[labels // 2], np.log(2)),  # which half of the classes it is
        (generator.normal(size=(4000, 4)), 0.0),
    ):
        codes, asked = (code[half] for half in halves)
        _, score = probe_scores(codes, labels[halves[0]], asked, labels[halves[1]], penalty=100)
        assert abs(score.value - expected) < 0.02 and score.n == 2000
        assert score.value <= entropy + 1e-9


def test_information_of_a_class_that_was_never_shown_is_without_bound():
    features = np.eye(3)[[0, 1, 0, 1, 2]]
    labels = torch.tensor([0, 1, 0, 1, 2])
    accuracy, told = probe_scores(features[:4], labels[:4], features[1:], labels[1:])
    assert told.value == -np.inf and accuracy.value <= 0.75


@pytest.mark.parametrize("classes", [2, 3])
def test_information_of_an_answer_that_is_all_but_excluded_is_finite(classes):
    features = np.eye(classes)[np.arange(60) % classes]
    labels = torch.arange(60) % classes
    far = 1e5 * features[:1]  # its probability of any class but 0 is below the smallest float
    _, told = probe_scores(
        features, labels, np.concatenate([far, features]), labels[[1, *range(60)]]
    )
    assert np.isfinite(told.value) and told.value < -1000


def test_latents_are_probabilities_and_poses_in_the_order_asked():
    torch.manual_seed(0)
    model = PartWholeCapsules((1, 12, 12), objects=3, parts=4, painting=Painting(template_size=5))
    guide = configure(PartWholeGuide, model, channels=8, width=16, heads=2, blocks=1, inducing=4)
    images = torch.rand(7, 1, 12, 12)
    features = latents(guide, images, ["object_presence", "part_pose"], batch_size=3)
    assert features.shape == (7, 3 + 4 * 6)
    assert (features[:, :3] > 0).all() and (features[:, :3] < 1).all()
    parts = latents(guide, images, ["part_pose"])
    np.testing.assert_allclose(features[:, 3:], parts, rtol=1e-5, atol=1e-6)
