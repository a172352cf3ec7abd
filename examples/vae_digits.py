"""Pyro's tutorial VAE on scikit-learn's small digits, with two latent numbers."""

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.optim import Adam  # type: ignore[attr-defined]
from sklearn.datasets import load_digits
from torch import nn


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.decoder = nn.Sequential(nn.Linear(2, 64), nn.Softplus(), nn.Linear(64, 64))
        self.encoder = nn.Sequential(nn.Linear(64, 64), nn.Softplus(), nn.Linear(64, 4))

    def model(self, x):
        pyro.module("decoder", self.decoder)
        with pyro.plate("data", x.shape[0]):
            z = pyro.sample("latent", dist.Normal(x.new_zeros(2), 1.0).to_event(1))
            pyro.sample("obs", dist.Bernoulli(logits=self.decoder(z)).to_event(1), obs=x)

    def guide(self, x):
        pyro.module("encoder", self.encoder)
        with pyro.plate("data", x.shape[0]):
            loc, log_scale = self.encoder(x).chunk(2, -1)
            pyro.sample("latent", dist.Normal(loc, log_scale.exp()).to_event(1))


def example():
    digits = torch.tensor(load_digits().data > 8, dtype=torch.float32)
    pyro.set_rng_seed(0)
    vae = VAE()
    svi = SVI(vae.model, vae.guide, Adam({"lr": 3e-3}), Trace_ELBO())
    for step in range(1000):
        svi.step(digits[torch.randint(1500, (128,))])
    return vae.model, (digits[1500:],), {}
