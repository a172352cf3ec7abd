"""The recognition machine with Gaussian units: both natural parameters, by oracles."""

import math
from functools import partial

import pytest
import torch
from machines import helmholtz_pair
from pyro import poutine
from scipy.integrate import quad
from torch.distributions import MultivariateNormal

from capsule_zoo.guides import RecognitionMachine
from capsule_zoo.inference import log_weights
from capsule_zoo.models import CapsuleHelmholtzMachine

LIMIT = math.log(1000)  # of the narrowing, in nats
GAUSSIAN = dict(visible_family="gaussian", hidden_family="gaussian")
randomized = partial(helmholtz_pair, scale=0.5)


def log_q(guide, values, images):
    trace = poutine.trace(poutine.condition(guide, data=values)).get_trace(images)
    trace.compute_log_prob()
    return sum(trace.nodes[name]["log_prob"].sum(-1) for name in values)


@torch.no_grad()
def test_recognition_is_an_exponential_family_in_both_natural_parameters():
    """Its density is exp(-E) over a partition function that is integrated numerically."""
    _, guide = randomized(4, (2,), 2, **GAUSSIAN)
    layer, units = guide.layers[0], guide.model.layers[0].hidden
    image = torch.randn(1, 1, 2, 2).double()
    pixels = (image - guide.model.visible.mean()).flatten(1)
    field = (pixels @ layer.coupling.weight.flatten(1)).view(2, 2) + layer.hidden_bias
    switch = (layer.switch_bias + pixels @ layer.coupling.switch_weight).flatten()
    precisions = units.log_precision.exp()

    def parameters(z, k, j):
        narrower = math.exp(z * LIMIT * math.tanh(layer.narrowing[k, j].item() / LIMIT))
        return (units.bias + z * field)[k, j].item(), precisions[k, j].item() * narrower

    def mass(z, k, j):
        first, precision = parameters(z, k, j)
        return quad(lambda h: math.exp(first * h - precision * h * h / 2), -60, 60, limit=400)[0]

    hidden = torch.randn(2, 2).double()
    for states in ((0, 0), (0, 1), (1, 0), (1, 1)):
        expected = 0.0
        for k, z in enumerate(states):
            off, on = (math.prod(mass(s, k, j) for j in range(2)) for s in (0, 1))
            expected -= math.log(off + switch[k].exp().item() * on)
            expected += z * switch[k].item()
            for j in range(2):
                first, precision = parameters(z, k, j)
                expected += first * hidden[k, j].item() - precision * hidden[k, j].item() ** 2 / 2
        values = dict(capsule1_switch=torch.tensor([states]).double(), capsule1_hidden=hidden[None])
        assert log_q(guide, values, image).item() == pytest.approx(expected, abs=1e-8)


def disjoint(centered):
    """Return a machine of two Gaussian capsules that paint different pixels, and its posterior."""
    model, guide = randomized((1, 2, 4), (2,), 1, **GAUSSIAN)
    guide.centered = centered
    top, layer = model.layers[0], guide.layers[0]
    with torch.no_grad():
        fractions = torch.arange(8)[:, None] // 4 == torch.arange(2)  # pixels by capsule
        model.weight.mul_(4 * fractions[..., None])
        model.switch_weight.mul_(fractions)
        variance = (-model.visible.log_precision).exp().flatten()  # of a pixel
        paint = model.switch_weight
        raised = 0 if centered else model.visible.bias.flatten()[:, None]  # not subtracted
        weight = model.weight[..., 0]
        ratio = 1 + (weight.square() * variance[:, None]).sum(0) / top.hidden.precision.flatten()
        layer.narrowing.copy_((LIMIT * (ratio.log() / LIMIT).atanh())[:, None])
        layer.coupling.weight.copy_(model.weight)
        layer.coupling.switch_weight.copy_(paint)
        layer.hidden_bias.copy_(-(weight * (paint + raised) * variance[:, None]).sum(0)[:, None])
        added = (paint.square() + 2 * paint * raised) * variance[:, None] / 2
        layer.switch_bias.copy_(top.switch_bias - added.sum(0))
    return model, guide


