"""Free-form guides: start at the given guide, belong to their images, improve each separately."""

import warnings

import pytest
import torch
from pyro import poutine
from pyro.infer import Trace_ELBO

from capsule_zoo.guides import FreeForm, PartWholeGuide
from capsule_zoo.inference import Checks, check_pair, evaluate, fit, summarize
from capsule_zoo.models import PartWholeCapsules
from capsule_zoo.models.parts.painted_parts import Painting
from capsule_zoo.settings import configure

SMALL = dict(channels=8, width=16, heads=2, blocks=1, inducing=4)
FITTING = dict(freeze="model", checks=Checks(progress=False), batch_size=4)


@pytest.fixture
def pair():
    torch.manual_seed(0)
    model = PartWholeCapsules(
        (1, 12, 12), objects=3, parts=4, painting=Painting(template_size=5)
    ).double()
    return model, configure(PartWholeGuide, model, "delta", **SMALL).double().eval()


@pytest.fixture
def images():
    return torch.rand(4, 1, 12, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("distribution", ["delta", "normal"])
def test_it_starts_at_the_amortized_answer(pair, images, distribution):
    model, guide = pair
    torch.manual_seed(3)
    free = FreeForm(model, images, guide, distribution)
    check_pair(model, free, images)
    torch.manual_seed(3)
    start = poutine.trace(guide).get_trace(images).nodes
    nodes = poutine.trace(free).get_trace(images).nodes
    for level in ("object", "part"):
        expected = start[f"{level}_presence"]["fn"].logits
        torch.testing.assert_close(nodes[f"{level}_presence"]["fn"].logits, expected)
        torch.testing.assert_close(
            nodes[f"{level}_pose"]["fn"].mean, start[f"{level}_pose"]["value"]
        )


@pytest.mark.parametrize("kind", ["normal", "low_rank"])
def test_it_starts_with_the_scales_of_a_guide_that_has_some(pair, images, kind):
    model, guide = pair
    guide = guide.with_poses(kind).eval()
    with torch.no_grad():
        guide.pose_heads[-1].bias.add_(0.7)
    free = FreeForm(model, images, guide, "normal")
    start = poutine.trace(guide).get_trace(images).nodes["part_pose"]["fn"]  # read from the image
    torch.testing.assert_close(free.log_scales["part_pose"].exp(), start.stddev)


def test_each_image_has_parameters_of_its_own(pair, images):
    """The loss of one image has no gradient for the parameters of another."""
    model, guide = pair
    free = FreeForm(model, images, guide)
    trace = poutine.trace(free).get_trace(images)
    replayed = poutine.trace(poutine.replay(model, trace=trace)).get_trace(images)
    replayed.compute_log_prob()
    replayed.nodes["image"]["log_prob"][2].sum().backward()
    gradient = free.locs["part_pose"].grad.abs().sum((1, 2))
    assert gradient[2] > 0 and gradient[[0, 1, 3]].max() == 0


def test_fitting_it_improves_on_the_amortized_guide_and_freezes_the_model(pair, images):
    model, guide = pair
    before = {k: v.clone() for k, v in model.state_dict().items()}
    free = FreeForm(model, images, guide, "normal")
    start = summarize(evaluate(model, free, images, num_particles=20))["elbo"]
    fit(model, free, images, steps=60, lr=0.01, **FITTING)
    end = summarize(evaluate(model, free, images, num_particles=20))["elbo"]
    assert end > start + 10
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_a_low_rank_distribution_draws_every_site_once_with_the_density_of_them_all(pair, images):
    """The density of the auxiliary draw and of presences is all that there is, in every plate."""
    model, guide = pair
    free = FreeForm(model, images, guide, "low_rank", rank=3)
    trace = poutine.trace(free).get_trace(images)
    trace.compute_log_prob()
    together = trace.nodes["_continuous"]
    points = [trace.nodes[f"{level}_pose"]["value"] for level in ("object", "part")]
    assert together["value"].shape == (4, 1, 7 * 6)
    torch.testing.assert_close(
        torch.cat([point.flatten(1) for point in points], 1), together["value"][:, 0]
    )
    factor = torch.cat([free.factors[f"{n}_pose"].flatten(1, 2) for n in ("object", "part")], 1)
    scale = torch.cat([free.log_scales[f"{n}_pose"].flatten(1) for n in ("object", "part")], 1)
    factor = factor * scale.exp()[..., None]
    covariance = factor @ factor.mT + (2 * scale).exp().diag_embed()
    center = torch.cat([free.locs[f"{n}_pose"].flatten(1) for n in ("object", "part")], 1)
    distribution = torch.distributions.MultivariateNormal(center, covariance)
    expected = distribution.log_prob(together["value"][:, 0])
    torch.testing.assert_close(together["log_prob"][:, 0], expected)
    assert all(trace.nodes[f"{n}_pose"]["log_prob"].sum() == 0 for n in ("object", "part"))
    check_pair(model, free, images)
    subset = free.select(torch.tensor([2, 0]))
    assert torch.equal(subset.factors["part_pose"], free.factors["part_pose"][[2, 0]])


def test_delta_poses_lose_nothing_but_density(pair, images):
    """Trap 4: with Delta poses Trace_ELBO counts log p(A) in full and log q(A) as zero."""
    model, guide = pair
    free = FreeForm(model, images, guide)
    torch.manual_seed(0)
    loss = Trace_ELBO().loss(model, free, images)
    torch.manual_seed(0)
    trace = poutine.trace(free).get_trace(images)
    joint = poutine.trace(poutine.replay(model, trace=trace)).get_trace(images).log_prob_sum()
    entropy = sum(
        trace.nodes[n]["fn"].log_prob(trace.nodes[n]["value"]).sum()
        for n in ("object_presence", "part_presence")
    )
    assert loss == pytest.approx((entropy - joint).item(), rel=1e-12)


def test_other_images_and_another_order_are_noticed(pair, images):
    points, number = FreeForm(pair[0], images), len(images)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        points(torch.cat([images, images]))
        points.select(torch.tensor([number - 1, 0]))(images[[-1, 0]])
    for others in (images.flip(0), 1 - images):
        with pytest.warns(UserWarning, match="was fitted to other images"):
            points(others)
