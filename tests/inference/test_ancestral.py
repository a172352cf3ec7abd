"""Running a model downwards: given sites keep their values, all others are drawn."""

import pyro.distributions as dist
import torch

from capsule_zoo.guides import PartWholeGuide
from capsule_zoo.inference.evaluation.ancestral import image_log_likelihood, infer, mean_images
from capsule_zoo.models import Capsules, PartWholeCapsules
from capsule_zoo.models.parts import poses
from capsule_zoo.settings import configure


def pair(**options):
    torch.manual_seed(0)
    model = configure(
        PartWholeCapsules, (1, 12, 12), objects=2, parts=3, template_size=5, **options
    )
    guide = configure(PartWholeGuide, model, channels=6, width=8, heads=2, blocks=1, inducing=3)
    return model, guide, torch.rand(7, 1, 12, 12)


def test_given_parts_are_rendered_and_scored_as_the_model_says():
    model, guide, images = pair()
    parsed = infer(guide, images, batch_size=3)
    assert set(parsed) == set(guide.covers)
    parts = Capsules(parsed["part_presence"], parsed["part_pose"])
    rendered = model.discretize().render(parts)
    torch.testing.assert_close(mean_images(model, 7, parsed, batch_size=2), rendered)
    expected = dist.Normal(rendered, model.sigma_image).log_prob(images).sum((1, 2, 3))
    log_likelihood = image_log_likelihood(model, images, parsed, batch_size=2)
    torch.testing.assert_close(log_likelihood, expected)


def test_parts_that_are_not_given_are_drawn_from_their_objects():
    """With one object on, and votes without spread, the votes are the poses of its parts."""
    model, guide, images = pair(epsilon=1e-9, sigma_min=1e-6)
    torch.nn.init.constant_(model.selections[0].raw_scale, -30.0)
    pose = infer(guide, images)["object_pose"]
    objects = {"object_presence": torch.tensor([1.0, 0.0]).expand(7, 2), "object_pose": pose}
    transform = poses.identity_like(pose) + model.selections[0].transform[:, 0]
    votes = poses.compose(pose[:, :1], transform)
    part_values = {"part_presence": torch.ones(7, 3)}
    rendered = model.discretize().render(Capsules(part_values["part_presence"], votes))
    torch.testing.assert_close(
        mean_images(model, 7, objects | part_values), rendered, atol=1e-4, rtol=0
    )
    first, again, other = (mean_images(model, 7, objects, seed=s) for s in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_with_every_part_off_the_image_is_background():
    model, _, images = pair()
    off = {"part_presence": torch.zeros(7, 3)}
    assert not mean_images(model, 7, off).any()
    expected = dist.Normal(0.0, model.sigma_image).log_prob(images).sum((1, 2, 3))
    torch.testing.assert_close(image_log_likelihood(model, images, off), expected)
