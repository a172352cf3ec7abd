"""Every family against the definition of a density in natural form."""

import math

import pyro.distributions as dist
import pytest
import torch

from capsule_zoo.models.units.exponential_family import FAMILIES, FastBernoulli, make_units


def make(family):
    torch.manual_seed(0)
    units = make_units("family", family, 2, 3).double()
    with torch.no_grad():
        for parameter in units.parameters():
            parameter.copy_(0.7 * torch.randn_like(parameter))
    return units, 0.8 * torch.randn(4, 2, 3, dtype=torch.float64)


def support(family):
    """Return values of a unit and the measure that a sum over them represents."""
    if family == "bernoulli":
        return torch.arange(2.0, dtype=torch.float64), 1.0
    if family == "poisson":
        return torch.arange(80.0, dtype=torch.float64), 1.0
    return torch.linspace(-60, 60, 2401, dtype=torch.float64), 0.05


@pytest.mark.parametrize("family", FAMILIES)
def test_density_is_the_natural_form_and_sums_to_one(family):
    units, field = make(family)
    values, measure = support(family)
    values = values[:, None, None, None]
    log_density = units.log_base(values) + field * values - units.log_partition(field)
    torch.testing.assert_close(units.distribution(field).log_prob(values), log_density)
    total = log_density.logsumexp(0) + math.log(measure)
    torch.testing.assert_close(total, torch.zeros_like(field), rtol=0, atol=1e-10)


@pytest.mark.parametrize("family", FAMILIES)
def test_mean_is_the_slope_of_the_log_partition_and_of_the_distribution(family):
    units, field = make(family)
    field.requires_grad_()
    (slope,) = torch.autograd.grad(units.log_partition(field).sum(), field)
    torch.testing.assert_close(units.mean(field), slope)
    torch.testing.assert_close(units.distribution(field).mean, slope)
    torch.testing.assert_close(units.link(units.mean(field)), units.bias + field)


def test_fast_bernoulli_is_bernoulli():
    torch.manual_seed(0)
    logits = torch.linspace(-30, 30, 7, dtype=torch.float64).view(7, 1).requires_grad_()
    fast, plain = (kind(logits=logits) for kind in (FastBernoulli, dist.Bernoulli))
    for value in (torch.zeros(7, 1).double(), torch.ones(7, 1).double()):
        torch.testing.assert_close(fast.log_prob(value), plain.log_prob(value), rtol=0, atol=1e-12)
        gradients = [torch.autograd.grad(d.log_prob(value).sum(), logits)[0] for d in (fast, plain)]
        torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)
    drawn = fast.expand((7, 2)).sample((20_000,))
    assert drawn.shape == (20_000, 7, 2) and not drawn.requires_grad
    assert set(drawn.unique().tolist()) == {0.0, 1.0}
    assert ((drawn.mean(0) - plain.probs).abs() < 5.5 * 0.5 / 20_000**0.5).all()
    assert fast.expand((7, 2)).to_event(1).log_prob(drawn).shape == (20_000, 7)
