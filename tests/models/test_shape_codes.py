"""Shape codes: sums over kinds and parents against brute force, and interventions."""

from functools import partial

import pyro
import pytest
import torch
from pyro import poutine
from pyro.distributions import Delta
from pyro.infer import Trace_ELBO, TraceEnum_ELBO
from small_shape_codes import BATCH, CODES, drawn, small, sum_parents

from capsule_zoo.guides import RidgeKinds, ShapeCodesGuide
from capsule_zoo.inference import evaluate, loss_per_image
from capsule_zoo.inference.evaluation.summary import summarize
from capsule_zoo.models import Capsules, ShapeCodes, poses
from capsule_zoo.models.parts.painted_parts import ObjectPose, Painting
from capsule_zoo.models.parts.parent_selection import Belonging
from capsule_zoo.models.parts.part_sets import PartSets
from capsule_zoo.settings import configure

KINDS, PARTS = 3, 2
made = partial(small, kinds=KINDS, parts=PARTS)


def images() -> torch.Tensor:
    return torch.rand(BATCH, 1, 6, 6, generator=torch.Generator().manual_seed(1)).double()


def brute_force(model: ShapeCodes, parts: Capsules, pose, code) -> torch.Tensor:
    """The sum over all choices of parents, one by one, for every kind, (B, K)."""
    kinds = torch.arange(KINDS).expand(BATCH, -1).split(1, dim=1)
    arguments = zip(kinds, pose.split(1, dim=1), code.split(1, dim=1), strict=True)
    return torch.stack([sum_parents(model, k, parts, p, c) for k, p, c in arguments], dim=-1)


def points(parts: Capsules, pose, code):
    """A guide of points at given values, whose distribution of the kind is the best one."""

    def guide(images, labels=None, model=None):
        with pyro.plate("images", BATCH, dim=-2):
            with pyro.plate("parts", PARTS, dim=-1):
                pyro.sample("part_presence", Delta(parts.presence))
                pyro.sample("part_pose", Delta(parts.pose, event_dim=1))
            logits = guide.model.log_joint_of_kinds(parts, pose, code)
            distribution = pyro.distributions.Categorical(logits=logits[:, None])
            kind = pyro.sample("object_kind", distribution, infer={"enumerate": "parallel"})
            rows = torch.arange(BATCH)[:, None]
            pyro.sample("object_pose", Delta(pose[rows, kind], event_dim=1))
            pyro.sample("object_code", Delta(code[rows, kind], event_dim=1))

    return guide


def gradients(value: torch.Tensor, model: ShapeCodes) -> list[torch.Tensor]:
    names = [n for n, _ in model.named_parameters() if "template" not in n]
    grads = torch.autograd.grad(value, [model.get_parameter(n) for n in names])
    return [g for _, g in zip(names, grads, strict=True)]


@pytest.mark.parametrize("presence", ["relaxed", "discrete"])
@pytest.mark.parametrize("selection", ["marginal", "enumerate"])
def test_brute_force_closed_form_and_enumeration_agree(presence, selection):
    """Value and gradient, the dummy included, whichever way the parents are summed out."""
    model = made(presence=presence, selection=selection)
    parts, pose, code = drawn(model, KINDS)
    exact = brute_force(model, parts, pose, code).logsumexp(-1)
    closed = model.log_joint_of_kinds(parts, pose, code).logsumexp(-1)
    torch.testing.assert_close(closed, exact, rtol=1e-10, atol=1e-10)

    guide = points(parts, pose, code)
    guide.model = model
    loss = TraceEnum_ELBO(max_plate_nesting=2).differentiable_loss(model, guide, images())
    with torch.no_grad():
        image = model.image_distribution(parts).log_prob(images()[:, None])
    torch.testing.assert_close(-loss, (exact + image[:, 0]).sum(), rtol=1e-10, atol=1e-10)
    expected = gradients(exact.sum(), model)
    for value in (closed.sum(), -loss):
        for gradient, wanted in zip(gradients(value, model), expected, strict=True):
            torch.testing.assert_close(gradient, wanted, rtol=1e-9, atol=1e-10)


def test_the_model_that_enumerates_kinds_has_the_same_sum():
    """With one pose and one code for all kinds, as Pyro's automatic guides have them."""
    model = made()
    parts, pose, code = drawn(model, KINDS)
    pose, code = (x[:, :1].expand(-1, KINDS, -1) for x in (pose, code))

    def guide(images):
        with pyro.plate("images", BATCH, dim=-2):
            with pyro.plate("parts", PARTS, dim=-1):
                pyro.sample("part_presence", Delta(parts.presence))
                pyro.sample("part_pose", Delta(parts.pose, event_dim=1))
            pyro.sample("object_pose", Delta(pose[:, :1], event_dim=1))
            pyro.sample("object_code", Delta(code[:, :1], event_dim=1))

    loss = TraceEnum_ELBO(max_plate_nesting=2).loss(model.with_enumerated_kinds(), guide, images())
    closed = model.log_joint_of_kinds(parts, pose, code).logsumexp(-1)
    image = model.image_distribution(parts).log_prob(images()[:, None])[:, 0]
    assert -loss == pytest.approx((closed + image).sum().item(), rel=1e-10)


