"""Statistical tests pass when all is correct, and detect errors."""

import math

import pytest
import torch
from means import compare_mean, same_means
from scipy.stats import kstest

from capsule_zoo.inference.calibration import rank_uniformity, sbc_ranks

DRAWS = 31


def conjugate(number, shift=0.0, stretch=1.0, deaf=False):
    """Return ranks of z ~ Normal(0, 1) and of z x, x ~ Normal(z, 1/2), under a posterior."""
    z = torch.randn(number).double()
    x = z + 0.5 * torch.randn(number).double()
    mean, scale = (0 * x, 1.0) if deaf else (0.8 * x, math.sqrt(0.2))
    draws = mean + shift + stretch * scale * torch.randn(DRAWS, number).double()

    def quantities(z):
        return torch.stack([z, z * x], -1)

    return sbc_ranks(quantities(z), quantities(draws))


def test_ranks_under_the_posterior_are_uniform():
    p = [rank_uniformity(conjugate(400)[:, :1], DRAWS).p for _ in range(200)]
    assert kstest(p, "uniform").pvalue > 1e-4


@pytest.mark.parametrize("wrong", [dict(shift=0.2), dict(stretch=0.8), dict(stretch=1.3)])
def test_ranks_under_a_wrong_posterior_are_not(wrong):
    assert rank_uniformity(conjugate(2000, **wrong), DRAWS).p < 1e-6


def test_a_posterior_that_ignores_the_data_is_seen_by_what_depends_on_both():
    ranks = conjugate(2000, deaf=True)
    assert rank_uniformity(ranks[:, :1], DRAWS).p > 1e-3
    assert rank_uniformity(ranks, DRAWS).p < 1e-6


def test_ties_are_broken_by_lot():
    coins = torch.rand(DRAWS + 1, 20_000, 1).lt(0.3).double()
    ranks = sbc_ranks(coins[0], coins[1:])
    assert ranks.min() == 0 and ranks.max() == DRAWS
    assert rank_uniformity(ranks, DRAWS).p > 1e-3
    without = (coins[1:] < coins[0]).sum(0)
    assert rank_uniformity(without, DRAWS).p < 1e-6


def test_means_that_are_equal_are_rarely_called_different():
    """p is at most the true level for three columns (Bonferroni), and uniform for one."""
    p = [
        (
            same_means(torch.randn(80, 1), 2 * torch.randn(60, 1)).p,
            compare_mean(rows, rows[0] * 0).p,
        )
        for rows in torch.randn(300, 50, 1).double()
    ]
    for column in zip(*p, strict=True):
        assert kstest(column, "uniform").pvalue > 1e-4
    several = [compare_mean(rows, torch.zeros(3)).p for rows in torch.randn(600, 50, 3)]
    below = sum(p < 0.1 for p in several)
    assert 0.05 * 600 < below < 0.1 * 600 + 5 * math.sqrt(600 * 0.09)


def test_means_that_differ_are_seen():
    first, second = torch.randn(500, 3), torch.randn(400, 3)
    second[:, 1] += 0.5
    assert same_means(first, second).p < 1e-6
    assert compare_mean(second, torch.zeros(3)).p < 1e-6
    assert compare_mean(second, torch.tensor([0, 0.5, 0])).p > 1e-3


def test_what_does_not_vary_has_to_be_right_up_to_rounding():
    still = torch.full((10, 1), 2.0).double()
    assert compare_mean(still, torch.tensor([2 + 1e-12]).double()).p > 0.99
    assert compare_mean(still, torch.tensor([2 + 1e-6]).double()).p < 1e-6
    assert compare_mean(still * torch.nan, torch.tensor([2.0]).double()).p == 0
