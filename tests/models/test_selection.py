"""Relaxed presences stay finite, and their density is the Concrete's."""

import math

import pytest
import torch

from capsule_zoo.models.parts.parent_selection import LogitRelaxedBernoulli, parent_log_weights


@pytest.mark.parametrize("temperature", [0.1, 0.5, 2.0])
def test_a_million_float32_draws_and_densities_are_finite(temperature):
    torch.manual_seed(0)
    logits = torch.linspace(-20, 20, 1_000_000)
    distribution = LogitRelaxedBernoulli(torch.tensor(temperature), logits=logits)
    draws = distribution.rsample()
    other = LogitRelaxedBernoulli(torch.tensor(temperature), logits=-logits)
    for density in (distribution.log_prob(draws), other.log_prob(draws)):
        assert density.isfinite().all()
    assert draws.isfinite().all() and draws.sigmoid().isfinite().all()


def test_its_density_integrates_to_one_and_favors_the_probable_end():
    grid = torch.linspace(-200, 200, 400_001, dtype=torch.float64)
    distribution = LogitRelaxedBernoulli(grid.new_tensor(0.5), logits=grid.new_tensor(0.7))
    density = distribution.log_prob(grid).exp()
    assert torch.trapezoid(density, grid).item() == pytest.approx(1, abs=1e-8)
    # P(value > 0) of a Concrete is the Bernoulli's probability, at every temperature
    above = torch.trapezoid(density[grid >= 0], grid[grid >= 0]).item()
    assert above == pytest.approx(1 / (1 + math.exp(-0.7)), abs=1e-3)


def test_parents_that_are_off_leave_the_dummy():
    log_presence = torch.tensor([[0.0, -math.inf], [-math.inf, -math.inf]], dtype=torch.float64)
    affinity = torch.tensor([[0.5, 0.2]], dtype=torch.float64).log()
    fractions = parent_log_weights(log_presence, affinity, epsilon=0.1).softmax(-1)
    expected = torch.tensor([[[0.1 / 0.6, 0.5 / 0.6, 0.0]], [[1.0, 0.0, 0.0]]])
    torch.testing.assert_close(fractions, expected.double(), rtol=0, atol=1e-7)


@pytest.mark.parametrize("logit", [-80.0, -3.0, 0.0, 80.0])
def test_relaxed_draws_follow_their_density_far_from_zero(logit):
    """value * temperature - logit is logistic whatever the logit, and its slope is exact."""
    torch.manual_seed(0)
    logits = torch.full((100_000,), logit, requires_grad=True)
    temperature = torch.tensor(0.5)
    value = LogitRelaxedBernoulli(temperature, logits=logits).rsample()
    noise = (value * temperature - logits).detach()
    assert noise.mean().abs() < 0.03  # standard deviation pi / sqrt(3 n) = .0057: five of them
    assert noise.std().item() == pytest.approx(math.pi / math.sqrt(3), rel=0.02)
    (slope,) = torch.autograd.grad(value.sum(), logits)
    assert torch.equal(slope, torch.full_like(logits, 2.0))
