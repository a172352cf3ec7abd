"""Guides to shape codes: routing is coordinate ascent, kinds weigh as they should."""

from functools import partial

import pyro
import pytest
import torch
from pyro import poutine
from pyro.infer import Trace_ELBO, TraceEnum_ELBO

from capsule_zoo.guides import KindNetwork, RidgeKinds, ShapeCodesGuide
from capsule_zoo.guides.parts.ridge import fit_code, fit_pose
from capsule_zoo.inference import Checks, Pace, fit, loss_per_image
from capsule_zoo.inference.training.starts.kinds import start_kinds, start_rotated_kinds
from capsule_zoo.models import Capsules, ShapeCodes, poses
from capsule_zoo.models.parts.part_sets import as_part_sets, from_part_sets
from capsule_zoo.settings import configure

SIZES = dict(kinds=3, parts=6, codes=2, image_shape=(1, 8, 8), template_size=4)


def made(seed: int = 0, **options) -> ShapeCodes:
    pyro.set_rng_seed(seed)
    model = configure(ShapeCodes, **{**SIZES, **options}).double()
    with torch.no_grad():
        model.shapes.pose_codes *= 4
        model.shapes.transform += 0.3 * torch.randn_like(model.shapes.transform)
        model.shapes.presence_logits += 2
        model.shapes.raw_scale -= 3
    return model


def some_images(number: int = 4) -> torch.Tensor:
    return torch.rand(number, 1, 8, 8, generator=torch.Generator().manual_seed(1)).double()


def test_ridge_steps_are_at_the_minimum():
    """The gradient of what each step minimizes is zero at its answer."""
    torch.manual_seed(0)
    shape = (2, 3, 5)  # images, kinds, parts
    target, place = (torch.randn(*shape, 6).double() for _ in range(2))
    weight, precision = torch.rand(*shape, 6).double(), 1 + torch.rand(6).double()
    pose, scale = fit_pose(target, place, weight, precision)
    pose.requires_grad_()
    votes = poses.compose(pose[..., None, :], place)
    away = pose - poses.identity_like(pose)
    cost = (weight * (target - votes).square()).sum() + (precision * away.square()).sum()
    (slope,) = torch.autograd.grad(cost, pose, create_graph=True)
    assert slope.abs().max() < 1e-10
    curvature = torch.autograd.grad(slope[0, 0, 0], pose)[0][0, 0, 0]
    assert scale[0, 0, 0].item() == pytest.approx((curvature.item() / 2) ** -0.5)

    directions, codes = torch.randn(*shape, 6, 2).double(), torch.randn(3, 5, 2).double()
    rest, believed = torch.randn(*shape).double(), torch.rand(*shape).double()
    code, _ = fit_code(target, directions, weight, codes, rest, believed)
    code.requires_grad_()
    told = torch.einsum("kpd,bkd->bkp", codes, code)
    cost = (weight * (target - torch.einsum("bkpid,bkd->bkpi", directions, code)).square()).sum()
    cost = cost + code.square().sum() + (believed * told.square() - 2 * rest * told).sum()
    (slope,) = torch.autograd.grad(cost, code)
    assert slope.abs().max() < 1e-10


def test_routing_finds_the_object_that_drew_the_parts():
    model = made(sigma_top=0.05).with_scope("objects")
    values = {
        "object_kind": torch.tensor([[0], [1], [2], [1]]),
        "object_pose": poses.identity_like(some_images()) + 0.05 * torch.randn(4, 1, 6),
        "object_code": torch.randn(4, 1, 2).double(),
    }
    sets = poutine.condition(model, values)(batch_size=4).detach()
    guide = configure(
        ShapeCodesGuide, model, above=partial(RidgeKinds, iterations=20), channels=2
    ).double()
    nodes = poutine.trace(guide).get_trace(sets).nodes
    best = nodes["object_kind"]["fn"].logits.argmax(-1)
    assert best.tolist() == values["object_kind"].tolist()
    drawn = [
        model.log_joint_of_kinds(from_part_sets(sets), *at_every_kind)
        for at_every_kind in (
            (values["object_pose"].expand(4, 3, 6), values["object_code"].expand(4, 3, 2)),
            guide.propose(from_part_sets(sets))[:2],
        )
    ]
    rows = torch.arange(4)
    truth, estimate = (joint[rows, best[:, 0]] for joint in drawn)
    assert (
        estimate > truth
    ).all()  # the fitted object explains the parts better than the drawn one


def test_enumerated_kinds_have_the_loss_that_drawn_kinds_have_on_average():
    """And the exact sum has the same value in every call, where proposals are points."""
    model = made().with_scope("objects")
    sets = model(batch_size=3).detach()
    guide = configure(ShapeCodesGuide, model, objects="delta", channels=2, width=8).double()
    with torch.no_grad():  # kinds that are in doubt
        model.shapes.raw_scale += 5
    objective = TraceEnum_ELBO(max_plate_nesting=2)
    exact = [
        loss_per_image(objective, model, guide.with_enumerated_kinds(), sets).item()
        for _ in range(2)
    ]
    proposal = guide.propose(from_part_sets(sets))
    joint = model.log_joint_of_kinds(from_part_sets(sets), proposal.pose, proposal.code)
    assert exact[0] == exact[1] == pytest.approx(-joint.logsumexp(-1).mean().item(), rel=1e-10)
    drawn = [loss_per_image(Trace_ELBO(), model, guide, sets).item() for _ in range(20)]
    # at the best distribution of the kind, log p(k, ...) - log q(k) is the same for every kind
    assert drawn == pytest.approx([exact[0]] * 20, rel=1e-10)


