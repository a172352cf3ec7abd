"""A perceptron that infers objects: what it sees, how its presences spread, and its scopes."""

from functools import partial

import pyro
import pytest
import torch
from machines import values_of

from capsule_zoo.guides import PartReader, PerceptronObjects, StackedCapsuleGuide
from capsule_zoo.guides.parts.stacked_capsule_autoencoder import as_reads, from_reads
from capsule_zoo.models import StackedCapsuleAutoencoder
from capsule_zoo.models.parts.object_votes import FeaturedCapsules
from capsule_zoo.settings import configure

SIZES = dict(object_features=4, part_features=3, template_size=4, hidden=5)


@pytest.fixture
def guide():
    pyro.set_rng_seed(0)
    model = configure(StackedCapsuleAutoencoder, (1, 8, 8), objects=2, parts=3, **SIZES)
    reader, objects = partial(PartReader, channels=4), partial(PerceptronObjects, width=16)
    return StackedCapsuleGuide(model, reader=reader, above=objects, noise="none").double()


@pytest.fixture
def images():
    generator = torch.Generator().manual_seed(1)
    return torch.rand(40, 1, 8, 8, dtype=torch.float64, generator=generator)


def some_parts(batch=40, spread=1.0):
    generator = torch.Generator().manual_seed(2)
    presence, pose, feature = (
        torch.randn(batch, 3, *rest, dtype=torch.float64, generator=generator)
        for rest in ((), (6,), (3,))
    )
    return FeaturedCapsules(presence.abs() + 9, spread * pose, feature)


def test_presences_spread_over_images_around_the_prior(guide):
    logits = guide.infer_objects(guide.model, some_parts()).logits
    around = torch.full((2,), guide.model.prior_logit, dtype=torch.float64)
    torch.testing.assert_close(logits.mean(0), around)
    spread = logits.std(0, correction=0)
    torch.testing.assert_close(spread, torch.full_like(spread, 2.0), rtol=1e-3, atol=0)


def test_presences_that_are_not_balanced_hardly_differ_at_first(guide):
    free = guide.with_above(partial(PerceptronObjects, width=16, spread=None)).double()
    assert free.infer_objects(guide.model, some_parts()).logits.std(0).max() < 0.5


def test_small_differences_of_poses_count_as_much_as_large_ones(guide):
    """What is read is standardized, so that only the order of magnitude of all poses is lost."""
    near, far = (
        guide.infer_objects(guide.model, some_parts(spread=spread)).logits for spread in (0.05, 1)
    )
    torch.testing.assert_close(near, far, rtol=0, atol=0.05)


def test_objects_start_upright_at_full_size(guide):
    pose = guide.infer_objects(guide.model, some_parts()).pose
    upright = torch.tensor([0.9626, 0, 0, 0, 0.9626, 0], dtype=torch.float64)
    torch.testing.assert_close(pose.mean((0, 1)), upright, rtol=0, atol=0.3)


def test_reads_are_kept_whole(guide, images):
    read = guide.read_parts(images)
    for output, value in zip(from_reads(as_reads(read)), read, strict=True):
        assert torch.equal(output, value)
    torch.testing.assert_close(guide.reads(images, batch_size=7), as_reads(read).detach())


def test_objects_from_reads_are_those_from_images(guide, images):
    guide.eval()  # with running statistics
    whole = values_of(guide, images)
    above = values_of(guide.with_scope("objects"), guide.reads(images))
    assert set(whole) == set(above)
    for name, value in whole.items():
        torch.testing.assert_close(above[name], value)
    below = values_of(guide.with_scope("parts"), images)
    assert set(below) == {"part_presence", "part_pose", "part_feature"}
    assert all(torch.equal(below[name], whole[name]) for name in below)
