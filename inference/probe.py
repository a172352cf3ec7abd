"""How much of the class a latent knows: a linear classifier on what the guide infers.

>>> train, test = (latents(guide, split.images, ["object_presence"]) for split in splits)
>>> linear_probe(train, labels, test, test_labels)      # accuracy and its standard error

The guide never sees a label; only the probe does, on training latents alone.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyro
import torch
from pyro import poutine
from pyro.distributions import TorchDistribution
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn

from capsule_zoo.guides.base import in_eval_mode
from capsule_zoo.models.base import check_images_of


class Accuracy(NamedTuple):
    """A share of correct answers, its binomial standard error, and how many were asked."""

    value: float
    se: float
    n: int


def latents(
    guide: nn.Module, images: Tensor, sites: list[str], batch_size: int = 500, seed: int = 0
) -> np.ndarray:
    """What the guide infers at some sites, as one row of features for each image.

    A site with `logits`, a presence, gives its probability; any other gives the mean of its law,
    or its draw where the law knows no mean.

    Args:
        images: (N, C, H, W).
        sites: names of the guide's sites, in the order of the features.

    Returns:
        (N, features).

    Raises:
        ValueError: the guide draws no site of that name.
    """
    check_images_of(guide, images)
    rows = []
    with torch.no_grad(), torch.random.fork_rng(devices=[]), in_eval_mode(guide):
        pyro.set_rng_seed(seed)
        for batch in images.split(batch_size):
            trace = poutine.trace(guide).get_trace(batch)
            missing = [name for name in sites if name not in trace.nodes]
            if missing:
                drawn = [n for n in trace.nodes if trace.nodes[n]["type"] == "sample"]
                raise ValueError(f"sites holds {missing}, but the guide draws only {drawn}")
            found = [_centre(trace.nodes[n]).reshape(len(batch), -1) for n in sites]
            rows.append(torch.cat(found, dim=1))
    return torch.cat(rows).cpu().numpy()


def _centre(site: dict) -> Tensor:
    law: TorchDistribution = site["fn"]
    while hasattr(law, "base_dist"):
        law = law.base_dist
    if getattr(law, "logits", None) is not None:
        return law.logits.sigmoid().expand_as(site["value"])
    try:
        return law.mean.expand_as(site["value"])
    except NotImplementedError:
        return site["value"]


def linear_probe(
    train: np.ndarray, labels: Tensor, test: np.ndarray, test_labels: Tensor, penalty: float = 1.0
) -> Accuracy:
    """Test accuracy of a logistic regression fitted on standardised training latents.

    Args:
        train, test: features (N, features) from `latents`.
        labels, test_labels: (N,) integers.
        penalty: inverse strength of the squared penalty, scikit-learn's `C`.

    Raises:
        ValueError: features and labels of different lengths.
    """
    for name, features, answers in (("train", train, labels), ("test", test, test_labels)):
        if len(features) != len(answers):
            raise ValueError(f"{name} has {len(features)} rows but {len(answers)} labels")
    probe = make_pipeline(StandardScaler(), LogisticRegression(C=penalty, max_iter=500))
    probe.fit(train, labels.numpy())
    value = float(probe.score(test, test_labels.numpy()))
    return Accuracy(value, (value * (1 - value) / len(test)) ** 0.5, len(test))
