"""Poisson factors: counts of eight types of events, whose rates depend on two factors."""

import pyro
import pyro.distributions as dist
import torch

generator = torch.Generator().manual_seed(0)
loadings = 0.7 * torch.randn(2, 8, generator=generator)
base = torch.rand(8, generator=generator) + 0.5


def program(counts):
    with pyro.plate("days", len(counts)):
        factors = pyro.sample("factors", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        rates = (base + factors @ loadings).exp()
        pyro.sample("counts", dist.Poisson(rates).to_event(1), obs=counts)


def example():
    factors = torch.randn(100, 2, generator=generator)
    counts = torch.poisson((base + factors @ loadings).exp(), generator=generator)
    return program, (counts,), {}
