"""Corrected guides begin as the other guide, keep its order, and reach the exact posterior."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from variants import create, small_settings

from capsule_zoo.guides import Corrected, Guide
from capsule_zoo.inference import check_pair, evaluate, summarize
from capsule_zoo.inference.log_weight import log_weights
from capsule_zoo.inference.posterior.fitted import kinds_for
from capsule_zoo.inference.posterior.refine import refine
from capsule_zoo.models.base import Model, Site
from capsule_zoo.models.common.spaces import ImageSpace

STEP, NOISE = 0.1, 0.5  # standard deviations of the second site and of the pixels


class Walk(Model):
    """first ~ Normal(0, 1), second ~ Normal(first, STEP), four pixels ~ Normal(second, NOISE)."""

    sites = (Site("first", ("images",)), Site("second", ("images",)))
    space = ImageSpace((1, 2, 2), (-math.inf, math.inf))

    def forward(self, images=None, labels=None, batch_size=1):
        zero = torch.zeros((), dtype=torch.double)
        with pyro.plate("images", batch_size if images is None else len(images), dim=-1):
            first = pyro.sample("first", dist.Normal(zero, 1.0))
            second = pyro.sample("second", dist.Normal(first, STEP))
            mean = second[:, None, None, None].expand(-1, *self.image_shape)
            return pyro.sample("image", dist.Normal(mean, NOISE).to_event(3), obs=images)

    def log_evidence(self, images):
        covariance = NOISE**2 * torch.eye(4).double() + (1 + STEP**2)
        distribution = dist.MultivariateNormal(torch.zeros(4).double(), covariance)
        return distribution.log_prob(images.flatten(1))


class Walker(Guide[Walk]):
    """The second site follows the first as in the posterior; means and scales are wrong."""

    def forward(self, images, labels=None):
        precision = 1 / STEP**2 + 4 / NOISE**2
        with pyro.plate("images", len(images), dim=-1):
            total = images.sum((1, 2, 3))
            first = pyro.sample("first", dist.Normal(0.1 * total, 0.8))
            mean = (first / STEP**2 + total / NOISE**2) / precision
            pyro.sample("second", dist.Normal(mean + 0.2, 0.2))


class Bits(Model):
    """Two bits, the second like the first in 9 of 10 draws, and pixels about their sum."""

    sites = (Site("low", ("images",), discrete=True), Site("high", ("images",), discrete=True))
    space = ImageSpace((1, 2, 2), (-math.inf, math.inf))

    def forward(self, images=None, labels=None, batch_size=1):
        half = torch.tensor(0.5).double()
        with pyro.plate("images", batch_size if images is None else len(images), dim=-1):
            low = pyro.sample("low", dist.Bernoulli(half))
            high = pyro.sample("high", dist.Bernoulli(0.1 + 0.8 * low))
            mean = (low + high)[:, None, None, None].expand(-1, *self.image_shape)
            return pyro.sample("image", dist.Normal(mean, 3.0).to_event(3), obs=images)

    def log_joint(self, images):
        """Return log p(image, low, high) for both bits, (B, 2, 2)."""
        bits = torch.tensor([0.0, 1.0]).double()
        alike = torch.tensor([[0.9, 0.1], [0.1, 0.9]]).double()
        mean = (bits[:, None] + bits)[..., None]
        pixels = dist.Normal(mean, 3.0).log_prob(images.flatten(1)[:, None, None, :]).sum(-1)
        return pixels + (0.5 * alike).log()


class Reader(Guide[Bits]):
    """A guide whose second bit knows the first, though by half as much as it should."""

    def forward(self, images, labels=None):
        zero = images.new_zeros(len(images))
        with pyro.plate("images", len(images), dim=-1):
            low = pyro.sample("low", dist.Bernoulli(logits=zero))
            pyro.sample("high", dist.Bernoulli(logits=2.2 * (2 * low - 1)))


def elbo(model, guide, images, particles=400):
    return summarize(evaluate(model, guide, images, num_particles=particles))["elbo"]


@pytest.mark.long
def test_what_free_form_loses_by_independence_a_corrected_guide_keeps():
    """Independent normals lose -log(1 - correlation^2) / 2 = .96 nats of this posterior."""
    torch.manual_seed(0)
    model = Walk()
    guide, images = Walker(model), model(batch_size=20)
    evidence = model.log_evidence(images).mean().item()
    lost = {
        distribution: evidence
        - elbo(model, refine(model, guide, images, steps=300, distribution=distribution), images)
        for distribution in ("corrected", "normal")
    }
    assert evidence - elbo(model, guide, images) > 1
    assert lost["corrected"] < 0.05 and lost["normal"] > 0.9


def test_bits_keep_their_order_too():
    """All but the strength of the link can be corrected; independent bits lose far more."""
    torch.manual_seed(0)
    model = Bits()
    guide, images = Reader(model), model(batch_size=30)
    evidence = model.log_joint(images).logsumexp((1, 2)).mean().item()
    corrected = refine(model, guide, images, steps=200, distribution="corrected", lr=0.1)
    free = refine(model, guide, images, steps=200, distribution="normal", lr=0.04)
    start, after = (elbo(model, candidate, images, 1000) for candidate in (guide, corrected))
    assert start < after < evidence + 0.02
    assert after > elbo(model, free, images, 1000) + 0.1


SERVED = (
    *("capsule-helmholtz", "conditional-autoencoder", "draw", "generative-capsnet"),
    *("generative-capsnet:continuous", "part-whole", "recurrent-capsules", "shape-codes", "vae"),
)


@pytest.mark.parametrize("name", SERVED)
def test_it_begins_as_the_guide_that_it_corrects(name):
    torch.manual_seed(0)
    entry = create(name, **small_settings(name))
    entry.guide.eval()
    images = torch.rand(3, *entry.model.image_shape)
    corrected = Corrected(entry.guide, images)
    assert "corrected" in kinds_for(entry.model, entry.guide)
    check_pair(entry.model, corrected, images)
    weights = []
    for guide in (entry.guide, corrected):
        torch.manual_seed(1)
        with torch.no_grad():
            weights.append(log_weights(entry.model, guide, images.repeat(2, 1, 1, 1))[0])
    torch.testing.assert_close(*weights)
    two = corrected.select(torch.tensor([2, 0]))
    assert two.num_images == 2 and two.covers == entry.guide.covers


def test_each_correction_moves_its_own_image():
    model = Walk()
    images = torch.zeros(2, 1, 2, 2).double()
    corrected = Corrected(Walker(model), images)
    with torch.no_grad():
        corrected.locs["first"][1] = 10.0
        corrected.log_scales["first"][1] = math.log(1e-6)
    drawn = poutine.trace(corrected).get_trace(images.repeat(2, 1, 1, 1)).nodes["first"]["value"]
    assert drawn[1].item() == pytest.approx(8.0, abs=1e-4)  # ten standard deviations of .8
    assert drawn[3].item() == pytest.approx(8.0, abs=1e-4) and drawn[::2].abs().max() < 8


def test_the_guide_that_is_corrected_is_left_as_it_was():
    entry = create("vae", **small_settings("vae"))
    images = torch.rand(3, *entry.model.image_shape)
    copies = [p.detach().clone() for p in entry.guide.parameters()]
    refined = refine(entry.model, entry.guide, images, steps=3, distribution="corrected")
    identities = {id(p) for p in entry.guide.parameters()}
    assert not identities & {id(p) for p in refined.parameters()}
    for before, now in zip(copies, entry.guide.parameters(), strict=True):
        assert torch.equal(before, now) and now.requires_grad and now.grad is None
