"""The terms of the objective of stacked capsule autoencoders by hand, and its stop-gradients."""

import itertools
import math
from dataclasses import replace
from functools import partial

import pyro
import pytest
import torch
from machines import shifted
from pyro import poutine
from torch.distributions import Normal

from capsule_zoo.guides import PartReader, SetTransformerObjects, StackedCapsuleGuide
from capsule_zoo.inference import Checks, StackedCapsuleObjective, fit
from capsule_zoo.inference.objectives.stacked_capsules import (
    TERMS,
    TermHistory,
    drawn_capsules,
    entropy_sparsity,
    squared_sparsity,
)
from capsule_zoo.models import StackedCapsuleAutoencoder
from capsule_zoo.models.parts.object_votes import VoteSizes, log_parents
from capsule_zoo.models.parts.parent_selection import as_presence

PLAIN = dict(stop_inputs=False, stop_targets=False, noise="none")


@pytest.fixture
def pair():
    pyro.set_rng_seed(0)
    model = StackedCapsuleAutoencoder(
        (1, 8, 8),
        objects=2,
        parts=3,
        template_size=4,
        part_features=3,
        classes=4,
        votes=VoteSizes(object_features=4, hidden=5),
    )
    objects = partial(SetTransformerObjects, width=8, heads=2, blocks=1, inducing=3)
    guide = StackedCapsuleGuide(model, reader=partial(PartReader, channels=4), above=objects)
    return shifted(model, 0.1).double(), shifted(guide, 0.1).double()


@pytest.fixture
def images():
    return torch.rand(5, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def only(name, **switches):
    """Return the objective with one term alone, at weight 1."""
    return StackedCapsuleObjective(**{**dict.fromkeys(TERMS, 0.0), name: 1.0}, **switches)


def drawn(pair, images):
    """Return objects and parts of the guide without noise."""

    trace = poutine.trace(pair[1].with_switches(noise="none")).get_trace(images)
    return drawn_capsules(trace, "object"), drawn_capsules(trace, "part")


def test_the_terms_are_those_of_the_paper_written_out(pair, images):
    model, guide = pair
    objects, parts = drawn(pair, images)
    votes = model.votes(objects)
    probability = as_presence(parts.presence, True)
    losses = StackedCapsuleObjective(present=1.3, **PLAIN).terms(model, guide, images)
    image = model.image_distribution(parts).log_prob(images[:, None]).mean()
    log_parts, mass = 0.0, torch.zeros(5, 2, dtype=torch.float64)
    for b, m in itertools.product(range(5), range(3)):
        dummy = Normal(0.0, model.clutter.sigma_dummy).log_prob(parts.pose[b, m]).sum().exp()
        terms = [model.clutter.epsilon * dummy]
        for k in range(2):
            distribution = Normal(votes.pose[b, m, k], votes.scale[b, m, k])
            density = distribution.log_prob(parts.pose[b, m]).sum().exp()
            terms.append(votes.log_presence[b, m, k].exp() * density)
        log_parts = log_parts + probability[b, m] * sum(terms).log() / 5
        for k in range(2):
            mass[b, k] += terms[1 + k] / sum(terms)
    presence = votes.log_presence.exp().max(1).values  # (5, 2)
    within = [-sum(p * p.log() for p in row / row.sum()) for row in mass]
    total = mass.sum(0) / mass.sum()
    expected = {
        "image": -image,
        "parts": -log_parts,
        "prior_within": sum((row.sum() - 1.3) ** 2 for row in presence) / 5,
        "prior_between": sum((column.sum() - 5 / 4) ** 2 for column in presence.T) / 2,
        "posterior_within": sum(within) / 5,
        "posterior_between": sum(p * p.log() for p in total),
        "deformation": sum(x**2 for x in votes.dynamic.flatten()) / 10,
    }
    assert tuple(losses) == TERMS
    for name in TERMS:
        torch.testing.assert_close(losses[name], expected[name], rtol=1e-8, atol=1e-8, msg=name)


def test_the_loss_is_the_weighted_sum_of_the_terms(pair, images):
    weights = {name: 0.5 + i for i, name in enumerate(TERMS)}
    objective = StackedCapsuleObjective(**weights)
    torch.manual_seed(3)
    terms = objective.terms(*pair, images)
    torch.manual_seed(3)
    loss = objective.differentiable_loss(*pair, images)
    torch.testing.assert_close(loss, sum(weights[name] * terms[name] for name in TERMS))


def test_normalized_weights_change_the_likelihood_of_parts_by_their_sum(pair, images):
    model, _ = pair
    objects, parts = drawn(pair, images)
    votes = model.votes(objects)
    arguments = votes, parts.pose, *model.dummy
    raw, normal = (log_parents(*arguments, normalized=x).logsumexp(-1) for x in (False, True))
    total = model.clutter.epsilon + votes.log_presence.exp().sum(-1)
    torch.testing.assert_close(raw - normal, total.log())


def test_prior_sparsity_by_hand():
    presence = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0], [1.0, 0.0]])
    within, between = squared_sparsity(presence, present=1.0, classes=2)
    assert within.item() == pytest.approx((0 + 1 + 1 + 0) / 4)
    assert between.item() == pytest.approx(((3 - 2) ** 2 + (1 - 2) ** 2) / 2)


