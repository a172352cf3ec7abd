"""A mixture of two Gaussians with unknown means; the components of points are summed out."""

import pyro
import pyro.distributions as dist
import torch

generator = torch.Generator().manual_seed(2)
points = torch.cat([torch.randn(24, generator=generator) - 2, torch.randn(16, generator=generator)])
weights = torch.tensor([0.6, 0.4])


def program(x):
    with pyro.plate("components", 2):
        means = pyro.sample("means", dist.Normal(0.0, 3.0))
    with pyro.plate("points", len(x)):
        component = pyro.sample("component", dist.Categorical(weights))
        pyro.sample("x", dist.Normal(means[component], 1.0), obs=x)


def example():
    return program, (points,), {}
