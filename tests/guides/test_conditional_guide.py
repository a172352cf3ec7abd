"""The guide to models on request: the cost of its points, its window and its start."""

import pytest
import torch
from pyro import poutine
from pyro.infer import Trace_ELBO

from capsule_zoo.guides import ConditionalEncoder
from capsule_zoo.inference import evaluate, loss_per_image
from capsule_zoo.models import ConditionalAutoencoder, ContinuousCapsNet, GenerativeCapsNet

SHAPE = (1, 10, 8)


def digit_capsules(**options):
    sizes = dict(kinds=3, pose=2, parts=4, length=3, hidden=5, maps=2, channels=3)
    return GenerativeCapsNet(SHAPE, **sizes, **options)


def continuous(**options):
    return ContinuousCapsNet(SHAPE, 2, hidden=5, parts=4, maps=2, channels=3, **options)


def convolutional():
    return ConditionalAutoencoder(SHAPE, 2, hidden=5, channels=3)


def pair(make=digit_capsules, model_options=None, **options):
    torch.manual_seed(0)
    model = make(**(model_options or {})).double()
    return model, ConditionalEncoder(model, channels=3, hidden=6, **options).double()


@pytest.mark.parametrize("make", [digit_capsules, continuous, convolutional])
def test_points_cost_their_squared_error_alone(make):
    model, guide = pair(make, deterministic=True)
    images = torch.rand(3, *SHAPE).double()
    loss = loss_per_image(Trace_ELBO(), model, guide, images)
    error = (images - model.mean_image(guide.expectations(images))).square().sum() / 3
    variance = torch.tensor(model.sigma_image**2).double()
    constant = images[0].numel() / 2 * (2 * torch.pi * variance).log()
    torch.testing.assert_close(loss, error / (2 * variance) + constant)
    assert not evaluate(model, guide, images, num_particles=2).attrs["is_bound"]


@pytest.mark.parametrize("discrete", [False, True])
def test_a_network_that_says_nothing_is_the_prior(discrete):
    model, guide = pair(model_options={"jitter": 0.1})
    for parameter in guide.read.parameters():
        torch.nn.init.zeros_(parameter)
    if discrete:
        model, guide = model.discretize(), guide.discretize()
    images = torch.rand(4, *SHAPE).double()
    drawn = poutine.trace(guide).get_trace(images)
    drawn.compute_log_prob()
    prior = model.prior()
    assert set(guide.covers) == set(prior)
    for name in guide.covers:
        expected = prior[name].log_prob(drawn.nodes[name]["value"])
        torch.testing.assert_close(drawn.nodes[name]["log_prob"], expected)


def test_expectations_are_the_middle_of_every_distribution():
    images = torch.rand(2, *SHAPE).double()
    _, guide = pair(model_options={"jitter": 0.1})
    middle = guide.expectations(images)
    draws = poutine.trace(guide).get_trace(images).nodes
    for name in ("object_pose", "part_jitter"):
        torch.testing.assert_close(draws[name]["fn"].mean, middle[name])
    torch.testing.assert_close(middle["object_kind"].exp().sum(-1), torch.ones(2).double())
    discrete = guide.discretize().expectations(images)["object_kind"]
    assert torch.equal(discrete.argmax(-1), middle["object_kind"].argmax(-1))
    assert torch.equal(discrete.sum(-1), torch.ones(2).double())


def test_points_are_the_expectations_and_one_hot_where_kinds_are():
    images = torch.rand(2, *SHAPE).double()
    _, guide = pair(deterministic=True)
    for one in (guide, guide.discretize()):
        values, expected = one(images), one.expectations(images)
        assert all(torch.equal(values[name], expected[name]) for name in guide.covers)


def test_it_reads_the_window_and_nothing_else():
    _, guide = pair(window=(5, 4))
    images = torch.rand(2, *SHAPE).double()
    other = torch.rand_like(images)
    other[..., 2:7, 2:6] = images[..., 2:7, 2:6]
    means, same = guide.expectations(images), guide.expectations(other)
    assert all(torch.equal(means[name], same[name]) for name in guide.covers)
    other[..., 2, 2] += 0.1
    changed = guide.expectations(other)
    assert not torch.equal(means["object_pose"], changed["object_pose"])