def test_posterior_sparsity_by_hand():
    one_each = torch.eye(4)
    within, between = entropy_sparsity(one_each)
    assert within.item() == pytest.approx(0)
    assert between.item() == pytest.approx(math.log(4))
    within, between = entropy_sparsity(torch.ones(4, 4) / 7)
    assert within.item() == pytest.approx(math.log(4))
    within, between = entropy_sparsity(torch.tensor([[1.0, 0.0], [1.0, 0.0]]))
    assert (within.item(), between.item()) == pytest.approx((0, 0))


def test_an_image_that_no_object_explains_has_finite_gradients():
    explained = torch.zeros(2, 3, requires_grad=True)
    sum(entropy_sparsity(explained)).backward()
    assert explained.grad.isfinite().all()


def reader_gradient(pair, images, name, **switches):
    """Return the largest gradient of a term at the reader of parts."""
    torch.manual_seed(4)
    only(name, **switches).differentiable_loss(*pair, images).backward()
    grads = [p.grad for p in pair[1].read_parts.parameters() if p.grad is not None]
    gradient = max((g.abs().max().item() for g in grads), default=0.0)
    for program in pair:
        program.zero_grad()
    return gradient


FROM_OBJECTS = [name for name in TERMS if name != "image"]


@pytest.mark.parametrize("name", FROM_OBJECTS)
def test_stopped_gradients_leave_presences_and_poses_of_parts_alone(pair, images, name):
    """Features of parts are cut out of the encoder's input: only they keep their gradients."""
    assert reader_gradient(pair, images, name) > 0
    with torch.no_grad():
        embed = pair[1].infer_objects.transformer.embed.weight
        embed[:, 7 : 7 + pair[0].part_features] = 0
    assert reader_gradient(pair, images, name) == 0
    assert reader_gradient(pair, images, name, stop_inputs=False) > 0
    targets = reader_gradient(pair, images, name, stop_targets=False)
    poses_enter = name in ("parts", "posterior_within", "posterior_between")
    assert (targets > 0) == poses_enter


def test_the_image_trains_parts_and_not_objects(pair, images):
    only("image").differentiable_loss(*pair, images).backward()
    model, guide = pair
    assert model.template_logits.grad.abs().max() > 0
    upper = [*guide.infer_objects.parameters(), *model.relation.parameters()]
    assert all(p.grad is None or not p.grad.any() for p in upper)


@pytest.mark.parametrize("name", ["parts", "prior_within", "posterior_between", "deformation"])
def test_gradients_are_the_slopes_of_the_term_where_nothing_is_stopped(pair, images, name):
    model, guide = pair
    objective = only(name, **PLAIN)
    loss = objective.differentiable_loss(model, guide, images)
    probe = [model.relation.static, guide.read_parts.pool.read.weight]
    grads = torch.autograd.grad(loss, probe, allow_unused=True)
    for parameter, grad in zip(probe, grads, strict=True):
        direction = torch.randn_like(parameter)
        step = 1e-5
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter.add_(sign * step * direction)
                values.append(objective.differentiable_loss(model, guide, images))
                parameter.sub_(sign * step * direction)
        slope = (values[0] - values[1]) / (2 * step)
        expected = slope.new_zeros(()) if grad is None else (grad * direction).sum()
        torch.testing.assert_close(slope, expected, rtol=1e-4, atol=1e-7)


def test_noise_is_uniform_of_its_width_and_can_be_switched_off(pair, images):
    _, guide = pair
    quiet = [drawn(pair, images)[1].presence for _ in range(2)]
    assert torch.equal(*quiet)

    noisy = guide.with_switches(noise="uniform", width=2.0)
    nodes = poutine.trace(noisy).get_trace(images.repeat(200, 1, 1, 1)).nodes
    shift = nodes["part_presence"]["value"] - quiet[0].repeat(200, 1)
    assert shift.abs().max() <= 1 and shift.abs().max() > 0.99
    assert shift.var().item() == pytest.approx(4 / 12, rel=0.1)


def test_discrete_presences_have_no_noise_but_bernoulli_distributions(pair, images):
    discrete = [program.discretize() for program in pair]
    losses = StackedCapsuleObjective().terms(*discrete, images)
    assert all(term.isfinite() for term in losses.values())


def test_term_history_keeps_every_term_and_leaves_random_numbers_alone(pair, images):
    model, guide = (program.float() for program in pair)
    objective, batch = StackedCapsuleObjective(), images.float()
    history = TermHistory(objective, batch)
    arguments = dict(objective=objective, steps=4, batch_size=5, seed=0)
    often = Checks(every=2, progress=False)
    twin = [program.state_dict() for program in pair]
    twin = [{k: v.clone() for k, v in state.items()} for state in twin]
    first = fit(model, guide, batch, checks=replace(often, callbacks=[history]), **arguments)
    for program, state in zip(pair, twin, strict=True):
        program.load_state_dict(state)
    second = fit(model, guide, batch, checks=often, **arguments)
    assert first.history["loss"].tolist() == second.history["loss"].tolist()
    assert history.rows and set(history.rows[0]) == {"step", *TERMS}


def test_the_terms_of_a_scope_are_those_of_its_level(pair, images):
    model, guide = pair
    objective = StackedCapsuleObjective(**PLAIN)
    whole = objective.terms(model, guide, images)
    lower = objective.terms(model.with_scope("parts"), guide.with_scope("parts"), images)
    reads = guide.reads(images)
    upper = objective.terms(model.with_scope("objects"), guide.with_scope("objects"), reads)
    assert set(lower) == {"image"}
    assert {**lower, **upper}.keys() == whole.keys()
    for name, term in {**lower, **upper}.items():
        torch.testing.assert_close(term, whole[name])