def test_on_part_sets_the_poses_of_absent_parts_are_summed_out():
    model = made().with_scope("objects")
    parts, pose, code = drawn(model, KINDS)
    parts = parts._replace(presence=torch.tensor([[1.0, 0.0], [0.0, 1.0]]).double())
    moved = parts._replace(pose=torch.where(parts.presence[..., None] > 0, parts.pose, 7.0))
    first, second = (model.log_joint_of_kinds(capsules, pose, code) for capsules in (parts, moved))
    torch.testing.assert_close(first, second)
    # a part that is present: the density of the whole model, which sees poses only of such parts
    whole = model.with_scope("scene").discretize()
    all_present = parts._replace(presence=torch.ones(BATCH, PARTS).double())
    torch.testing.assert_close(
        model.log_joint_of_kinds(all_present, pose, code),
        whole.log_joint_of_kinds(all_present, pose, code),
    )


def test_importance_weights_average_to_the_likelihood_of_part_sets():
    """Against the integral over a single number of code, with the object's pose nearly fixed."""
    pyro.set_rng_seed(0)
    model = ShapeCodes(
        (1, 6, 6),
        kinds=2,
        parts=3,
        codes=1,
        painting=Painting(template_size=4),
        pose=ObjectPose(sigma_top=1e-4),
        belonging=Belonging(epsilon=0.5),
    )
    model = model.double()
    with torch.no_grad():
        model.shapes.pose_codes *= 6
        model.shapes.presence_codes *= 20
        model.kind_logits += torch.tensor([0.5, -0.5])
    on_parts = model.with_scope("objects")
    sets = on_parts(batch_size=3).detach()
    assert sets.shape == (3, 1, 3, 7)
    parts = Capsules(sets[:, 0, :, 0], sets[:, 0, :, 1:])
    grid = torch.linspace(-7, 7, 4001).double()
    pose = poses.identity_like(grid).expand(len(grid), 2, 6)
    exact, kinds = [], []
    for presence, place in zip(*parts, strict=True):
        one = Capsules(presence.expand(len(grid), -1), place.expand(len(grid), -1, -1))
        code = grid[:, None, None].expand(-1, 2, 1)
        joint = on_parts.log_joint_of_kinds(one, pose, code)
        joint = joint - on_parts.pose.distribution(pose).log_prob(pose)
        exact.append((joint.logsumexp(-1).logsumexp(0) + (grid[1] - grid[0]).log()).item())
        kinds.append(joint.logsumexp(0).softmax(-1))
    guide = configure(ShapeCodesGuide, on_parts, above=RidgeKinds, channels=2).double()
    believed = poutine.trace(guide).get_trace(sets).nodes["object_kind"]["fn"].logits.exp()
    torch.testing.assert_close(believed[:, 0], torch.stack(kinds), atol=0.05, rtol=0)
    idata = evaluate(on_parts, guide, sets, num_particles=4000, batch_size=12000, draws=0)
    iwae = summarize(idata)["iwae"]
    assert idata.attrs["bound_on"] == "log p(part)"
    assert idata.attrs["is_bound"]
    assert iwae == pytest.approx(sum(exact) / 3, abs=0.03)
    assert summarize(idata)["elbo"] < sum(exact) / 3


@pytest.mark.parametrize("site", ["object_kind", "object_pose", "object_code"])
def test_interventions_change_the_parts_and_nothing_above_them(site):
    model = made(sigma_top=0.3).discretize()
    values = {
        "object_kind": torch.full((BATCH, 1), 2),
        "object_pose": poses.identity_like(images()).expand(BATCH, 1, 6) + 0.5,
        "object_code": torch.full((BATCH, 1, CODES), 3.0).double(),
    }
    traces = []
    for program in (model, poutine.do(model, {site: values[site]})):
        torch.manual_seed(5)
        traces.append(poutine.trace(program).get_trace(batch_size=BATCH).nodes)
    free, forced = traces
    distribution = forced["part_pose"]["fn"]
    assert not torch.equal(
        distribution.component_distribution.mean,
        free["part_pose"]["fn"].component_distribution.mean,
    )
    held = {name: free[name]["value"] for name in values if name != site} | {site: values[site]}
    expected = model.shapes(*(held[name] for name in values))
    if site == "object_code":  # the draws above the intervened site are those of the free run
        torch.testing.assert_close(distribution.component_distribution.mean, expected.vote)
    conditioned = poutine.trace(poutine.condition(model, values)).get_trace(batch_size=BATCH)
    assert torch.equal(conditioned.nodes["object_code"]["value"], values["object_code"])
    assert conditioned.nodes["_RETURN"]["value"].shape == (BATCH, 1, 6, 6)


