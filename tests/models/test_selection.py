"""Relaxed presences stay finite, and their density is the Concrete's."""

import math

import pytest
import torch

from capsule_zoo.models.selection import LogitRelaxedBernoulli, parent_log_weights


@pytest.mark.parametrize("temperature", [0.1, 0.5, 2.0])
def test_a_million_float32_draws_and_densities_are_finite(temperature):
    torch.manual_seed(0)
    logits = torch.linspace(-20, 20, 1_000_000)
    law = LogitRelaxedBernoulli(torch.tensor(temperature), logits=logits)
    draws = law.rsample()
    other = LogitRelaxedBernoulli(torch.tensor(temperature), logits=-logits)
    for density in (law.log_prob(draws), other.log_prob(draws)):
        assert density.isfinite().all()
    assert draws.isfinite().all() and draws.sigmoid().isfinite().all()


def test_its_density_integrates_to_one_and_favours_the_probable_end():
    grid = torch.linspace(-200, 200, 400_001, dtype=torch.float64)
    law = LogitRelaxedBernoulli(grid.new_tensor(0.5), logits=grid.new_tensor(0.7))
    density = law.log_prob(grid).exp()
    assert torch.trapezoid(density, grid).item() == pytest.approx(1, abs=1e-8)
    # P(value > 0) of a Concrete is the Bernoulli's probability, at every temperature
    above = torch.trapezoid(density[grid >= 0], grid[grid >= 0]).item()
    assert above == pytest.approx(1 / (1 + math.exp(-0.7)), abs=1e-3)


def test_parents_that_are_off_leave_the_dummy():
    log_presence = torch.tensor([[0.0, -math.inf], [-math.inf, -math.inf]], dtype=torch.float64)
    affinity = torch.tensor([[0.5, 0.2]], dtype=torch.float64).log()
    shares = parent_log_weights(log_presence, affinity, epsilon=0.1).softmax(-1)
    expected = torch.tensor([[[0.1 / 0.6, 0.5 / 0.6, 0.0]], [[1.0, 0.0, 0.0]]])
    torch.testing.assert_close(shares, expected.double(), rtol=0, atol=1e-7)
