"""Eight schools: effects of coaching, with a half-Cauchy prior on their standard deviation.

Rubin 1981; Gelman 2006, "Prior distributions for variance parameters in hierarchical models".
"""

import pyro
import pyro.distributions as dist
import torch

effects = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
errors = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])


def program(errors, y=None):
    mean = pyro.sample("mean", dist.Normal(0.0, 5.0))
    spread = pyro.sample("spread", dist.HalfCauchy(5.0))
    with pyro.plate("schools", 8):
        effect = pyro.sample("effect", dist.Normal(mean, spread))
        pyro.sample("y", dist.Normal(effect, errors), obs=y)


def example():
    return program, (errors,), {"y": effects}
