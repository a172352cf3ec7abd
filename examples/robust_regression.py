"""Linear regression whose coefficients have a prior with heavy tails.

Gelman, Jakulin, Pittau & Su 2008, "A weakly informative default prior distribution for logistic
and other regression models".
"""

import pyro
import pyro.distributions as dist
import torch

generator = torch.Generator().manual_seed(4)
x = torch.randn(30, 2, generator=generator)
y = x @ torch.tensor([0.2, 4.0]) + 0.5 * torch.randn(30, generator=generator)


def program(x, y=None):
    coefficients = pyro.sample("coefficients", dist.Cauchy(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("cases", len(x)):
        pyro.sample("y", dist.Normal(x @ coefficients, 0.5), obs=y)


def example():
    return program, (x,), {"y": y}
