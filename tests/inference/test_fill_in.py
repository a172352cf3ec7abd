"""Filling in is checked on a linear Gaussian model with known conditionals, in float64."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal
from toys import BernoulliMixture, NoGuide

from capsule_zoo.data import half_mask, hide
from capsule_zoo.guides import Guide
from capsule_zoo.inference import evaluate, fill_in, reconstruct
from capsule_zoo.models import Model, Site
from capsule_zoo.models.common.spaces import ImageSpace
from capsule_zoo.registry import create, small_settings

SHAPE, LATENT, SIGMA = (1, 2, 3), 2, 0.3
PIXELS = math.prod(SHAPE)


class LinearGaussian(Model):
    """A model with z ~ Normal(0, I), image ~ Normal(W z + b, sigma)."""

    sites = (Site("z", ("images",), event_dim=1),)
    space = ImageSpace(SHAPE, (-math.inf, math.inf))

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.weight = torch.nn.Parameter(
            torch.randn(PIXELS, LATENT, generator=generator, dtype=torch.float64)
        )
        self.bias = torch.nn.Parameter(torch.linspace(-1, 1, PIXELS, dtype=torch.float64))

    def forward(self, images=None, labels=None, batch_size=1):
        with pyro.plate("images", batch_size if images is None else len(images), dim=-1):
            z = pyro.sample("z", dist.Normal(self.bias.new_zeros(LATENT), 1.0).to_event(1))
            mean = (z @ self.weight.T + self.bias).unflatten(-1, SHAPE)
            return pyro.sample("image", dist.Normal(mean, SIGMA).to_event(3), obs=images)

    def posterior(self, image: Tensor, observed: Tensor) -> MultivariateNormal:
        """Return p(z | observed pixels) of one image."""
        mask = observed.flatten()
        weight, rest = self.weight[mask], (image.flatten() - self.bias)[mask]
        precision = torch.eye(LATENT, dtype=torch.float64) + weight.T @ weight / SIGMA**2
        covariance = precision.inverse()
        return MultivariateNormal(covariance @ weight.T @ rest / SIGMA**2, covariance)

    def log_marginal(self, image: Tensor, pixels: Tensor) -> Tensor:
        """Compute log p of some pixels of one image."""
        mask = pixels.flatten()
        weight = self.weight[mask]
        covariance = weight @ weight.T + SIGMA**2 * torch.eye(int(mask.sum())).double()
        return MultivariateNormal(self.bias[mask], covariance).log_prob(image.flatten()[mask])


class Wide(Guide):
    """A guide that does not read the image."""

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        with pyro.plate("images", len(images), dim=-1):
            distribution = dist.Normal(images.new_zeros(len(images), LATENT), 1.0)
            return pyro.sample("z", distribution.to_event(1))


class Reader(Guide):
    """A guide to latents that are known exactly from two pixels."""

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        with pyro.plate("images", len(images), dim=-1):
            distribution = dist.Normal(images.flatten(1)[:, ::3] + images.flatten(1)[:, 1::3], 1e-6)
            return pyro.sample("z", distribution.to_event(1))


class Exact(Guide):
    """A guide with the exact posterior given the observed pixels of these images."""

    per_image = True

    def __init__(self, model: LinearGaussian, images: Tensor, observed: Tensor) -> None:
        super().__init__(model)
        distributions = [model.posterior(x, o) for x, o in zip(images, observed, strict=True)]
        self.mean = torch.stack([distribution.mean for distribution in distributions]).detach()
        self.covariance = torch.stack(
            [distribution.covariance_matrix for distribution in distributions]
        ).detach()

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        copies = len(images) // len(self.mean)
        with pyro.plate("images", len(images), dim=-1):
            mean, covariance = self.mean.repeat(copies, 1), self.covariance.repeat(copies, 1, 1)
            return pyro.sample("z", dist.MultivariateNormal(mean, covariance))


@pytest.fixture
def problem():
    model = LinearGaussian()
    images = model(batch_size=3).detach()
    observed = torch.tensor(
        [[[1, 1, 0], [1, 0, 0]], [[0, 1, 1], [0, 1, 0]], [[1, 0, 1], [1, 1, 0]]], dtype=torch.bool
    )[:, None]
    return model, images, observed


def test_every_weight_of_the_exact_posterior_is_the_observed_pixels_marginal(problem):
    model, images, observed = problem
    guide = Exact(model, images, observed)
    idata = evaluate(
        model.with_missing_pixels(),
        guide.with_missing_pixels(),
        hide(images, observed),
        num_particles=4,
    )
    weights = torch.as_tensor(idata.sample_stats.log_weight.values[0])
    expected = torch.stack(
        [model.log_marginal(*pair) for pair in zip(images, observed, strict=True)]
    )
    torch.testing.assert_close(weights, expected.detach().expand(4, -1))


class OneHotMixture(BernoulliMixture):
    """The mixture with its kind as a vector, which is enumerated as a whole."""

    def forward(self, images=None, labels=None, batch_size=1):
        size, summed = batch_size if images is None else len(images), {"enumerate": "parallel"}
        with pyro.plate("images", size, dim=-1):
            kind = pyro.sample("kind", dist.OneHotCategorical(logits=self.logits), infer=summed)
            logits = (kind @ self.pixel_logits.flatten(1)).unflatten(-1, (1, 2, 2))
            return pyro.sample("image", dist.Bernoulli(logits=logits).to_event(3), obs=images)


@pytest.mark.parametrize("kind", [BernoulliMixture, OneHotMixture])
def test_sites_that_are_summed_out_come_from_their_posterior(kind):
    """Their prior would predict the hidden pixels as if no pixel had been observed."""
    torch.manual_seed(0)
    model, images = (
        kind().double(),
        torch.tensor([[[[1.0, 0], [1, 0]]], [[[0, 1], [1, 1]]]]).double(),
    )
    model.pixel_logits.data *= 3
    observed = torch.tensor([[True, True], [True, False]])
    prediction = fill_in(model, NoGuide(model), images, observed, num_particles=20_000)
    rates = model.pixel_logits.detach().sigmoid().flatten(1)
    joint = model.logits.detach().softmax(0) * torch.stack(
        [dist.Bernoulli(rates[:, :3]).log_prob(x.flatten()[:3]).sum(1).exp() for x in images]
    )
    expected = (joint / joint.sum(1, keepdim=True)) @ rates[:, 3]
    torch.testing.assert_close(prediction.images[:, 0, 1, 1], expected, atol=0.02, rtol=0)
    score = dist.Bernoulli(expected).log_prob(images[:, 0, 1, 1])
    torch.testing.assert_close(prediction.log_hidden, score, atol=0.1, rtol=0)
    every = model.logits.detach().softmax(0) * torch.stack(
        [dist.Bernoulli(rates).log_prob(x.flatten()).sum(1).exp() for x in images]
    )
    mean = ((every / every.sum(1, keepdim=True)) @ rates).unflatten(1, (1, 2, 2))
    painted = reconstruct(model, NoGuide(model), images, num_samples=40_000, batch_size=10**5)
    torch.testing.assert_close(painted, mean, atol=0.02, rtol=0)


def test_presences_of_scenes_that_are_summed_out_fit_the_observed_pixels():
    entry = create("scenes", **small_settings("scenes")).with_enumerated_presences
    observed = half_mask(entry.model.image_shape[1:], "left")
    images = torch.rand(3, *entry.model.image_shape)
    result = fill_in(entry.model, entry.guide, images, observed, num_particles=3)
    assert torch.isfinite(result.log_hidden).all()


@pytest.mark.parametrize("which", [Exact, Wide])
def test_hidden_pixels_are_predicted_by_their_conditional(problem, which):
    """Any guide will do, as draws are weighted: p(hidden | observed) = p(all) / p(observed)."""
    model, images, observed = problem
    guide = Exact(model, images, observed) if which is Exact else Wide(model)
    draws = 60000
    prediction = fill_in(
        model, guide, images, observed, num_particles=draws, weighted=True, batch_size=3 * draws
    )
    for i, (image, mask) in enumerate(zip(images, observed, strict=True)):
        everything = model.log_marginal(image, torch.ones_like(mask))
        expected = everything - model.log_marginal(image, mask)
        assert prediction.log_hidden[i].item() == pytest.approx(expected.item(), abs=0.1)
        mean = (model.weight @ model.posterior(image, mask).mean + model.bias).view(SHAPE)
        torch.testing.assert_close(
            prediction.images[i][~mask], mean[~mask].detach(), atol=0.05, rtol=0
        )
        assert torch.equal(prediction.images[i][mask], image[mask])
        assert torch.equal(prediction.drawn[i][mask], image[mask])
    if which is Exact:
        torch.testing.assert_close(prediction.ess, torch.full_like(prediction.ess, draws))
    else:
        assert (prediction.ess < draws / 2).all() and (prediction.ess > 100).all()


def test_draws_of_equal_weight_score_the_guide(problem):
    """Draws from the prior predict as the prior does, whatever was observed."""
    model, images, observed = problem
    prediction = fill_in(model, Wide(model), images, observed, num_particles=8000, batch_size=3000)
    assert torch.equal(prediction.ess.round(), torch.full_like(prediction.ess, 8000))
    prior = model.bias.view(SHAPE).expand_as(images)
    torch.testing.assert_close(prediction.images[~observed], prior[~observed], atol=0.1, rtol=0)
    for i, (image, mask) in enumerate(zip(images, observed, strict=True)):
        expected = model.log_marginal(image, ~mask).item()
        assert prediction.log_hidden[i].item() == pytest.approx(expected, abs=0.3)


def test_what_stands_at_hidden_pixels_changes_only_their_score(problem):
    model, images, observed = problem
    changed = torch.where(observed, images, images + 1)
    pair = images, changed
    prediction, other = (fill_in(model, Wide(model), x, observed, weighted=True) for x in pair)
    assert torch.equal(prediction.images[~observed], other.images[~observed])
    assert torch.equal(prediction.ess, other.ess)
    assert (prediction.log_hidden != other.log_hidden).all()
    unknown = fill_in(model, Wide(model), hide(images, observed), weighted=True)
    assert torch.equal(unknown.images, prediction.images)
    assert (unknown.log_hidden.abs() < 1e-9).all()  # nothing was given to score


def test_test_time_inference_finds_the_posterior_mean(problem):
    """Normal distributions fitted to the observed pixels: their means are the posterior's."""
    model, images, observed = problem
    start = fill_in(model, Wide(model), images, observed, weighted=True)
    sizes = {"num_particles": 1000, "steps": 200}
    weighted = fill_in(model, Wide(model), images, observed, weighted=True, **sizes)
    assert (weighted.ess > 10 * start.ess).all()  # ten times as many draws, of more equal weights
    prediction = fill_in(model, Wide(model), images, observed, **sizes)
    for i, (image, mask) in enumerate(zip(images, observed, strict=True)):
        mean = (model.weight @ model.posterior(image, mask).mean + model.bias).view(SHAPE)
        torch.testing.assert_close(
            prediction.images[i][~mask], mean[~mask].detach(), atol=0.25, rtol=0
        )


def test_images_keep_their_places_in_batches(problem):
    model, images, observed = problem
    sizes = {"num_particles": 5, "weighted": True}
    parts = [
        fill_in(model, Reader(model), images, observed, batch_size=n, **sizes) for n in (2, 64)
    ]
    torch.testing.assert_close(parts[0].images, parts[1].images, atol=1e-3, rtol=0)
    apart = (parts[0].images[~observed][:, None] - parts[0].images[~observed]).abs()
    assert (apart + torch.eye(len(apart)) > 1e-3).all()  # no two pixels are alike


@pytest.mark.parametrize(
    "name", ["part-whole", "vae", "draw", "generative-capsnet", "capsule-helmholtz"]
)
def test_test_time_inference_runs_for_every_kind_of_model(name):
    pyro.set_rng_seed(0)
    entry = create(name, **small_settings(name))
    images = torch.rand(4, *entry.model.image_shape)
    observed = half_mask(entry.model.image_shape[1:], "left")
    prediction = fill_in(entry.model, entry.guide, images, observed, num_particles=3, steps=4)
    assert prediction.images.shape == images.shape and torch.isfinite(prediction.log_hidden).all()
    mask = observed.expand(images.shape)
    assert torch.equal(prediction.images[mask], images[mask])