def test_a_part_that_is_off_is_as_wide_as_in_the_model():
    model = made(sigma_off=0.7).discretize()
    guide = configure(ShapeCodesGuide, model, "normal", channels=2, width=8).double().discretize()
    nodes = poutine.trace(guide).get_trace(some_images(20)).nodes
    scale = nodes["part_pose"]["fn"].base_dist.scale
    off = nodes["part_presence"]["value"] == 0
    assert off.any() and not off.all()
    torch.testing.assert_close(scale[off], torch.full_like(scale[off], 0.7))
    assert (scale[~off] < 0.1).all()


@pytest.mark.parametrize("above", [KindNetwork, RidgeKinds])
def test_a_turned_view_turns_the_object_with_its_parts(above):
    """The same answer in the frame of the view, at whichever angle the image is looked at."""
    model = made(rotations=4).discretize()
    guide = (
        configure(ShapeCodesGuide, model, objects="delta", above=above, channels=2)
        .double()
        .discretize()
    )
    images = some_images()
    quarter = torch.full((4,), torch.pi / 2).double()
    traces = []
    for view, angle in ((images, None), (images.rot90(-1, (2, 3)), quarter)):
        torch.manual_seed(3)
        traces.append(poutine.trace(guide).get_trace(view, angle=angle).nodes)
    step = poses.rotation(quarter[:1])
    for site in ("part_pose", "object_pose"):
        upright, rotated = (nodes[site]["value"] for nodes in traces)
        torch.testing.assert_close(poses.compose(step, upright), rotated, atol=1e-6, rtol=0)


def mixed_sets(number: int = 300) -> tuple[torch.Tensor, torch.Tensor]:
    """Part sets of three shapes, each of which two codes move, and the shape of each."""
    torch.manual_seed(4)
    shapes = torch.randn(3, 6, 6).double()
    moves = 0.3 * torch.randn(3, 6, 6, 2).double()
    which = torch.arange(number) % 3
    code = torch.randn(number, 2).double()
    place = shapes[which] + torch.einsum("npid,nd->npi", moves[which], code)
    place = place + 0.05 * torch.randn(number, 6, 6)
    return as_part_sets(Capsules(torch.ones(number, 6).double(), place)), which


def test_kinds_start_from_factor_analyzers_and_stay_what_they_are():
    """Three shapes of parts, mixed: each becomes a kind, and updates at a low rate keep it so."""
    model = made().with_scope("objects")
    sets, which = mixed_sets()
    kinds = start_kinds(model, sets, seed=0)
    pairs = {(a, b) for a, b in zip(which.tolist(), kinds.tolist(), strict=True)}
    assert len(pairs) == 3
    guide = configure(ShapeCodesGuide, model, channels=2, width=16).double()
    guide.infer_objects.start_at_posterior(model)
    settings = dict(pace=Pace("linear", warmup=0), checks=Checks(progress=False))
    run = fit(model, guide, sets, steps=40, lr=1e-3, batch_size=100, **settings)
    assert run.history.loss.iloc[-10:].mean() < run.history.loss.iloc[:10].mean()
    best = poutine.trace(guide).get_trace(sets).nodes["object_kind"]["fn"].logits.argmax(-1)
    assert torch.equal(best[:, 0], kinds)


def test_kinds_choose_the_turn_of_every_image():
    """Three shapes at one of four turns each: whatever rotation was shown first, all end alike."""
    sets, which = mixed_sets()
    parts = from_part_sets(sets)
    back = poses.rotation(torch.arange(4).double() * torch.pi / 2)
    held = torch.randint(4, (len(sets),), generator=torch.Generator().manual_seed(1))
    views = torch.stack(
        [
            as_part_sets(
                Capsules(parts.presence, poses.compose(back[(held + t) % 4][:, None], parts.pose))
            )
            for t in range(4)
        ]
    )
    model = made(kinds=9).with_scope("objects")  # fewer kinds than rotated shapes, more than shapes
    rotations = start_rotated_kinds(model, views, seed=0)
    ends = (held + rotations) % 4  # the rotation at which each image is left
    for shape in range(3):
        counts = torch.bincount(ends[which == shape], minlength=4)
        assert counts.max() == counts.sum()


def test_the_amortized_guide_starts_at_the_posterior():
    """Its bound is the likelihood, for objects at the identity without a dummy."""
    model = made(sigma_top=1e-6).with_scope("objects")
    sets, _ = mixed_sets()
    start_kinds(model, sets, seed=0)
    model.shapes.log_affinity.data.fill_(1e5)
    guide = configure(ShapeCodesGuide, model, channels=2, width=8).double()
    guide.infer_objects.start_at_posterior(model)
    parts = from_part_sets(sets[:5])
    shapes = model.shapes
    slope = shapes.pose_codes.flatten(1, 2)  # (K, 6 P, d)
    distribution = torch.distributions.LowRankMultivariateNormal(
        shapes.place.flatten(1), slope, shapes.scale.flatten(1).square()
    )
    presence = torch.nn.functional.logsigmoid(shapes.presence_logits).sum(-1)
    exact = distribution.log_prob(parts.pose.flatten(1)[:, None]) + presence
    exact = exact + model.kind_logits.log_softmax(-1)
    logits = guide.kind_logits(parts, guide.propose(parts))
    torch.testing.assert_close(logits, exact, atol=1e-6, rtol=1e-6)
    bound = -loss_per_image(Trace_ELBO(), model, guide, sets[:5]).item()
    assert bound == pytest.approx(exact.logsumexp(-1).mean().item(), abs=1e-4)
