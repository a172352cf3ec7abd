"""Unsupervised classification: clusters of latents, each named after a class by a matching.

>>> train, test = (latents(guide, split.images, ["object_presence"]) for split in splits)
>>> cluster_accuracy(train, labels, test, test_labels)  # accuracy and its standard error

Labels name the clusters and do nothing else. There are as many clusters as classes, and each class
names one cluster, so that most training images are named right.

References:
    Kosiorek, Sabour, Teh & Hinton 2019, "Stacked Capsule Autoencoders" (arXiv 1906.06818), section
    3.2: k-means on presences, then a bipartite matching.
"""

from __future__ import annotations

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from capsule_zoo.inference.evaluation.probe import Accuracy, check_lengths


def cluster_accuracy(
    train: np.ndarray,
    labels: Tensor,
    test: np.ndarray,
    test_labels: Tensor,
    *,
    starts: int = 10,
    seed: int = 0,
) -> Accuracy:
    """Compute the test accuracy of k-means clusters that training labels name one to one.

    Args:
        train, test: features (N, features) from `latents`.
        labels, test_labels: (N,) integers.
        starts: runs of k-means, of which the tightest is kept.
        seed: seed of its first centers.

    Raises:
        ValueError: features and labels of different lengths, or no images.
    """
    from sklearn.cluster import KMeans  # takes a second, and few need it

    check_lengths("train", train, labels)
    check_lengths("test", test, test_labels)
    classes = np.unique(labels.numpy())
    if not len(train):
        raise ValueError("train has no rows; give one image or more of each class")
    clusters = KMeans(len(classes), n_init=starts, random_state=seed).fit(train)
    names = name_clusters(clusters.labels_, labels.numpy(), classes)
    return Accuracy.of(torch.from_numpy(names[clusters.predict(test)] == test_labels.numpy()))


def name_clusters(clusters: np.ndarray, labels: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """Return the class of each cluster: the matching with the most images of the right class.

    Args:
        clusters: the cluster of every image, (N,), from 0.
        labels: the class of every image, (N,).
        classes: the classes, one for each cluster.
    """
    together = clusters[:, None] == np.arange(len(classes))
    counts = together.T.astype(int) @ (labels[:, None] == classes).astype(int)
    _, chosen = linear_sum_assignment(counts, maximize=True)
    return classes[chosen]
