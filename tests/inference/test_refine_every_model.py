"""Test-time inference for every model with a density, and against posteriors that are known."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch.distributions import kl_divergence
from variants import create, small_settings

from capsule_zoo.guides import FreeForm
from capsule_zoo.inference import SemiAmortized, check_pair, evaluate
from capsule_zoo.inference.log_weight import log_weights
from capsule_zoo.inference.posterior.refine import refine
from capsule_zoo.inference.posterior.widen import widen
from capsule_zoo.models import Model, Site
from capsule_zoo.models.common.spaces import ImageSpace

NAMES = {
    "vae": {},
    "generative-capsnet": {},
    "generative-capsnet:continuous": {},
    "recurrent-capsules": {},
    "capsule-helmholtz": {"hidden_family": "gaussian"},
    "part-whole": {},
}
BATCH = 3


def make(name):
    pyro.set_rng_seed(0)
    entry = create(name, **{**small_settings(name), **NAMES[name]})
    return entry, torch.rand(BATCH, *entry.model.image_shape)


def all_finite(idata):
    return bool(torch.as_tensor(idata.sample_stats.log_weight.values).isfinite().all())


@pytest.mark.parametrize("distribution", ["delta", "normal"])
@pytest.mark.parametrize("name", NAMES)
def test_no_image_ends_below_its_start(name, distribution):
    entry, images = make(name)
    before = {k: v.clone() for k, v in entry.model.state_dict().items()}
    for start in (entry.guide, None):
        guide = refine(
            entry.model, start, images, steps=4, distribution=distribution, lr=0.5
        )  # far too long steps
        refinement = guide.refinement
        assert (refinement.end >= refinement.start).all() and refinement.end.isfinite().all()
        check_pair(entry.model, guide, images)
    check_pair(entry.model.discretize(), guide.discretize(), images)
    idata = evaluate(entry.model, guide, images, num_particles=2)
    assert all_finite(idata)
    assert idata.attrs["is_bound"] == (distribution == "normal")
    assert all(torch.equal(v, before[k]) for k, v in entry.model.state_dict().items())


@pytest.mark.parametrize("name", NAMES)
def test_images_of_a_batch_do_not_mix(name):
    """Nothing of one image's log weight depends on the parameters of another."""
    entry, images = make(name)
    free = FreeForm(entry.model, images, entry.guide, "normal")
    log_weights(entry.model, free, images)[0][1].backward()
    for parameter in free.parameters():
        gradient = parameter.grad.flatten(1).abs().sum(1)
        assert gradient[1] > 0 and gradient[[0, 2]].max() == 0
    order = torch.tensor([2, 0])
    for name_, parameter in free.select(order).named_parameters():
        assert torch.equal(parameter, free.get_parameter(name_)[order])


@pytest.mark.parametrize("name", NAMES)
def test_semi_amortized_and_widened_guides_fit_and_bound(name):
    entry, images = make(name)
    semi = SemiAmortized(entry.guide, steps=2)
    points = FreeForm(entry.model, images, entry.guide)
    for guide in (semi, widen(entry.model, points, images, steps=2)):
        check_pair(entry.model, guide, images)
        idata = evaluate(entry.model, guide, images, num_particles=2)
        assert all_finite(idata) and idata.attrs["is_bound"]


class Diagonal(Model):
    """z ~ Normal(0, 1), pixel i ~ Normal(a_i z_i, sigma): the posterior is diagonal."""

    sites = (Site("z", ("images",), event_dim=1),)
    space = ImageSpace((1, 2, 2), (-math.inf, math.inf))
    slope = torch.tensor([0.5, 1.0, 2.0, -3.0], dtype=torch.float64)
    sigma = 0.4

    def forward(self, images=None, labels=None, batch_size=1):
        with pyro.plate("images", batch_size if images is None else len(images), dim=-1):
            z = pyro.sample("z", dist.Normal(torch.zeros_like(self.slope), 1.0).to_event(1))
            mean = (self.slope * z).unflatten(-1, self.image_shape)
            return pyro.sample("image", dist.Normal(mean, self.sigma).to_event(3), obs=images)

    def posterior(self, images):
        precision = 1 + (self.slope / self.sigma) ** 2
        mean = self.slope * images.flatten(1) / self.sigma**2 / precision
        return dist.Normal(mean, precision.rsqrt().expand_as(mean))

    def log_evidence(self, images):
        scale = (self.slope**2 + self.sigma**2).sqrt()
        return dist.Normal(torch.zeros_like(scale), scale).log_prob(images.flatten(1)).sum(1)


