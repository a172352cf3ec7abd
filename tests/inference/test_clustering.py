"""Clusters are named by the best matching, which is found by trying all of them."""

import itertools

import numpy as np
import pytest
import torch

from capsule_zoo.inference.probes import cluster_accuracy, name_clusters


@pytest.mark.parametrize("seed", range(5))
def test_the_matching_is_the_best_of_all(seed):
    rng = np.random.default_rng(seed)
    clusters, labels = rng.integers(0, 4, 30), rng.choice([2, 3, 5, 7], 30)
    classes = np.array([2, 3, 5, 7])
    names = name_clusters(clusters, labels, classes)
    assert sorted(names) == [2, 3, 5, 7]
    right = [(np.array(p)[clusters] == labels).sum() for p in itertools.permutations(classes)]
    assert (names[clusters] == labels).sum() == max(right)


def blobs(count, seed):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 3, count)
    centers = np.array([[0.0, 0.0], [5.0, 0.0], [0.0, 5.0]])
    return centers[labels] + 0.1 * rng.normal(size=(count, 2)), torch.from_numpy(labels)


def test_separate_classes_are_found_and_permuted_labels_change_nothing():
    (train, labels), (test, answers) = blobs(60, 0), blobs(30, 1)
    assert cluster_accuracy(train, labels, test, answers).value == 1
    assert cluster_accuracy(train, (labels + 1) % 3, test, (answers + 1) % 3).value == 1


def test_two_classes_in_one_cluster_cannot_both_be_right():
    (train, labels), (test, answers) = blobs(90, 0), blobs(90, 1)
    train[labels == 1] = train[labels == 0][0]  # on top of each other
    test[answers == 1] = test[answers == 0][0]
    accuracy = cluster_accuracy(train, labels, test, answers)
    assert accuracy.value < 1 - 0.9 * min(
        (answers == 0).double().mean(), (answers == 1).double().mean()
    )


def test_clusters_are_those_of_training_images_alone():
    """Test images far from all others would take a cluster for themselves, and two classes one."""
    (train, labels), (test, answers) = blobs(60, 0), blobs(30, 1)
    far = np.tile([100.0, 100.0], (300, 1))
    accuracy = cluster_accuracy(train, labels, far, torch.zeros(300, dtype=torch.long)).value
    both = np.concatenate([test, far]), torch.cat([answers, torch.zeros(300, dtype=torch.long)])
    assert cluster_accuracy(train, labels, *both).value == pytest.approx(
        (30 + 300 * accuracy) / 330
    )
