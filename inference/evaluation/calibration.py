"""A test with a p-value that posteriors are correct.

A parameter drawn from the prior and one drawn from the posterior of its data are exchangeable, so
its rank among posterior draws is uniform. `rank_uniformity` examines many numbers at once and
reports the worst. Its p-value is multiplied by the number of numbers (Bonferroni: valid under any
dependence).

>>> ranks = sbc_ranks(truth, draws)                       # (N, D) among (L, N, D)
>>> rank_uniformity(ranks, len(draws)).p                  # small: not a posterior of this prior

References:
    Talts, Betancourt, Simpson, Vehtari & Gelman 2018, "Validating Bayesian Inference Algorithms
    with Simulation-Based Calibration" (arXiv 1804.06788). Modrak et al. 2023, "Simulation-Based
    Calibration Checking for Bayesian Computation: The Choice of Test Quantities Shapes
    Sensitivity" (arXiv 2211.02383): ranks of parameters alone do not notice a posterior that
    ignores the data, so some quantity must depend on both.
"""

import math
from typing import NamedTuple

import torch
from scipy.special import chdtrc
from torch import Tensor

_FEWEST = 5  # expected simulations per bin; with fewer the chi-square law fails


class Outcome(NamedTuple):
    """The result of a test.

    Attributes:
        statistic: the worst chi-square, or the worst absolute z.
        n: independent simulations.
        p: the p-value of the worst statistic, corrected for the number of statistics examined.
    """

    statistic: float
    n: int
    p: float


def sbc_ranks(truth: Tensor, draws: Tensor) -> Tensor:
    """Return the number of posterior draws below each prior draw, (N, D); ties are broken randomly.

    Args:
        truth: quantities of the prior draws, (N, D).
        draws: the same quantities of L posterior draws for each, (L, N, D); ranks go from 0 to L.
    """
    below = (draws < truth).sum(0)
    ties = (draws == truth).sum(0)
    lot = torch.rand(truth.shape, dtype=torch.float64, device=truth.device)
    return below + (lot * (ties + 1)).long()


def rank_uniformity(ranks: Tensor, draws: int, bins: int = 16) -> Outcome:
    """Test by chi-square that ranks (N, D) are uniform from 0 to `draws`.

    Args:
        bins: number of bins of neighboring ranks, at most the number of possible ranks.

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
    return worst(statistic, number, torch.as_tensor(chdtrc(bins - 1, statistic.numpy())))


def worst(statistic: Tensor, number: int, p: Tensor) -> Outcome:
    """Return the worst of D statistics (D,) from `number` simulations, with p-values (D,)."""
    if not statistic.isfinite().all():
        return Outcome(math.inf, number, 0.0)
    return Outcome(statistic.max().item(), number, min(1.0, len(p) * p.min().item()))
