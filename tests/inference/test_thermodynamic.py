"""The thermodynamic objective against sums over all states, and the order of its bounds."""

import itertools
import math

import pyro
import pytest
import torch
from machines import binary, list_states, randomized
from pyro import poutine
from torch.distributions import Normal
from toys import Conjugate, ExactGuide, conjugate_images, gradients, pair

from capsule_zoo.guides import RecognitionMachine
from capsule_zoo.inference.objectives.thermodynamic import (
    ThermodynamicObjective,
    points,
    thermodynamic_sum,
)
from capsule_zoo.models import CapsuleHelmholtzMachine


def exact_sum(log_p, log_q, ends):
    """Return the objective (B,) from all states (states, B); autograd knows how pi_b moves."""
    total = 0.0
    for begin, end in itertools.pairwise(ends):
        distribution = (begin * log_p + (1 - begin) * log_q).softmax(0)
        total = total + (end - begin) * (distribution * (log_p - log_q)).sum(0)
    return total


def test_value_and_gradient_are_those_of_the_sum_over_all_states():
    """With many draws for each image, of a machine whose states can all be listed."""
    torch.manual_seed(0)
    model = randomized(CapsuleHelmholtzMachine((1, 1, 3), (1, 2), 1), 0.5)
    guide = randomized(RecognitionMachine(model), 0.5)
    images = binary(1, 1, 3)[1:4]
    _, log_p, log_q = list_states(model, guide, images)
    objective = ThermodynamicObjective(40_000, intervals=3, first=0.2)
    exact = -exact_sum(log_p, log_q, objective.points).mean()
    loss = objective.differentiable_loss(model, guide, images)
    assert loss.item() == pytest.approx(exact.item(), abs=0.005)
    expected, gradient = gradients(exact, model, guide), gradients(loss, model, guide)
    assert expected.norm() > 0.3
    assert (gradient - expected).norm() < 0.02 * expected.norm()


def test_gradient_is_a_covariance():
    """By hand from the formula, particle by particle, for one image."""
    torch.manual_seed(0)
    log_p, log_q = (torch.randn(4, 1).double().requires_grad_() for _ in range(2))
    begin = 0.3
    gradient = torch.autograd.grad(
        thermodynamic_sum(log_p, log_q, [begin, 1.0]).sum(), (log_p, log_q)
    )
    weight = (begin * (log_p - log_q)).detach().softmax(0)
    value = (log_p - log_q).detach()
    away = weight * (value - (weight * value).sum())
    torch.testing.assert_close(gradient[0], 0.7 * (weight + begin * away))
    torch.testing.assert_close(gradient[1], 0.7 * (-weight + (1 - begin) * away))


def test_finer_intervals_rise_from_the_elbo_to_the_importance_weighted_bound():
    torch.manual_seed(0)
    log_p, log_q = torch.randn(2, 6, 9).double() * 3
    log_weight = log_p - log_q
    top = log_weight.logsumexp(0) - math.log(6)
    sums = [thermodynamic_sum(log_p, log_q, points(n, 1e-3)) for n in (1, 2, 4, 16, 1000)]
    torch.testing.assert_close(sums[0], log_weight.mean(0))
    for coarse, fine in itertools.pairwise(sums[1:]):
        assert (fine > coarse - 1e-9).all() and (fine < top).all()
    assert (sums[1] > sums[0]).all()
    assert (top - sums[-1]).max() < 0.1
    assert ThermodynamicObjective.is_bound


def test_under_the_exact_posterior_every_value_is_the_evidence():
    model = Conjugate().double()
    images = conjugate_images(5)
    objective = ThermodynamicObjective(3, intervals=4)
    loss = objective.differentiable_loss(model, ExactGuide(model), images)
    assert loss.item() == pytest.approx(-model.log_evidence(images).mean().item(), abs=1e-8)


def test_draws_are_constants_even_where_they_could_be_reparametrized():
    """The gradient is that of log densities of the same draws, held constant, by hand."""
    (model, guide), images, count = pair(), conjugate_images(3), 4
    objective = ThermodynamicObjective(count, intervals=2, first=0.3)
    pyro.set_rng_seed(1)
    gradient = gradients(objective.differentiable_loss(model, guide, images), model, guide)
    pyro.set_rng_seed(1)
    many = images.repeat(count, 1, 1, 1)
    code = poutine.trace(guide).get_trace(many).nodes["code"]["value"].detach()
    log_q = Normal(guide.slope * many.sum((1, 2, 3)) + guide.offset, guide.scale).log_prob(code)
    pixels = Normal(code[:, None, None, None], model.noise).log_prob(many).sum((1, 2, 3))
    log_p = Normal(model.mean, 1.0).log_prob(code) + pixels
    by_hand = thermodynamic_sum(log_p.view(count, 3), log_q.view(count, 3), [0, 0.3, 1])
    torch.testing.assert_close(gradient, gradients(-by_hand.mean(), model, guide))


def test_points_are_equally_far_apart_on_a_log_scale():
    assert points(1, 0.1) == [0.0, 1.0]
    assert points(2, 0.1) == [0.0, 0.1, 1.0]
    assert points(4, 0.001) == pytest.approx([0.0, 0.001, 0.01, 0.1, 1.0])
