"""The amortized guide: what it may see, what `with_poses` keeps, discrete draws."""

import pyro.distributions as dist
import pytest
import torch
from pyro import poutine

from capsule_zoo.guides import PartWholeGuide
from capsule_zoo.inference import check_pair
from capsule_zoo.models import PartWholeCapsules
from capsule_zoo.models.parts import poses
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