def log_mixture(model, images):
    """Compute log p(x) of a machine of one layer as a mixture of Gaussians, a switch at a time."""
    top, variance = model.layers[0], (-model.visible.log_precision).exp().flatten()
    hidden_precision = top.hidden.precision.flatten()
    mean = top.hidden.bias.flatten() / hidden_precision
    masses = []
    for states in torch.cartesian_prod(*[torch.tensor([0.0, 1.0]).double()] * 2):
        weight = model.weight[..., 0] * states
        painted = model.visible.bias.flatten() + weight @ mean + model.switch_weight @ states
        spread = (
            variance[:, None] * (weight / hidden_precision) @ weight.T * variance + variance.diag()
        )
        prior = torch.distributions.Bernoulli(logits=top.switch_bias).log_prob(states).sum()
        distribution = MultivariateNormal(painted * variance, spread)
        masses.append(prior + distribution.log_prob(images.flatten(1)))
    return torch.stack(masses).logsumexp(0)


@pytest.mark.parametrize("centered", [True, False])
def test_recognition_can_be_the_posterior_of_gaussian_capsules(centered):
    """Of capsules that paint different pixels, so that every draw has the weight log p(x)."""
    model, guide = disjoint(centered)
    images = 2 * torch.randn(50, 1, 2, 4).double()
    exact = log_mixture(model, images)
    for seed in range(3):
        torch.manual_seed(seed)
        log_weight = log_weights(model, guide, images)[0]
        torch.testing.assert_close(log_weight, exact, rtol=0, atol=1e-9)
    distribution = guide.posterior(images)
    assert (distribution.narrowing > 0.5).all()  # the posterior is narrower than the prior
    assert 0.05 < distribution.switch_probability.mean() < 0.95  # both kinds of draws were weighed


def test_the_narrowing_is_bounded_and_means_are_means_of_draws():
    _, guide = randomized(4, (2,), 2, **GAUSSIAN)
    images = torch.randn(1, 1, 2, 2).double()
    nodes = poutine.trace(guide).get_trace(images.expand(40_000, -1, -1, -1)).nodes
    switch, hidden = (nodes[f"capsule1_{name}"]["value"] for name in ("switch", "hidden"))
    drawn, expected = switch[..., None] * hidden, guide.expectations(images)
    for values, mean in ((switch, expected.switch), (drawn, expected.activity)):
        error = 5.5 * values.std(0) / 200
        assert ((values.mean(0) - mean[0]).abs() < error).all()
    distribution = guide.posterior(images.expand(40_000, -1, -1, -1))
    activity = distribution.sample().activity
    assert ((activity.mean(0) - expected.activity[0]).abs() < 5.5 * activity.std(0) / 200).all()
    for extreme, limit in ((1e9, 1e3), (-1e9, 1e-3)):
        with torch.no_grad():
            guide.layers[0].narrowing.fill_(extreme)
        ratio = guide.posterior(images).narrowing.exp()
        torch.testing.assert_close(ratio, torch.full_like(ratio, limit))


def test_capsules_start_on_in_both_halves():
    model = CapsuleHelmholtzMachine(4, (2, 3), 2, switch_start=1.5)
    guide = RecognitionMachine(model)
    for layer in (*model.layers, *guide.layers):
        assert (layer.switch_bias == 1.5).all()


def test_reconstruction_goes_through_all_layers():
    """With one layer it is the usual one; with capsules always on, Gaussian means are exact."""
    model, guide = randomized(4, (2,), 2, **GAUSSIAN)
    images = torch.randn(3, 1, 2, 2).double()
    torch.testing.assert_close(
        guide.reconstruct(images), model.mean_image(guide.expectations(images)).detach()
    )
    model, guide = randomized(4, (2, 3), 2, **GAUSSIAN)
    with torch.no_grad():
        for layer in (*model.layers, *guide.layers):
            layer.switch_bias.fill_(1e4)
    copies = images[:1].expand(40_000, -1, -1, -1)
    nodes = poutine.trace(guide).get_trace(copies).nodes
    top = {name: nodes[name]["value"] for name in model.top_sites}
    drawn = poutine.trace(poutine.condition(model, data=top)).get_trace(batch_size=len(copies))
    means = drawn.nodes["image"]["fn"].mean.squeeze(1).detach()
    error = 5.5 * means.std(0) / 200
    assert ((means.mean(0) - guide.reconstruct(images[:1])[0]).abs() < error).all()
