"""Pairs of plain Pyro: what the verbs that need declared sites say, and that it is enough."""

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroModule
from torch import nn
from torch.utils.data import DataLoader

from capsule_zoo.inference import (
    Checks,
    encode,
    evaluate,
    fit,
    fit_guide,
    infer,
    posterior_predictive,
    reconstruct,
)


class Decoder(PyroModule):
    """A plain Pyro model."""

    def __init__(self):
        super().__init__()
        self.paint = nn.Linear(3, 4)

    def forward(self, images, labels=None):
        with pyro.plate("images", len(images), dim=-1):
            z = pyro.sample("z", dist.Normal(torch.zeros(3), 1.0).to_event(1))
            mean = self.paint(z).sigmoid().view(-1, 1, 2, 2)
            pyro.sample("image", dist.Normal(mean, 0.3).to_event(3), obs=images)


class Encoder(PyroModule):
    """A plain Pyro guide."""

    def __init__(self):
        super().__init__()
        self.read = nn.Linear(4, 3)

    def forward(self, images, labels=None):
        with pyro.plate("images", len(images), dim=-1):
            pyro.sample("z", dist.Normal(self.read(images.flatten(1)), 0.5).to_event(1))


def images_of(number=5):
    return torch.rand(number, 1, 2, 2, generator=torch.Generator().manual_seed(0))


def free_form(model, guide, images):
    return fit_guide("free_form", model, guide, images, steps=2)


VERBS = [encode, reconstruct, posterior_predictive, free_form]
DECLARED = (
    r"subclass capsule_zoo.models.Model, "
    r'with sites = \(Site\("z", plates=\("images",\), event_dim=1\)'
    r",\), space = ImageSpace\(\(1, 2, 2\)\), .* forward\(images=None, labels=None, batch_size=1\)"
)


@pytest.mark.parametrize("verb", VERBS)
def test_a_plain_pair_is_told_what_to_declare(verb):
    with pytest.raises(ValueError, match=rf"^model is a Decoder, a plain Pyro.*{DECLARED}") as e:
        verb(Decoder(), Encoder(), images_of())
    name = "fit_guide" if verb is free_form else verb.__name__
    assert "\n" not in str(e.value) and name in str(e.value)
    assert "fit, evaluate and compare take the program as it is" in str(e.value)


def test_fit_evaluate_and_infer_take_the_plain_pair():
    model, guide, images = Decoder(), Encoder(), images_of()
    fit(model, guide, images, steps=2, checks=Checks(progress=False))
    whole = evaluate(model, guide, images, num_particles=2)
    parts = evaluate(model, guide, DataLoader(images, 2), num_particles=2)
    np.testing.assert_array_equal(whole.sample_stats.log_weight, parts.sample_stats.log_weight)
    assert infer(guide, images, ["z"])["z"].shape == (5, 3)
