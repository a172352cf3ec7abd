"""Whether posteriors, samplers and gradients are what they claim to be: tests with p-values.

    posterior   a parameter drawn from the prior and one drawn from the posterior of its data are
                exchangeable, so its rank among posterior draws is uniform    `rank_uniformity`
    sampler     one that leaves a joint law alone keeps every mean of it      `same_means`
    gradient    the mean of many estimates is the gradient itself             `unbiased`

Each looks at many numbers at once and reports the worst of them, its p-value times their number
(Bonferroni: right whatever their dependence). `holm` corrects for the number of tests.

>>> ranks = sbc_ranks(truth, draws)                       # (N, D) among (L, N, D)
>>> rank_uniformity(ranks, len(draws)).p                  # small: no posterior of this prior

References:
    Talts, Betancourt, Simpson, Vehtari & Gelman 2018, "Validating Bayesian Inference Algorithms
    with Simulation-Based Calibration" (arXiv 1804.06788). Modrak et al. 2023, "Simulation-Based
    Calibration Checking for Bayesian Computation: The Choice of Test Quantities Shapes
    Sensitivity" (arXiv 2211.02383): ranks of parameters alone do not notice a posterior that
    ignores the data, so that some quantity must depend on both. Geweke 2004, "Getting It Right:
    Joint Distribution Tests of Posterior Simulators". Holm 1979, "A Simple Sequentially Rejective
    Multiple Test Procedure".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from scipy.special import chdtrc, stdtr
from torch import Tensor

_ROUNDING = 1e-9  # relative: what float64 may lose in a gradient that does not vary at all
_FEWEST = 5  # simulations that a bin of ranks expects; with fewer its chi-square is none


class Outcome(NamedTuple):
    """What a test found.

    Attributes:
        statistic: the worst chi-square, or the worst absolute z.
        n: independent simulations.
        p: how likely one as bad is by chance, corrected for the numbers that were looked at.
    """

    statistic: float
    n: int
    p: float


def sbc_ranks(truth: Tensor, draws: Tensor) -> Tensor:
    """How many posterior draws lie below each prior draw, (N, D) from 0 to L; ties by lot.

    Args:
        truth: quantities of the prior draws, (N, D).
        draws: the same quantities of L posterior draws for each, (L, N, D).
    """
    below = (draws < truth).sum(0)
    ties = (draws == truth).sum(0)
    lot = torch.rand(truth.shape, dtype=torch.float64, device=truth.device)
    return below + (lot * (ties + 1)).long()


def rank_uniformity(ranks: Tensor, draws: int, bins: int = 16) -> Outcome:
    """Chi-square test that ranks (N, D) are uniform from 0 to `draws`.

    Args:
        bins: into which neighbouring ranks are put together; no more than there are ranks.

    Raises:
        ValueError: fewer than five simulations are expected in a bin.
    """
    number, bins = len(ranks), min(bins, draws + 1)
    bin_of = torch.arange(draws + 1) * bins // (draws + 1)
    expected = number * torch.bincount(bin_of).double() / (draws + 1)
    if expected.min() < _FEWEST:
        raise ValueError(
            f"ranks hold {number} simulations, too few for {bins} bins; give "
            f"{math.ceil(_FEWEST * number / expected.min().item())} or more, or fewer bins"
        )
    columns = bin_of[ranks.cpu()].T  # (D, N)
    observed = torch.stack([torch.bincount(column, minlength=bins) for column in columns])
    statistic = ((observed - expected).square() / expected).sum(1)
    return _worst(statistic, number, torch.as_tensor(chdtrc(bins - 1, statistic.numpy())))


def same_means(first: Tensor, second: Tensor) -> Outcome:
    """Welch's test that two samples (N, D) and (M, D) of independent rows have the same means.

    Its degrees of freedom are those of the smaller sample, which errs on the safe side. Geweke's
    test: the one sample is from the joint law itself, a row of the other is the mean along a chain
    that started at the joint law.
    """
    mean = first.mean(0)
    variance = first.var(0) / len(first) + second.var(0) / len(second)
    return _by_t(mean - second.mean(0), variance, mean, min(len(first), len(second)))


def unbiased(estimates: Tensor, exact: Tensor) -> Outcome:
    """t-test that the mean of independent estimates (N, D) is `exact`, (D,)."""
    variance = estimates.var(0) / len(estimates)
    return _by_t(estimates.mean(0) - exact, variance, exact, len(estimates))


def _by_t(difference: Tensor, variance: Tensor, size: Tensor, number: int) -> Outcome:
    error = (variance + (_ROUNDING * (1 + size.abs())).square()).sqrt()
    statistic = (difference / error).abs().double()
    p = torch.as_tensor(2 * stdtr(number - 1, -statistic.cpu().numpy()))
    return _worst(statistic, number, p)


def _worst(statistic: Tensor, number: int, p: Tensor) -> Outcome:
    if not statistic.isfinite().all():
        return Outcome(math.inf, number, 0.0)
    return Outcome(statistic.max().item(), number, min(1.0, len(p) * p.min().item()))


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for their number: to reject those below alpha errs at most alpha often.

    That is, the chance that any true hypothesis is rejected is at most alpha, whatever the
    dependence of the tests.
    """
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    corrected, largest = [0.0] * len(p_values), 0.0
    for place, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - place) * p_values[index]))
        corrected[index] = largest
    return corrected
