"""The amortized guide: what it may see, what `with_poses` keeps, discrete draws."""

import pyro.distributions as dist
import pytest
import torch
from pyro import poutine

from capsule_zoo.data import Split
from capsule_zoo.guides import PartWholeGuide
from capsule_zoo.guides.parts.set_transformers import LevelPerceptron
from capsule_zoo.inference import Checks, check_pair, fit
from capsule_zoo.models import PartWholeCapsules
from capsule_zoo.models.part_whole import shift_levels
from capsule_zoo.models.parts import poses
from capsule_zoo.models.parts.painted_parts import Painting
from capsule_zoo.settings import configure

SMALL = dict(channels=8, width=16, heads=2, blocks=1, inducing=4)


def traced(guide, images, seed=0):
    torch.manual_seed(seed)
    return poutine.trace(guide).get_trace(images)


@pytest.mark.parametrize("pose", ["delta", "normal", "low_rank"])
@pytest.mark.parametrize("selection", ["marginal", "enumerate"])
def test_every_pose_fits_every_model(model, images, pose, selection):
    model = model.with_selection(selection)
    check_pair(model, configure(PartWholeGuide, model, pose, **SMALL).double(), images)


def test_objects_see_the_image_only_through_the_parts(model, images):
    """With the parts clamped, changing the image changes nothing above them."""
    guide = configure(PartWholeGuide, model, "normal", **SMALL).double()
    trace = traced(guide, images)
    below = {n: trace.nodes[n]["value"] for n in ("part_presence", "part_pose")}
    clamped = poutine.condition(guide, data=below)
    distributions = []
    for batch in (images, images.flip(0)):
        nodes = traced(clamped, batch).nodes
        distributions.append(
            [nodes["object_presence"]["fn"].logits, nodes["object_pose"]["fn"].mean]
        )
    for one, other in zip(*distributions, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("seed", range(5))
def test_objects_begin_where_their_prior_has_them(seed):
    """Far from it, their prior would push the parts into the corners before they fit the image."""
    torch.manual_seed(seed)
    model = PartWholeCapsules(objects=8, parts=6)
    sites = traced(PartWholeGuide(model, "delta"), torch.rand(20, 1, 28, 28)).nodes
    upright = torch.eye(2, 3).flatten()
    away = sites["object_pose"]["value"] - upright
    anywhere = poses.from_parameters(torch.randn(1000, 6)) - upright
    assert away.square().mean() < anywhere.square().mean() / 2


@pytest.mark.parametrize("pose", ["normal", "low_rank"])
def test_with_poses_keeps_the_centers_and_starts_close(model, images, pose):
    points = configure(PartWholeGuide, model, "delta", **SMALL).double()
    tight = points.with_poses(pose)
    assert tight.pose == pose and tight.model is model
    center = traced(points, images).nodes["part_pose"]["value"]
    distribution = traced(tight, images).nodes["part_pose"]["fn"]
    torch.testing.assert_close(distribution.mean, center)
    assert distribution.variance.sqrt().max() < 0.05
    with torch.no_grad():
        next(tight.parameters()).add_(1.0)  # the weights are copies, not shared
    assert torch.equal(traced(points, images).nodes["part_pose"]["value"], center)


def test_low_rank_covariance_is_factor_plus_diagonal(model, images):
    guide = configure(PartWholeGuide, model, "low_rank", rank=3, **SMALL).double()
    distribution = traced(guide, images).nodes["part_pose"]["fn"]
    assert (
        isinstance(distribution, dist.LowRankMultivariateNormal)
        and distribution.cov_factor.shape[-1] == 3
    )
    dense = dist.MultivariateNormal(distribution.loc, distribution.covariance_matrix)
    value = distribution.rsample()
    torch.testing.assert_close(distribution.log_prob(value), dense.log_prob(value))


def test_discrete_guide_shares_weights_and_draws_zeros_and_ones(model, images):
    guide = configure(PartWholeGuide, model, "delta", **SMALL).double()
    discrete = guide.discretize()
    relaxed_node, node = (traced(g, images).nodes["part_presence"] for g in (guide, discrete))
    assert set(node["value"].unique().tolist()) <= {0.0, 1.0}
    torch.testing.assert_close(node["fn"].logits, relaxed_node["fn"].logits)
    assert all(a is b for a, b in zip(guide.parameters(), discrete.parameters(), strict=True))


def test_below_a_level_on_top_a_guide_infers_what_it_did(model, images):
    guide = configure(PartWholeGuide, model, "normal", **SMALL).double().eval()
    deeper = guide.with_level_on_top(3).eval()
    check_pair(deeper.model, deeper, images)
    before, after = traced(guide, images).nodes, traced(deeper, images).nodes
    for level, below in zip(model.levels, deeper.model.levels[1:], strict=True):
        one, other = (
            (nodes[f"{name}_presence"]["fn"].logits, nodes[f"{name}_pose"]["fn"].stddev)
            for nodes, name in ((before, level.name), (after, below.name))
        )
        torch.testing.assert_close(one, other, rtol=0, atol=0)
        poses_of = [n[f"{x.name}_pose"]["value"] for n, x in ((before, level), (after, below))]
        torch.testing.assert_close(*poses_of, rtol=0, atol=0)


def test_objects_from_reads_are_those_from_images(model, images):
    guide = configure(PartWholeGuide, model, "normal", **SMALL).double().discretize().eval()
    drawn = traced(guide, images, seed=3).nodes
    level = model.levels[1].name
    lower = {f"{level}_{name}": drawn[f"{level}_{name}"]["value"] for name in ("presence", "pose")}
    reads = guide.reads(images, seed=3)
    objects = poutine.condition(guide.with_scope("objects"), data=lower)
    nodes = traced(objects, reads).nodes
    for name in (f"{level}_presence", "object_presence"):
        torch.testing.assert_close(nodes[name]["fn"].logits, drawn[name]["fn"].logits)
    torch.testing.assert_close(reads[:, 0, :, 1:], lower[f"{level}_pose"])
    torch.testing.assert_close(nodes["object_pose"]["fn"].mean, drawn["object_pose"]["fn"].mean)
    above = guide.reads(images, level=0, seed=3)
    torch.testing.assert_close(above[:, 0, :, 0], drawn["object_presence"]["fn"].logits)


def test_training_in_the_scope_of_objects_changes_the_new_level_alone(images):
    torch.manual_seed(0)
    model = PartWholeCapsules((1, 12, 12), 3, 4, painting=Painting(template_size=5))
    guide = configure(PartWholeGuide, model, **SMALL)
    deeper = guide.with_level_on_top(2)
    pair = deeper.model.with_scope("objects"), deeper.with_scope("objects")
    reads = Split(deeper.reads(images.float()), None, "groups")
    before = {**guide.state_dict(), **model.state_dict()}
    new = deeper.model.selections[0].transform.clone()
    fit(*pair, reads, steps=3, batch_size=3, checks=Checks(progress=False))
    lists = "infer_objects.transformers", "infer_objects.balance", "pose_heads", "selections"
    after = {**deeper.state_dict(), **deeper.model.state_dict()}
    before.pop("presence_logits")
    for name, weight in shift_levels(before, *lists).items():
        assert torch.equal(weight, after[name]), name
    assert not torch.equal(new, deeper.model.selections[0].transform)


@pytest.mark.parametrize("setting", [dict(rotations=4), dict(centered=True)])
def test_reads_need_images_as_they_are(model, images, setting):
    guide = configure(PartWholeGuide, model, **SMALL, **setting).double()
    with pytest.raises(ValueError, match="rotations=1"):
        guide.reads(images)


@pytest.mark.parametrize("training", [True, False])
def test_a_perceptron_sees_the_spread_of_its_children_in_every_outer_batch(training):
    """Children that differ ten times less are inferred alike, in each particle alone."""
    torch.manual_seed(0)
    level = LevelPerceptron(4, 3, hidden=16).double().train(training)
    members = torch.randn(2, 50, 4, 7, dtype=torch.float64)
    level(members)  # statistics of one batch
    read = level(members)
    if training:
        torch.testing.assert_close(level(5 + members / 10), read, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(level(members[1]), read[1])
    else:
        torch.testing.assert_close(level(members[1]), read[1], rtol=0, atol=0)
