"""Comparison of an annealed lower bound with the importance-weighted bounds of guides.

Both are lower bounds on log p(image) in expectation. So the higher one is nearer to it, and chains
that end below a guide have missed something that the guide finds: often another mode. The gap on
images that the model draws itself need not show that.

An importance-weighted bound exceeds the annealed one if it is higher by more than two standard
errors and .1 nats, on average over the images or on one of them. Standard errors are of the Monte
Carlo estimates, so a single image with a missed mode is not lost in the spread over images. Of
several images one is higher by chance more often; the number of standard errors for one image grows
with the number of images, so that the probability that any image exceeds by chance stays the same.
The largest weight of a guide is left out of its bound here, so that one lucky draw decides nothing.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np

from capsule_zoo.inference.evaluation.summary import (
    log_mean,
    log_mean_error,
    pooled_log_weight,
    refuse_mixture,
)

if TYPE_CHECKING:
    from arviz import InferenceData

STANDARD_ERRORS = 2.0
NEGLIGIBLE = 0.1  # nats below which an exceedance is not reported, whatever its standard error
STORED = "guide_bound", "guide_bound_error"  # names of an annealing's variables (guide, image)
Bound = tuple[np.ndarray, np.ndarray]  # bound of each image, and its standard error, in nats


@dataclass(frozen=True)
class Exceedance:
    """A guide whose importance-weighted bound lies above an annealed lower bound.

    Attributes:
        guide: name of the guide.
        difference: mean over images of its bound minus the annealed one, in nats.
        standard_error: Monte Carlo standard error of `difference`.
        images: indices of the images on which the bound of the guide exceeds the annealed one,
            the largest difference first; none if only the mean exceeds.
        largest: the largest difference on one image, in nats.
        number: number of images.
    """

    guide: str
    difference: float
    standard_error: float
    images: tuple[int, ...]
    largest: float
    number: int

    def __str__(self) -> str:
        text = f"{self.guide!r} is {self.difference:.2f} ± {self.standard_error:.2f} nats higher"
        text = f"{text} on average" if self.difference > 0 else f"{self.guide!r} is higher"
        if not self.images:
            return text
        return (
            f"{text}, by up to {self.largest:.1f} nats on {len(self.images)} of {self.number} "
            f"images (most on image {self.images[0]})"
        )


def annealed_bound(idata: "InferenceData") -> Bound:
    """Return the annealed lower bound of each image, and its standard error."""
    refuse_mixture(idata)
    log_weight = pooled_log_weight(idata)
    return log_mean(log_weight), log_mean_error(log_weight)


def bound_of_guide(idata: "InferenceData") -> Bound:
    """Return an evaluation's importance-weighted bound of each image, and its standard error.

    The largest weight of each image counts as 0: else one lucky draw could decide.
    """
    refuse_mixture(idata)
    log_weight = pooled_log_weight(idata).astype(np.float64)
    others = log_weight.copy()
    others[log_weight.argmax(0), np.arange(log_weight.shape[1])] = -np.inf
    return log_mean(others), log_mean_error(log_weight)


def bounds_of_guides(idata: "InferenceData") -> dict[str, Bound]:
    """Return the bounds of an annealing's candidate start guides, by name."""
    if not (names := json.loads(idata.attrs["guides"])):
        return {}
    bounds = (idata.constant_data[name].values for name in STORED)
    return dict(zip(names, zip(*bounds, strict=True), strict=True))


def exceedances(lower: Bound, bounds: Mapping[str, Bound]) -> list[Exceedance]:
    """Return the guides whose bounds exceed an annealed lower bound, the highest first.

    Raises:
        ValueError: a guide was evaluated on another number of images.
    """
    value, error = lower
    number = len(value)
    # few chains estimate their spread badly: the error over all images is a lower limit
    error = np.maximum(error, math.sqrt(np.mean(error**2)))
    chance = NormalDist().cdf(-STANDARD_ERRORS)
    standard_errors = -NormalDist().inv_cdf(chance / number)
    result = []
    for guide, (bound, bound_error) in bounds.items():
        if len(bound) != number:
            raise ValueError(
                f"{guide!r} was evaluated on {len(bound)} images, but {number} were annealed; "
                "evaluate it on the same images"
            )
        difference, errors = bound - value, np.hypot(bound_error, error)
        total = math.sqrt(np.sum(errors**2)) / number
        images = np.flatnonzero(difference > np.maximum(standard_errors * errors, NEGLIGIBLE))
        images = images[np.argsort(-difference[images], kind="stable")]
        mean = float(difference.mean())
        if mean > max(STANDARD_ERRORS * total, NEGLIGIBLE) or len(images):
            largest = float(difference.max())
            result.append(Exceedance(guide, mean, total, tuple(images.tolist()), largest, number))
    return sorted(result, key=lambda item: -item.difference)


def describe_exceedances(exceeding: list[Exceedance]) -> str:
    """Return one sentence about the guides that exceed; "" if none does."""
    if not exceeding:
        return ""
    return (
        "lower is too low, because importance-weighted bounds of guides lie above it: "
        f"{'; '.join(map(str, exceeding))}. Start chains at that guide too, or pass more "
        "temperatures"
    )
