"""Routing is coordinate ascent on the model's log joint: each step against the model itself."""

import pytest
import torch
from machines import shifted
from pyro import poutine

from capsule_zoo.guides import EMObjects, PartWholeGuide
from capsule_zoo.guides.parts.em import activation, best_pose, child_log_density
from capsule_zoo.inference import check_pair
from capsule_zoo.models import Capsules, PartWholeCapsules
from capsule_zoo.models.parts import poses
from capsule_zoo.models.parts.painted_parts import ObjectPose, Painting
from capsule_zoo.settings import configure

LARGE = 60.0  # a logit so large that the presence is one to the last digit


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = PartWholeCapsules(
        (1, 12, 12),
        objects=3,
        parts=5,
        painting=Painting(template_size=5),
        pose=ObjectPose(sigma_top=0.5),
    )
    return shifted(model.double()).discretize()


def draw(model, batch=4):
    nodes = poutine.trace(model).get_trace(batch_size=batch).nodes
    return [
        Capsules(nodes[f"{n}_presence"]["value"].detach(), nodes[f"{n}_pose"]["value"].detach())
        for n in ("object", "part")
    ]


def log_children(model, objects, parts):
    """Compute log p(parts | objects) by the model's own mixtures, (B,)."""
    distribution = model.selections[0](objects, relaxed=False)
    presence = model._presence_mixture(distribution).log_prob(parts.presence)
    pose = model._pose_mixture(distribution, parts.presence).log_prob(parts.pose)
    return (presence + pose).sum(1)


def test_activation_is_the_exact_change_of_the_children_log_density(model):
    objects, parts = draw(model)
    logits = torch.where(objects.presence > 0, LARGE, -LARGE).double()
    selection = model.selections[0]
    distribution = selection(Capsules(logits, objects.pose), relaxed=True)
    log_density = child_log_density(model, distribution, parts)
    activations = activation(logits, selection.log_affinity, log_density, selection.epsilon)
    for j in range(3):
        on, off = objects.presence.clone(), objects.presence.clone()
        on[:, j], off[:, j] = 1, 0
        expected = log_children(model, objects._replace(presence=on), parts)
        expected = expected - log_children(model, objects._replace(presence=off), parts)
        torch.testing.assert_close(activations[:, j], expected, rtol=1e-9, atol=1e-9)


def test_the_best_pose_minimizes_the_weighted_distance(model):
    _, parts = draw(model)
    transform = model.selections[0].transform.detach()
    weight = torch.rand(4, 5, 3, dtype=torch.float64)
    precision = torch.tensor([0.7, 0.7, 0.2], dtype=torch.float64)
    best = best_pose(parts.pose, transform, weight, precision).requires_grad_()
    identity = poses.identity_like(best)
    votes = poses.compose(best[:, None], identity + transform)
    distance = (weight * (parts.pose[:, :, None] - votes).square().sum(-1)).sum()
    strays = (best - identity).unflatten(-1, (2, 3)).square()
    total = distance + (precision * strays).sum()
    (gradient,) = torch.autograd.grad(total, best)
    assert gradient.abs().max() < 1e-9  # convex, so a vanishing gradient is the minimum


def test_parts_placed_exactly_by_one_object_give_it_back(model):
    """Noise-free parts of a single object: routing switches it on and finds its pose."""
    model.pose = ObjectPose(sigma_top=50.0)  # the prior pulls towards the identity
    object_pose = poses.rotation(torch.tensor([0.4])).double()[0]
    identity = poses.identity_like(object_pose)
    with torch.no_grad():
        model.selections[0].presence_logits.fill_(3.0)
    placed = poses.compose(object_pose, identity + model.selections[0].transform[:, 1]).detach()
    parts = Capsules(torch.ones(1, 5).double(), placed[None])
    proposal = EMObjects(model, iterations=20)(model, 0, parts)
    assert proposal.logits.argmax(-1).item() == 1 and proposal.logits[0, 1] > 3
    assert (
        (proposal.pose[0, 1] - object_pose).abs().max()
        < 0.01
        < (object_pose - identity).abs().max()
    )


def test_a_single_object_has_the_posterior_odds_that_the_model_gives_it():
    model = PartWholeCapsules(
        (1, 12, 12), objects=1, parts=5, painting=Painting(template_size=5)
    ).double()
    torch.nn.init.constant_(model.presence_logits, -2.0)
    model = model.discretize()
    _, parts = draw(model)
    proposal = EMObjects(model)(model, 0, parts)
    log_present, gone = (
        log_children(model, Capsules(torch.full((4, 1), t).double(), proposal.pose), parts)
        for t in (1, 0)
    )
    torch.testing.assert_close(proposal.logits[:, 0], log_present - gone - 2)


@pytest.mark.parametrize("pose", ["delta", "normal", "low_rank"])
@pytest.mark.parametrize("layers", [(3, 4), (2, 3, 4)])
def test_it_fits_every_model_and_trains(layers, pose):
    model = PartWholeCapsules(
        (1, 12, 12), layers=layers, painting=Painting(template_size=5)
    ).double()
    guide = configure(PartWholeGuide, model, pose, above=EMObjects, channels=4).double()
    images = torch.rand(3, 1, 12, 12, dtype=torch.float64)
    check_pair(model, guide, images)
    trace = poutine.trace(guide).get_trace(images)
    joint = poutine.trace(poutine.replay(model, trace=trace)).get_trace(images)
    (trace.log_prob_sum() - joint.log_prob_sum()).backward()
    for name, parameter in guide.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
