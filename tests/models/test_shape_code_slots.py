"""Several objects with shape codes in a scene: sums over kinds and parents; parts."""

import itertools
from functools import partial

import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from small_shape_codes import BATCH, CODES, drawn, small, sum_parents

from capsule_zoo.models import Capsules, ShapeCodes

KINDS, PARTS, SLOTS = 2, 3, 2
EVERY_KIND = [
    torch.tensor(kinds).expand(BATCH, SLOTS)
    for kinds in itertools.product(range(KINDS), repeat=SLOTS)
]
made = partial(small, kinds=KINDS, parts=PARTS, slots=SLOTS)


def brute_force(model: ShapeCodes, parts: Capsules, pose, code) -> torch.Tensor:
    """The sum over all kinds of all slots and over all choices of parents, one by one, (B,)."""
    return torch.stack([sum_parents(model, k, parts, pose, code) for k in EVERY_KIND]).logsumexp(0)


def closed_form(model: ShapeCodes, parts: Capsules, pose, code) -> torch.Tensor:
    log_joints = [model.log_joint_of_slots(parts, k, pose, code) for k in EVERY_KIND]
    return torch.stack(log_joints).logsumexp(0)


@pytest.mark.parametrize("presence", ["relaxed", "discrete"])
def test_brute_force_and_closed_form_agree(presence):
    """Value and gradient, the dummy included."""
    model = made(presence=presence)
    scene = drawn(model, SLOTS)
    exact, closed = brute_force(model, *scene), closed_form(model, *scene)
    torch.testing.assert_close(closed, exact, rtol=1e-10, atol=1e-10)
    learned = [p for n, p in model.named_parameters() if "template" not in n]
    for value, wanted in zip(
        torch.autograd.grad(closed.sum(), learned),
        torch.autograd.grad(exact.sum(), learned),
        strict=True,
    ):
        torch.testing.assert_close(value, wanted, rtol=1e-9, atol=1e-10)


def test_every_slot_has_the_distribution_of_its_object_alone():
    model = made()
    _, pose, code = drawn(model, SLOTS)
    kind = torch.tensor([[0, 1], [1, 1]])
    distribution = model.shapes(kind, pose, code)
    for slot in range(SLOTS):
        alone = model.shapes(kind[:, [slot]], pose[:, [slot]], code[:, [slot]])
        for value, expected in zip(distribution, alone, strict=True):
            torch.testing.assert_close(value[:, :, 0], expected[:, :, 0])
            torch.testing.assert_close(value[:, :, 1 + slot], expected[:, :, 1])


def test_slots_may_be_exchanged():
    model = made()
    parts, pose, code = drawn(model, SLOTS)
    kind = torch.tensor([[0, 1], [1, 1]])
    forward = model.log_joint_of_slots(parts, kind, pose, code)
    back = model.log_joint_of_slots(parts, kind.flip(1), pose.flip(1), code.flip(1))
    torch.testing.assert_close(forward, back, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("slots", [1, 2])
def test_the_distribution_of_part_sets_is_a_mixture_over_the_choice_of_a_parent(slots):
    model = made(slots=slots).with_scope("objects")
    parts, pose, code = drawn(model, SLOTS)
    at = torch.tensor([[1, 0], [0, 1]])[:, :slots], pose[:, :slots], code[:, :slots]
    part_presence = parts.presence[..., None]
    value = torch.cat([part_presence, parts.pose], dim=-1)
    distribution, mixture = model.shapes(*at), model.shapes.part_distribution(*at)
    log_probs = dist.Bernoulli(logits=distribution.presence_logits).log_prob(part_presence)
    pose_distribution = dist.Normal(distribution.vote, distribution.scale_on).to_event(1)
    log_probs = log_probs + part_presence * pose_distribution.log_prob(parts.pose[..., None, :])
    expected = (distribution.log_weights.log_softmax(-1) + log_probs).logsumexp(-1)
    torch.testing.assert_close(mixture.log_prob(value), expected)
    assert mixture.batch_shape == (BATCH, PARTS)
    wide = mixture.expand((4, BATCH, PARTS))
    torch.testing.assert_close(wide.log_prob(value)[2], expected)


def test_on_part_sets_the_density_is_that_of_the_whole_model_where_all_parts_are_present():
    model = made(presence="discrete")
    parts, pose, code = drawn(model, SLOTS)
    parts = parts._replace(presence=torch.ones(BATCH, PARTS).double())
    kind = torch.tensor([[0, 1], [1, 0]])
    whole, on_sets = (
        variant.log_joint_of_slots(parts, kind, pose, code)
        for variant in (model, model.with_scope("objects"))
    )
    torch.testing.assert_close(on_sets, whole)
    moved = parts._replace(presence=torch.zeros(BATCH, PARTS).double())
    log_joint = model.with_scope("objects").log_joint_of_slots(moved, kind, pose, code)
    away = moved._replace(pose=moved.pose + 5)  # poses of absent parts are not seen
    unseen = model.with_scope("objects").log_joint_of_slots(away, kind, pose, code)
    torch.testing.assert_close(log_joint, unseen)


def test_parts_are_drawn_from_the_slot_that_they_choose():
    model = made(epsilon=1e-9, sigma_min=0.01).with_scope("objects")
    with torch.no_grad():
        model.shapes.raw_scale.fill_(-20)
        model.shapes.presence_logits.fill_(20)
        model.shapes.presence_codes.zero_()
    _, pose, code = drawn(model, SLOTS)
    at = torch.tensor([[0, 1], [1, 0]]), pose, code
    distribution, draws = model.shapes(*at), model.shapes.part_distribution(*at).sample((4000,))
    assert draws.shape == (4000, BATCH, PARTS, 7)
    distance = (draws[..., None, 1:] - distribution.vote).norm(dim=-1)
    nearest = distance.argmin(-1)
    assert distance.amin(-1).max() < 0.1
    fraction = torch.stack([(nearest == column).double().mean(0) for column in range(3)], dim=-1)
    torch.testing.assert_close(fraction, distribution.log_weights.softmax(-1), atol=0.04, rtol=0)


def test_sites_have_a_value_for_every_slot():
    model = made()
    nodes = poutine.trace(model).get_trace(batch_size=4).nodes
    assert nodes["object_kind"]["value"].shape == (4, SLOTS)
    assert nodes["object_pose"]["value"].shape == (4, SLOTS, 6)
    assert nodes["object_code"]["value"].shape == (4, SLOTS, CODES)
    assert nodes["part_pose"]["value"].shape == (4, PARTS, 6)
    assert all("slots" in site.plates for site in model.sites if site.name.startswith("object"))
    forced = torch.full((4, SLOTS, CODES), 3.0).double()
    done = poutine.trace(poutine.do(model, {"object_code": forced})).get_trace(batch_size=4).nodes
    distribution = model.shapes(done["object_kind"]["value"], done["object_pose"]["value"], forced)
    votes = done["part_pose"]["fn"].component_distribution.mean
    torch.testing.assert_close(votes, distribution.vote)
    rest = poutine.trace(model.with_scope("parts")).get_trace(batch_size=4).nodes
    assert "object_kind" not in rest
    assert model.with_scope("objects")(batch_size=4).shape == (4, 1, PARTS, 7)
