"""Tests with p-values that samplers and gradients are correct, beside the library's of posteriors.

    sampler     one that leaves a joint distribution invariant keeps all its means     `same_means`
    gradient    the mean of many estimates equals the exact gradient          `unbiased`

Reference: Geweke 2004, "Getting It Right: Joint Distribution Tests of Posterior Simulators".
"""

import torch
from scipy.special import stdtr
from torch import Tensor

from capsule_zoo.inference.calibration import Outcome, worst

ROUNDING = 1e-9  # relative: rounding error of float64 in a gradient that does not vary


def same_means(first: Tensor, second: Tensor) -> Outcome:
    """Test by Welch's t that two samples (N, D) and (M, D) of independent rows have the same means.

    The degrees of freedom are taken from the smaller sample, which is conservative. For Geweke's
    test, one sample is drawn from the joint distribution itself, and each row of the other is the
    mean along a chain that started at the joint distribution.
    """
    mean = first.mean(0)
    variance = first.var(0) / len(first) + second.var(0) / len(second)
    return _by_t(mean - second.mean(0), variance, mean, min(len(first), len(second)))


def compare_mean(estimates: Tensor, exact: Tensor) -> Outcome:
    """Test by Student's t that the mean of independent estimates (N, D) is `exact`, (D,)."""
    variance = estimates.var(0) / len(estimates)
    return _by_t(estimates.mean(0) - exact, variance, exact, len(estimates))


def _by_t(difference: Tensor, variance: Tensor, size: Tensor, number: int) -> Outcome:
    error = (variance + (ROUNDING * (1 + size.abs())).square()).sqrt()
    statistic = (difference / error).abs().double()
    return worst(
        statistic, number, torch.as_tensor(2 * stdtr(number - 1, -statistic.cpu().numpy()))
    )
