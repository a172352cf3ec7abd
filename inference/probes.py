"""Probes of latents: linear classifiers, and clusters matched to classes.

>>> train, test = (latents(guide, split.images, ["object_presence"]) for split in splits)
>>> linear_probe(train, labels, test, test_labels)      # accuracy and its standard error

>>> cluster_accuracy(train, labels, test, test_labels)  # accuracy of clusters

The guide never sees a label; only the probe does, on training latents alone. Of clusters, labels
give the names and do nothing else: there are as many clusters as classes, and each class names one
cluster, so that most training images are named right.

References:
    Kosiorek, Sabour, Teh & Hinton 2019, "Stacked Capsule Autoencoders" (arXiv 1906.06818), section
    3.2: k-means on presences, then a bipartite matching.
"""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from capsule_zoo.inference.evaluation.ancestral import distribution_means
from capsule_zoo.inference.evaluation.classification import Fraction
from capsule_zoo.inference.evaluation.prepare import Images

if TYPE_CHECKING:
    from sklearn.pipeline import Pipeline

Labels = Tensor | np.ndarray


class Accuracy(Fraction):
    """The accuracy of predictions, with its standard error and the sample size."""


class Information(NamedTuple):
    """The information of features about the class, in nats, with standard error and sample size."""

    value: float
    se: float
    n: int


def latents(
    guide: nn.Module, images: Images, sites: list[str], batch_size: int = 500, seed: int = 0
) -> np.ndarray:
    """Infer the values of some sites by the guide, as one row of features per image.

    A presence (a site with `logits`) gives its probability. Any other site gives the mean of its
    distribution, or its draw if the distribution has no mean.

    Args:
        images: (N, C, H, W).
        sites: names of the guide's sites, in the order of the features.

    Returns:
        (N, features).

    Raises:
        ValueError: the guide draws no site of that name.
    """
    site_values = distribution_means(guide, images, sites, seed, batch_size)
    rows = [site_values[name].reshape(len(site_values[name]), -1) for name in sites]
    return torch.cat(rows, dim=1).cpu().numpy()


def linear_probe(
    train: np.ndarray, labels: Labels, test: np.ndarray, test_labels: Labels, penalty: float = 1.0
) -> Accuracy:
    """Compute the test accuracy of a logistic regression on standardized training latents.

    Args:
        train, test: features (N, features) from `latents`.
        labels, test_labels: (N,) integers, tensors or NumPy arrays.
        penalty: inverse strength of the squared penalty, scikit-learn's `C`.

    Raises:
        ValueError: features and labels of different lengths.
    """
    return probe_scores(train, labels, test, test_labels, penalty)[0]


def probe_scores(
    train: np.ndarray, labels: Labels, test: np.ndarray, test_labels: Labels, penalty: float = 1.0
) -> tuple[Accuracy, Information]:
    """Compute the accuracy of `linear_probe`, and the information of its probabilities.

    The information is the mean of log q(class | features) - log p(class) over test images. It is a
    lower bound on the mutual information of class and features (Barber & Agakov 2003), and -inf if
    a class of the test images was never trained on.

    Args, Raises: as for `linear_probe`.
    """
    check_lengths("test", test, test_labels)
    probe = fit_probe(train, labels, penalty)
    answers = np.asarray(test_labels)
    scores = probe.decision_function(test)
    if scores.ndim == 1:  # scikit-learn returns the log-odds of two classes
        scores = np.stack([np.zeros_like(scores), scores], axis=1)
    # `predict_log_proba` may take the log of 0.
    log_probability = torch.from_numpy(scores).log_softmax(1).numpy()
    classes = probe.classes_
    accuracy = Accuracy.of(torch.from_numpy(classes[log_probability.argmax(1)] == answers))
    count = len(test)
    _, kinds, frequency = np.unique(answers, return_inverse=True, return_counts=True)
    place = np.searchsorted(classes, answers).clip(max=len(classes) - 1)
    gained = np.where(classes[place] == answers, log_probability[np.arange(count), place], -np.inf)
    gain = gained - np.log(frequency / count)[kinds]
    with np.errstate(invalid="ignore"):
        return accuracy, Information(float(gain.mean()), float(gain.std() / count**0.5), count)


def fit_probe(train: np.ndarray, labels: Labels, penalty: float = 1.0) -> "Pipeline":
    """Fit the logistic regression of `linear_probe`, for use on many features.

    Args, Raises: as for `linear_probe`.
    """
    from sklearn.linear_model import LogisticRegression  # takes a second, and few need it
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    check_lengths("train", train, labels)
    probe = make_pipeline(StandardScaler(), LogisticRegression(C=penalty, max_iter=2000))
    return probe.fit(train, np.asarray(labels))


def check_lengths(name: str, features: np.ndarray, answers: Labels) -> None:
    """Raise ValueError unless there is a label for every row of features."""
    if len(features) != len(answers):
        raise ValueError(
            f"{name} has {len(features)} rows but {len(answers)} labels; give one for each row"
        )


def cluster_accuracy(
    train: np.ndarray,
    labels: Labels,
    test: np.ndarray,
    test_labels: Labels,
    *,
    starts: int = 10,
    seed: int = 0,
) -> Accuracy:
    """Compute the test accuracy of k-means clusters, matched one to one to classes.

    Args:
        train, test: features (N, features) from `latents`.
        labels, test_labels: (N,) integers, tensors or NumPy arrays.
        starts: runs of k-means, of which the tightest is kept.
        seed: seed of its first centers.

    Raises:
        ValueError: features and labels of different lengths, or no images.
    """
    from sklearn.cluster import KMeans  # takes a second, and few need it

    check_lengths("train", train, labels)
    check_lengths("test", test, test_labels)
    classes = np.unique(labels)
    if not len(train):
        raise ValueError("train has no rows; give one image or more of each class")
    clusters = KMeans(len(classes), n_init=starts, random_state=seed).fit(train)
    names = name_clusters(clusters.labels_, np.asarray(labels), classes)
    return Accuracy.of(torch.from_numpy(names[clusters.predict(test)] == np.asarray(test_labels)))


def name_clusters(clusters: np.ndarray, labels: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """Return the class of each cluster, by the one-to-one matching with the most correct images.

    Args:
        clusters: the cluster of every image, (N,), from 0.
        labels: the class of every image, (N,).
        classes: the classes, one for each cluster.
    """
    from scipy.optimize import linear_sum_assignment  # takes a second, and few need it

    together = clusters[:, None] == np.arange(len(classes))
    counts = together.T.astype(int) @ (labels[:, None] == classes).astype(int)
    _, assignment = linear_sum_assignment(counts, maximize=True)
    return classes[assignment]