def test_a_normal_distribution_reaches_the_exact_evidence_where_the_posterior_is_diagonal(
    monkeypatch,
):
    """Eight points of noise integrate a quadratic exactly, so nothing of the ELBO is random."""
    model = Diagonal()
    images = model(batch_size=BATCH).detach()
    free = FreeForm(model, images, distribution="normal")
    points = 2 * torch.cat([torch.eye(4), -torch.eye(4)]).double()  # mean 0, covariance I
    noise = points.repeat_interleave(BATCH, 0)
    monkeypatch.setattr("torch.distributions.normal._standard_normal", lambda *_, **__: noise)
    optimizer = torch.optim.LBFGS(
        free.parameters(), max_iter=200, tolerance_grad=1e-12, line_search_fn="strong_wolfe"
    )

    def loss():
        optimizer.zero_grad()
        total = -log_weights(model, free, images.repeat(8, 1, 1, 1))[0].sum() / 8
        total.backward()
        return total

    optimizer.step(loss)
    elbo = log_weights(model, free, images.repeat(8, 1, 1, 1))[0].view(8, -1).mean(0)
    torch.testing.assert_close(elbo, model.log_evidence(images), atol=1e-6, rtol=0)
    exact = model.posterior(images)
    torch.testing.assert_close(free.locs["z"], exact.mean, atol=1e-4, rtol=0)
    torch.testing.assert_close(free.log_scales["z"].exp(), exact.stddev, atol=1e-4, rtol=0)


def test_refinement_comes_close_to_a_posterior_that_is_known():
    model = Diagonal()
    images = model(batch_size=BATCH).detach()
    gaps = []
    for steps in (0, 150):
        free = refine(model, None, images, steps=steps, distribution="normal")
        distribution = dist.Normal(free.locs["z"], free.log_scales["z"].exp())
        gaps.append(kl_divergence(distribution, model.posterior(images)).sum(1).detach())
    assert (gaps[1] < 1).all() and (gaps[1] < gaps[0] / 10).all()


class Switches(Model):
    """z_i ~ Bernoulli(0.3), pixel i ~ Normal(z_i, 1): each switch has posterior odds of its own."""

    sites = (Site("z", ("images", "switches"), discrete=True),)
    plate_dims = {"images": -2, "switches": -1}
    space = ImageSpace((1, 2, 2), (-math.inf, math.inf))

    def forward(self, images=None, labels=None, batch_size=1):
        with pyro.plate("images", batch_size if images is None else len(images), dim=-2):
            with pyro.plate("switches", 4, dim=-1):
                z = pyro.sample("z", dist.Bernoulli(torch.tensor(0.3).double()))
            mean = z.unflatten(-1, self.image_shape)[:, None]
            pixels = None if images is None else images[:, None]
            return pyro.sample("image", dist.Normal(mean, 1.0).to_event(3), obs=pixels)[:, 0]

    def posterior_logits(self, images):
        return math.log(0.3 / 0.7) + images.flatten(1) - 0.5


def test_refinement_finds_the_posterior_odds_of_switches():
    """Draws of switches have no gradient; without the score function logits do a random walk."""
    model = Switches()
    images = model(batch_size=BATCH).detach()
    guide = refine(model, None, images, steps=150, lr=0.05)
    exact = dist.Bernoulli(logits=model.posterior_logits(images))
    distribution = dist.Bernoulli(logits=guide.logits["z"])
    start = dist.Bernoulli(logits=torch.zeros(BATCH, 4).double())
    gap, first = (kl_divergence(q, exact).sum() for q in (distribution, start))
    assert gap < 0.2 * first


def test_a_discrete_guide_draws_what_the_discrete_model_draws():
    entry, images = make("generative-capsnet")
    free = FreeForm(entry.model, images, entry.guide)
    kind = poutine.trace(free.discretize()).get_trace(images).nodes["object_kind"]
    assert set(kind["value"].unique().tolist()) <= {0.0, 1.0}
    torch.testing.assert_close(kind["fn"].logits, free.logits["object_kind"].log_softmax(-1))
