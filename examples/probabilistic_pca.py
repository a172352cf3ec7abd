"""Probabilistic principal components of iris flowers, at the maximum-likelihood loadings.

Tipping & Bishop 1999, "Probabilistic Principal Component Analysis".
"""

import pyro
import pyro.distributions as dist
import torch
from sklearn.datasets import load_iris

flowers = torch.tensor(load_iris().data, dtype=torch.float32)
flowers = flowers - flowers.mean(0)
values, vectors = torch.linalg.eigh(flowers.T.cov(correction=0))
noise = values[:2].mean().sqrt()
loadings = vectors[:, 2:] * (values[2:] - noise**2).sqrt()


def program(x):
    with pyro.plate("flowers", len(x)):
        code = pyro.sample("code", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        pyro.sample("x", dist.Normal(code @ loadings.T, noise).to_event(1), obs=x)


def example():
    return program, (flowers,), {}
