"""Test-time refinement: never worse than its start, image by image, with the model untouched."""

import math

import pyro
import pytest
import torch
from pyro import poutine

from capsule_zoo.guides import PartWholeGuide
from capsule_zoo.inference import SemiAmortized, check_pair, evaluate, summarize
from capsule_zoo.inference.posterior.refine import refine
from capsule_zoo.models import Capsules, PartWholeCapsules
from capsule_zoo.models.parts import poses
from capsule_zoo.models.parts.painted_parts import Painting
from capsule_zoo.registry import create, small_settings
from capsule_zoo.settings import configure


def bold(model):
    """Return the model with templates that cover what is behind them: new ones are faint."""
    model.template_logits.data[:, -1] += 3
    return model


@pytest.fixture
def pair():
    torch.manual_seed(0)
    model = bold(
        PartWholeCapsules((1, 16, 16), objects=3, parts=4, painting=Painting(template_size=5))
    ).double()
    guide = configure(PartWholeGuide, model, channels=8, width=16, heads=2, blocks=1, inducing=4)
    return model, guide.double()


@pytest.fixture
def images(pair):
    """Return images that the model itself has drawn, so that good answers exist."""
    torch.manual_seed(1)
    nodes = poutine.trace(pair[0]).get_trace(batch_size=5).nodes
    parts = Capsules(nodes["part_presence"]["value"], nodes["part_pose"]["value"])
    return pair[0].render(parts).detach()


@pytest.mark.parametrize("method", ["scheduled", "adam"])
def test_no_image_ends_below_its_start(pair, images, method):
    model, guide = pair
    before = {k: v.clone() for k, v in model.state_dict().items()}
    fitted = refine(model, guide, images, steps=30, method=method, lr=0.5)  # far too long steps
    refinement = fitted.refinement
    assert (refinement.end >= refinement.start).all() and (refinement.end > refinement.start).any()
    assert len(refinement.path) == 31 and refinement.path[-1].isfinite()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.requires_grad for p in model.parameters())


def test_the_guide_holds_what_its_judge_has_seen(pair, images):
    """Starting again from the refined guide under the same noise begins where it ended."""
    model, guide = pair
    refined = refine(model, guide, images, steps=40, seed=3)
    refinement = refined.refinement
    assert refinement.end.mean() > refinement.start.mean() + 10
    again = refine(model, refined, images, steps=0, seed=3).refinement
    torch.testing.assert_close(again.start, refinement.end)


def test_every_image_is_refined_as_if_it_were_alone(pair, images):
    """An image's answer does not depend on the others: a hopeless one does not stop it."""
    model, guide = pair
    guide.eval()
    both = torch.cat([images[:2], torch.rand_like(images[:1])])
    other = torch.cat([images[:2], torch.zeros_like(images[:1])])
    one, two = (refine(model, guide, x, steps=15).refinement for x in (both, other))
    torch.testing.assert_close(one.end[:2], two.end[:2])


def test_a_turned_start_is_turned_back(images):
    """With four starts a 90-degree rotation is free: the best parse is the upright one, rotated."""
    torch.manual_seed(0)
    wide = dict(sigma_top=100.0, sigma_min=100.0, sigma_off=100.0, sigma_dummy=100.0)
    model = bold(
        configure(PartWholeCapsules, (1, 16, 16), objects=3, parts=4, template_size=5, **wide)
    ).double()
    guide = configure(PartWholeGuide, model, channels=8, width=16, heads=2, blocks=1, inducing=4)
    upright = refine(model, guide.double(), images, steps=0, starts=4)
    quarter = images.rot90(1, (2, 3))  # counter-clockwise
    rotated = refine(model, guide, quarter, steps=0, starts=4)
    single = refine(model, guide, quarter, steps=0)
    assert (rotated.refinement.start >= single.refinement.start).all()
    angle = torch.tensor(-math.pi / 2, dtype=torch.float64)
    moved = poses.compose(poses.rotation(angle), upright.locs["part_pose"])
    torch.testing.assert_close(rotated.locs["part_pose"], moved)


def test_scenes_are_refined_in_their_summed_form():
    entry = create("scenes", **small_settings("scenes"))
    pictures = torch.rand(2, 1, 12, 10)
    with pytest.raises(
        ValueError, match=r"of scenes, model and guide of `entry.with_enumerated_presences`"
    ):
        refine(entry.model, entry.guide, pictures)
    pair = entry.with_enumerated_presences
    refined = refine(pair.model, pair.guide, pictures, steps=1)
    assert len(refined.refinement.end) == 2


def test_semi_amortized_draws_from_the_refined_answer_in_any_order(pair, images):
    model, guide = pair
    guide.eval()
    semi = SemiAmortized(guide, steps=15, seed=2, distribution="delta")
    check_pair(model, semi, images)
    rows, places = torch.unique(images.flatten(1), dim=0, return_inverse=True)
    refined = refine(model, guide, rows.view_as(images), steps=15, seed=2).select(places)
    order = torch.tensor([4, 0, 0, 2, 1, 3, 4])
    nodes = poutine.trace(semi).get_trace(images[order]).nodes
    torch.testing.assert_close(nodes["part_pose"]["value"], refined.locs["part_pose"][order])
    discrete = poutine.trace(semi.discretize()).get_trace(images).nodes
    assert set(discrete["part_presence"]["value"].unique().tolist()) <= {0.0, 1.0}


def test_a_batch_is_refined_once_until_something_is_trained(pair, images):
    model, guide = pair
    semi = SemiAmortized(guide, steps=2)
    first = semi.fit_images(images)
    assert semi.discretize().fit_images(images.clone()) is first
    assert semi.fit_images(images[:2]) is not first
    second = semi.fit_images(images)
    with torch.no_grad():
        model.template_logits.add_(1)
    assert semi.fit_images(images) is not second
    third, read = semi.fit_images(buffer := images.clone()), semi.fit_images(buffer)
    buffer.copy_(1 - images)
    assert read is third and semi.fit_images(buffer) is not third


def test_semi_amortized_bounds_are_tighter_than_where_they_start(pair, images):
    model, guide = pair
    normal = guide.with_poses("normal")
    scores = [
        summarize(evaluate(model, candidate, images, num_particles=10))["elbo"]
        for candidate in (normal, SemiAmortized(normal, steps=60))
    ]
    assert scores[1] > scores[0] + 10


def test_images_are_checked_once_also_without_validation(pair, images):
    with pyro.validation_enabled(False), pytest.raises(ValueError, match=r"lie in \[0, 1\]"):
        refine(*pair, images + 2, steps=1)
