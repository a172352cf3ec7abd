"""The importance-weighted bound: exact values and gradients, by quadrature and by enumeration."""

import itertools
import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import RenyiELBO, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from torch import nn
from toys import (
    QUIET,
    BernoulliMixture,
    Conjugate,
    ExactGuide,
    NoGuide,
    binary_images,
    conjugate_images,
    fit,
    gradients,
    pair,
)

from capsule_zoo.guides.base import Guide
from capsule_zoo.inference import ImportanceWeightedELBO, is_bound, log_weights, loss_per_image
from capsule_zoo.inference.objectives.base import repeat_batch


class KindGuide(Guide):
    """A guide q(kind | image) with logits linear in the pixels; it cannot be reparametrized."""

    covers = ("kind",)

    def __init__(self, model):
        super().__init__(model)
        self.weight = nn.Parameter(torch.tensor([[0.3, -0.2, 0.1, 0.4]]).expand(3, 4).clone())
        self.bias = nn.Parameter(torch.tensor([0.5, 0.0, -0.7]))

    def logits(self, images):
        return images.flatten(1) @ self.weight.T + self.bias

    def forward(self, images, labels=None):
        with pyro.plate("images", len(images), dim=-1):
            pyro.sample("kind", dist.Categorical(logits=self.logits(images)))


def mixture():
    model = BernoulliMixture(enumerated=False).double()
    return model, KindGuide(model).double()


def power_mean(log_weight, alpha, dim):
    """Compute 1/(1-alpha) log of the mean of w^(1-alpha), or its limit at 1."""
    if alpha == 1:
        return log_weight.mean(dim)
    return ((1 - alpha) * log_weight).exp().mean(dim).log() / (1 - alpha)


def quadrature_bound(model, guide, images, particles, nodes=60, alpha=0.0):
    """Compute the bound of one or two particles by Gauss-Hermite quadrature over the guide."""
    points, weights = np.polynomial.hermite_e.hermegauss(nodes)
    points = torch.from_numpy(points)
    weights = torch.from_numpy(weights / math.sqrt(2 * math.pi))
    means = guide.slope * images.sum((1, 2, 3)) + guide.offset  # (B,)
    code = means[:, None] + guide.scale * points  # (B, nodes)
    pixels = dist.Normal(code[..., None], model.noise).log_prob(images.flatten(1)[:, None]).sum(-1)
    prior = dist.Normal(model.mean, 1.0).log_prob(code)
    log_weight = pixels + prior - dist.Normal(means[:, None], guide.scale).log_prob(code)
    if particles == 1:
        return (log_weight @ weights).mean()
    pairs = torch.broadcast_tensors(log_weight[:, :, None], log_weight[:, None, :])
    both = power_mean(torch.stack(pairs), alpha, 0)
    return torch.einsum("bij,i,j->b", both, weights, weights).mean()


def enumerated_bound(model, guide, images, particles, alpha=0.0):
    """Compute the mixture's bound as a sum over every combination of kinds of the particles."""
    log_q = guide.logits(images).log_softmax(1)  # (B, 3)
    pixels = dist.Bernoulli(logits=model.pixel_logits).log_prob(images[:, None]).sum((2, 3, 4))
    log_weight = model.logits.log_softmax(0) + pixels - log_q
    total = 0
    for kinds in itertools.product(range(3), repeat=particles):
        indices = list(kinds)
        value = power_mean(log_weight[:, indices], alpha, 1)
        total = total + log_q[:, indices].sum(1).exp() * value
    return total.mean()


def assert_unbiased(model, guide, images, objective, exact, copies=800, chunks=12):
    """Check that value and gradient, averaged over many draws, are exact within 4.5 errors."""
    wanted = torch.cat([-exact.detach()[None], gradients(-exact, model, guide)])
    draws = []
    for _ in range(chunks):
        loss = loss_per_image(objective, model, guide, images.repeat(copies, 1, 1, 1))
        draws.append(torch.cat([loss.detach()[None], gradients(loss, model, guide)]))
    draws = torch.stack(draws)
    error = draws.std(0) / math.sqrt(chunks)
    assert ((draws.mean(0) - wanted).abs() < 4.5 * error + 1e-12).all()
    assert error[0] < 0.01 * wanted[0].abs()  # so that the test can fail


@pytest.mark.parametrize(("particles", "alpha"), [(1, 0), (2, 0), (2, 0.5), (2, 1), (2, 3)])
def test_reparametrized_value_and_gradient_are_those_of_the_bound(particles, alpha):
    model, guide = pair()
    images = conjugate_images(3)
    exact = quadrature_bound(model, guide, images, particles, alpha=alpha)
    objective = ImportanceWeightedELBO(particles, alpha=alpha)
    assert_unbiased(model, guide, images, objective, exact)


@pytest.mark.parametrize(
    ("particles", "alpha"), [(1, 0), (2, 0), (4, 0), (1, 0.5), (3, 0.5), (3, 1), (3, 2.5)]
)
def test_value_and_gradient_by_the_score_function_are_those_of_the_bound(particles, alpha):
    model, guide = mixture()
    images = binary_images(3)
    exact = enumerated_bound(model, guide, images, particles, alpha)
    objective = ImportanceWeightedELBO(particles, alpha=alpha)
    assert_unbiased(model, guide, images, objective, exact)