def test_votes_and_presences_are_those_of_the_story():
    """A (N + U c) and sigmoid(g + w c), part by part and image by image."""
    model = made()
    _, pose, code = drawn(model, KINDS)
    kinds = torch.tensor([2, 1])
    distribution = model.shapes(kinds[:, None], pose[:, :1], code[:, :1])
    shapes = model.shapes
    for b, k in enumerate(kinds.tolist()):
        for i in range(PARTS):
            bent = shapes.place[k, i] + shapes.pose_codes[k, i] @ code[b, 0]
            torch.testing.assert_close(distribution.vote[b, i, 1], poses.compose(pose[b, 0], bent))
            told = shapes.presence_logits[k, i] + shapes.presence_codes[k, i] @ code[b, 0]
            torch.testing.assert_close(distribution.presence_logits[b, i, 1], told)
            torch.testing.assert_close(distribution.log_weights[b, i, 1], shapes.log_affinity[k, i])
            torch.testing.assert_close(distribution.scale_on[b, i, 1], shapes.scale[k, i])
    identity = poses.identity_like(pose).expand(BATCH, PARTS, 6)
    torch.testing.assert_close(distribution.vote[..., 0, :], identity)
    assert (distribution.presence_logits[..., 0] == shapes.dummy_logit).all()


def test_known_kinds_are_observed():
    """Labels are the kinds: they have a density in the model, and the guide does not draw them."""
    model = made()
    guide = configure(ShapeCodesGuide, model, above=RidgeKinds, channels=2).double()
    kinds = torch.tensor([2, 0])
    nodes = poutine.trace(model).get_trace(images(), kinds).nodes
    assert nodes["object_kind"]["is_observed"]
    assert nodes["object_kind"]["value"][:, 0].tolist() == kinds.tolist()
    assert "object_kind" not in poutine.trace(guide).get_trace(images(), kinds).nodes
    loss = loss_per_image(Trace_ELBO(), model, guide, images(), kinds)
    assert torch.isfinite(loss)
    for dtype in (torch.int32, torch.uint8):
        for program in (model, guide):
            log_joints = []
            for labels in (kinds, kinds.to(dtype)):
                pyro.set_rng_seed(0)
                log_joints.append(poutine.trace(program).get_trace(images(), labels).log_prob_sum())
            assert log_joints[0] == log_joints[1]


def test_at_rest_the_parts_are_those_of_the_first_kind():
    model = made().with_scope("parts")
    assert {site.name for site in model.sites} == {"part_presence", "part_pose"}
    distribution = poutine.trace(model).get_trace(batch_size=BATCH).nodes["part_pose"]["fn"]
    votes = distribution.component_distribution.mean[..., 1, :]
    torch.testing.assert_close(votes, model.shapes.place[0].expand(BATCH, PARTS, 6))


def test_kinds_start_as_the_distributions_that_they_are_given():
    """Means move with codes as the loadings say, and parts without known poses stay."""
    model = made().with_scope("objects")
    before = model.shapes.place.clone()
    presence = torch.tensor([[0.9, 0.2], [0.5, 0.8], [0.3, 0.3]]).double()
    mean = torch.randn(KINDS, PARTS, 6).double()
    loadings = torch.randn(KINDS, PARTS, 6, CODES).double()
    std = 0.05 + torch.rand(KINDS, PARTS, 6).double()
    model.shapes.start_from(presence, mean, loadings, std, torch.tensor([True, False]))
    kind, code = torch.tensor([[2]]), torch.randn(1, 1, CODES).double()
    distribution = model.shapes.part_distribution(
        kind, poses.identity_like(code).view(1, 1, 6), code
    )
    expected = mean[2] + loadings[2] @ code[0, 0]
    torch.testing.assert_close(distribution.vote[0, 0, 0], expected[0])
    torch.testing.assert_close(distribution.scale[0, 0, 0], std[2, 0])
    torch.testing.assert_close(distribution.logits[0, :, 0].sigmoid(), presence[2])
    torch.testing.assert_close(model.shapes.place[:, 1], before[:, 1])
    assert (distribution.log_odds > 6).all()


def test_a_model_of_part_sets_has_their_space():
    model = made().with_scope("objects")
    assert model.space == PartSets(PARTS, 7)
    sets = model.space.example(4, torch.float64, torch.Generator().manual_seed(0))
    model.space.check(sets)
    sample = poutine.trace(model).get_trace(batch_size=3).nodes[model.space.site]["value"]
    assert model.space.as_batch(sample).shape == (3, 1, PARTS, 7)
