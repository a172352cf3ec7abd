"""The variational autoencoder against closed forms, by itself and with its guide."""

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from pyro import poutine
from pyro.infer import TraceMeanField_ELBO
from torch import nn

from capsule_zoo.guides import ConvolutionalEncoder
from capsule_zoo.inference import Checks, evaluate, fit, summarize
from capsule_zoo.inference.evaluation.summary import per_image_elbo
from capsule_zoo.models import VariationalAutoencoder
from capsule_zoo.models.networks.convolutional import Upsampler


def pair(shape=(1, 5, 6), latent=2, **options):
    torch.manual_seed(0)
    model = VariationalAutoencoder(shape, latent, channels=4, **options)
    return model, ConvolutionalEncoder(model, hidden=6)


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (1, 5, 6), (3, 9, 7), (1, 1, 1)])
def test_any_shape_of_image(shape):
    model, guide = pair(shape)
    image = model(batch_size=3)
    assert image.shape == (3, *shape)
    assert guide(torch.rand(4, *shape)).shape == (4, 2)


@pytest.mark.parametrize("shape", [(1, 28, 28), (1, 5, 6), (2, 5, 6)])
def test_what_is_painted_is_a_transposed_convolution(shape):
    torch.manual_seed(0)
    upsampler = Upsampler(3, shape, channels=4).double()
    maps = torch.randn(2, 3, *upsampler.quarter, dtype=torch.float64)
    rows, columns = upsampler.half
    half = F.elu(upsampler.grow(maps)[..., :rows, :columns])
    expected = upsampler.paint(half)[..., : shape[1], : shape[2]]
    torch.testing.assert_close(upsampler(maps), expected)


def linear_gaussian(seed=0):
    """Return a model whose mean image is linear in the code, and its exact posterior as guide."""
    torch.manual_seed(seed)
    model, guide = pair((1, 2, 2))
    model, guide = model.double(), guide.double()
    weight = torch.randn(4, 2, dtype=torch.float64)

    def distribution(code):
        mean = (code @ weight.T).unflatten(-1, (1, 2, 2))
        return dist.Normal(mean, model.sigma_image).to_event(3)

    model.image_distribution = distribution
    variance = model.sigma_image**2
    covariance = torch.linalg.inv(torch.eye(2, dtype=torch.float64) + weight.T @ weight / variance)

    def posterior(images):
        mean = images.flatten(1) @ weight @ covariance / variance
        return dist.MultivariateNormal(mean, covariance)

    guide.code_distribution = posterior
    marginal = weight @ weight.T + variance * torch.eye(4, dtype=torch.float64)
    evidence = dist.MultivariateNormal(torch.zeros(4, dtype=torch.float64), marginal)
    return model, guide, lambda images: evidence.log_prob(images.flatten(1))


def test_with_the_exact_posterior_every_weight_is_the_evidence():
    model, guide, evidence = linear_gaussian()
    images = torch.rand(3, 1, 2, 2, dtype=torch.float64)
    idata = evaluate(model, guide, images, num_particles=4)
    weights = torch.from_numpy(idata.sample_stats["log_weight"].values[0])
    torch.testing.assert_close(weights, evidence(images).expand(4, 3), rtol=0, atol=1e-8)


def test_elbo_is_below_iwae_and_both_are_below_the_evidence():
    model, guide, evidence = linear_gaussian()
    exact = guide.code_distribution

    def wider_and_shifted(images):
        distribution = exact(images)
        return dist.Normal(distribution.mean + 0.05, 1.5 * distribution.variance.sqrt()).to_event(1)

    guide.code_distribution = wider_and_shifted
    images = torch.rand(50, 1, 2, 2, dtype=torch.float64)
    summary = summarize(evaluate(model, guide, images, num_particles=200))
    truth = evidence(images).mean().item()
    assert summary["is_bound"]
    assert summary["elbo"] < summary["iwae"] < truth + 0.01
    assert summary["iwae"] == pytest.approx(truth, abs=0.1)


def test_closed_form_divergence_is_the_estimate_in_expectation():
    model, guide = pair()
    images = torch.rand(4, 1, 5, 6)
    distribution = guide.code_distribution(images)
    mean, scale = distribution.mean, distribution.stddev
    divergence = (mean.square() + scale.square() - 1).sum(1) / 2 - scale.log().sum(1)
    draws = distribution.sample((20_000,))
    with torch.no_grad():
        scores = torch.stack(
            [model.image_distribution(code).log_prob(images) for code in draws[:500]]
        )
        exact = scores.mean(0) - divergence
        per_image = per_image_elbo(evaluate(model, guide, images, num_particles=4000))
        estimate = torch.from_numpy(per_image)
    error = 5 * (scores.std(0) / 500**0.5 + 4 / 4000**0.5)
    assert ((estimate - exact).abs() < error).all()
    ratio = distribution.log_prob(draws) - dist.Normal(0.0, 1.0).log_prob(draws).sum(-1)
    spread = ratio.std(0) / 20_000**0.5
    assert ((ratio.mean(0) - divergence).abs() < 5 * spread).all()


def test_bernoulli_pixels_are_a_cross_entropy_and_binary_ones_a_density():
    model, _ = pair((1, 1, 2), likelihood="bernoulli")
    code = torch.randn(1, 2)
    states = torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]]).view(4, 1, 1, 2)
    distribution = model.image_distribution(code.expand(4, 2))
    assert distribution.log_prob(states).exp().sum().item() == pytest.approx(1, abs=1e-6)
    gray = torch.tensor([[0.3, 0.6]]).view(1, 1, 1, 2)
    expected = -nn.functional.binary_cross_entropy(
        model.image_distribution(code).mean, gray, reduction="sum"
    )
    torch.testing.assert_close(model.image_distribution(code).log_prob(gray)[0], expected)
    drawn = poutine.trace(model).get_trace(batch_size=20).nodes["image"]["value"]
    assert set(drawn.unique().tolist()) <= {0.0, 1.0}


def test_it_learns_to_tell_bright_images_from_dark_ones():
    pyro.set_rng_seed(0)
    model, guide = pair()
    bright = (torch.rand(300) < 0.5).float()[:, None, None, None]
    images = (0.2 + 0.6 * bright).expand(300, 1, 5, 6)
    objective = TraceMeanField_ELBO()
    run = fit(
        model, guide, images, objective=objective, steps=250, lr=0.01, checks=Checks(progress=False)
    )
    distribution = guide.code_distribution(images)
    rebuilt = model.image_distribution(distribution.mean).mean
    assert (rebuilt - images).abs().max() < 0.1
    best = dist.Normal(0.0, model.sigma_image).log_prob(torch.tensor(0.0)) * 30
    assert -run.history["loss"].iloc[-1] > best - 8  # a few nats say which of the two it is