def test_the_order_leads_from_the_importance_weighted_bound_to_the_elbo_and_below():
    model, guide = pair()
    images = conjugate_images(5)

    def bound(alpha):
        pyro.set_rng_seed(3)
        objective = ImportanceWeightedELBO(6, alpha=alpha)
        assert is_bound(objective)
        return -loss_per_image(objective, model, guide, images).item()

    pyro.set_rng_seed(3)
    weight = log_weights(model, guide, *repeat_batch(images, None, 6))[0].view(6, 5).detach()
    assert bound(0) == pytest.approx(weight.exp().mean(0).log().mean().item())
    assert bound(1) == pytest.approx(weight.mean().item())
    assert bound(1e-6) == pytest.approx(bound(0), abs=1e-4)
    assert bound(1 - 1e-6) == pytest.approx(bound(1), abs=1e-4) == bound(1 + 1e-6)
    falling = [bound(alpha) for alpha in (0, 0.2, 0.5, 0.9, 1, 1.1, 2, 10)]
    assert falling == sorted(falling, reverse=True) and falling[0] > falling[-1] + 0.5


def test_pyros_renyi_bound_is_the_same_of_one_image():
    model, guide = pair()
    images = conjugate_images(1)
    for alpha in (0.0, 0.5):
        with torch.no_grad():
            theirs = [RenyiELBO(alpha, 20).loss(model, guide, images) for _ in range(30)]
            objective = ImportanceWeightedELBO(20, alpha=alpha)
            ours = loss_per_image(objective, model, guide, images.repeat(4000, 1, 1, 1)).item()
        error = np.std(theirs) / math.sqrt(30)
        assert ours == pytest.approx(np.mean(theirs), abs=4 * error) and error < 0.2


@pytest.mark.parametrize("make", [pair, mixture], ids=["reparametrized", "score function"])
def test_one_particle_is_the_elbo_with_its_gradient(make):
    model, guide = make()
    images = binary_images(6)
    slopes = []
    for objective in (ImportanceWeightedELBO(1), Trace_ELBO()):
        pyro.set_rng_seed(3)
        loss = loss_per_image(objective, model, guide, images)
        slopes.append(torch.cat([loss.detach()[None], gradients(loss, model, guide)]))
    torch.testing.assert_close(*slopes, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("vectorized", [True, False])
def test_it_is_the_log_of_the_mean_weight_of_each_image(vectorized):
    model, guide = pair()
    images = conjugate_images(5)
    objective = ImportanceWeightedELBO(7, vectorize_particles=vectorized)
    pyro.set_rng_seed(3)
    loss = loss_per_image(objective, model, guide, images)
    pyro.set_rng_seed(3)
    if vectorized:
        weight = log_weights(model, guide, *repeat_batch(images, None, 7))[0].view(7, 5)
    else:
        weight = torch.stack([log_weights(model, guide, images)[0] for _ in range(7)])
    torch.testing.assert_close(-loss, weight.exp().mean(0).log().mean())


def test_the_bound_rises_with_particles_to_the_evidence():
    model, guide = pair()
    images = conjugate_images(4).repeat(500, 1, 1, 1)
    with torch.no_grad():
        bounds = [
            -loss_per_image(ImportanceWeightedELBO(count), model, guide, images).item()
            for count in (1, 4, 16, 256)
        ]
    evidence = model.log_evidence(images).mean().item()
    assert bounds == sorted(bounds) and bounds[0] < evidence - 0.3
    assert evidence - 0.02 < bounds[-1] < evidence + 0.002  # an error of the mean, 2,000 images
    exact = ImportanceWeightedELBO(3)
    value = -loss_per_image(exact, model, ExactGuide(model), images[:4]).item()
    assert value == pytest.approx(model.log_evidence(images[:4]).mean().item(), abs=1e-10)
    assert is_bound(exact)


def test_enumerated_sites_are_summed_out_within_each_weight():
    model, images = BernoulliMixture().double(), binary_images(9)
    loss = loss_per_image(ImportanceWeightedELBO(4), model, NoGuide(model), images)
    torch.testing.assert_close(loss, -model.log_evidence(images).mean())
    wanted = gradients(-model.log_evidence(images).mean(), model)
    torch.testing.assert_close(gradients(loss, model), wanted)


def test_labels_are_repeated_with_their_images():
    calls = []

    class Labeled(Conjugate):
        def forward(self, images=None, labels=None, batch_size=1):
            calls.append((images[:, 0, 0, 0], labels))
            return super().forward(images, labels, batch_size)

    model = Labeled().double()
    images = torch.arange(3.0).double().view(3, 1, 1, 1).expand(3, 1, 2, 2) / 3
    loss_per_image(ImportanceWeightedELBO(2), model, ExactGuide(model), images, torch.arange(3))
    assert torch.equal(calls[0][0] * 3, calls[0][1].double()) and len(calls[0][1]) == 6


def test_guides_with_parameters_for_each_image_draw_particle_by_particle():
    model, _ = pair()
    guide, images = AutoNormal(model), conjugate_images(5)
    objective = ImportanceWeightedELBO(3, vectorize_particles=False)
    run = fit(model, guide, images, steps=40, objective=objective, **QUIET | {"lr": 0.05})
    assert run.history["loss"].iloc[-5:].mean() < run.history["loss"].iloc[:5].mean() - 0.3
