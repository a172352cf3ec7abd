"""A line through points with outliers, whose indicators are summed out.

Hogg, Bovy & Lang 2010, "Data analysis recipes: Fitting a model to data" (arXiv 1008.4686).
"""

import pyro
import pyro.distributions as dist
import torch

generator = torch.Generator().manual_seed(1)
x = torch.linspace(-1, 1, 20)
y = 0.5 + 1.5 * x + 0.2 * torch.randn(20, generator=generator)
y[[3, 11, 16]] += torch.tensor([2.5, -3.0, 2.0])


def program(x, y=None):
    intercept = pyro.sample("intercept", dist.Normal(0.0, 2.0))
    slope = pyro.sample("slope", dist.Normal(0.0, 2.0))
    with pyro.plate("points", len(x)):
        outlier = pyro.sample("outlier", dist.Bernoulli(0.1), infer={"enumerate": "parallel"})
        scale = torch.where(outlier == 1, 3.0, 0.2)
        pyro.sample("y", dist.Normal(intercept + slope * x, scale), obs=y)


def example():
    return program, (x,), {"y": y}
