"""Guides to stacked capsule autoencoders: variants share weights, EM finds constellations."""

from functools import partial

import pyro
import pytest
import torch
from machines import values_of

from capsule_zoo.guides import EMConstellations, PartReader, StackedCapsuleGuide
from capsule_zoo.guides.parts.stacked_capsule_autoencoder import NoisyLogit, SureLogit
from capsule_zoo.inference.probes import latents
from capsule_zoo.models import StackedCapsuleAutoencoder, poses
from capsule_zoo.models.parts.object_votes import FeaturedCapsules, VoteSizes

READER = partial(PartReader, channels=4)


@pytest.fixture
def model():
    pyro.set_rng_seed(0)
    return StackedCapsuleAutoencoder(
        (1, 8, 8), objects=3, parts=6, template_size=4, votes=VoteSizes(hidden=5)
    )


@pytest.fixture
def images():
    return torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(1))


def test_a_normal_guide_starts_close_to_the_points_that_it_replaces(model, images):
    points = StackedCapsuleGuide(model, reader=READER, noise="none", stop_inputs=False)
    before, after = (values_of(g, images) for g in (points, points.with_poses("normal")))
    assert torch.equal(before["part_presence"], after["part_presence"])
    for name in ("part_pose", "part_feature"):
        assert 0 < (before[name] - after[name]).abs().max() < 0.12


def test_other_objects_keep_the_trained_reader(model, images):
    guide = StackedCapsuleGuide(model, reader=READER, noise="none")
    routed = guide.with_above(partial(EMConstellations, iterations=2))
    before, after = values_of(guide, images), values_of(routed, images)
    for name in ("part_presence", "part_pose", "part_feature"):
        assert torch.equal(before[name], after[name])
    assert not torch.equal(before["object_pose"], after["object_pose"])
    with torch.no_grad():
        next(guide.read_parts.parameters()).zero_()
    assert torch.equal(values_of(routed, images)["part_pose"], after["part_pose"])  # a copy


def test_switches_share_the_parameters(model, images):
    guide = StackedCapsuleGuide(model, reader=READER)
    quiet = guide.with_switches(noise="none", stop_inputs=False)
    assert (guide.noise, guide.stop_inputs) == ("uniform", True)
    assert list(map(id, quiet.parameters())) == list(map(id, guide.parameters()))
    assert torch.equal(
        values_of(quiet, images, 1)["part_presence"], values_of(quiet, images, 2)["part_presence"]
    )


def constellation(model, pose):
    """Return the parts that object 1 alone places exactly, at a pose."""
    with torch.no_grad():
        model.relation.presence_bias.fill_(-6.0)
        model.relation.presence_bias[1] = 6.0
        model.relation.read_weight.zero_()
        model.relation.scale_bias.fill_(-4.0)
        model.relation.static.add_(torch.randn_like(model.relation.static))
        relation = model.relation_of(torch.zeros(3, model.object_features, dtype=torch.float64))
        parts = poses.compose(pose, relation.pose[1])[None]
    presence = torch.ones(1, 6, dtype=torch.float64)
    return FeaturedCapsules(presence, parts, torch.zeros(1, 6, 16, dtype=torch.float64))


def test_em_finds_the_object_whose_constellation_the_parts_form(model):
    model = model.double().discretize()
    identity = torch.tensor(poses.IDENTITY, dtype=torch.float64)
    pose = identity + 0.1 * torch.tensor([1.0, -1, 2, 1, 0.5, -1], dtype=torch.float64)
    parts = constellation(model, pose)
    guide = StackedCapsuleGuide(
        model, reader=READER, above=partial(EMConstellations, iterations=20)
    ).double()
    objects = guide.infer_objects(model, parts)
    assert objects.logits[0].argmax() == 1
    assert objects.logits[0, 1] > 10
    torch.testing.assert_close(objects.pose[0, 1], pose, rtol=0, atol=0.02)
    absent = parts._replace(presence=torch.zeros_like(parts.presence))
    prior = guide.infer_objects(model, absent)
    torch.testing.assert_close(prior.pose[0, 1], identity)
    torch.testing.assert_close(prior.logits, torch.full_like(prior.logits, model.prior_logit))


def test_probes_read_probabilities_whatever_the_noise(model, images):
    guide = StackedCapsuleGuide(model, reader=READER)
    probabilities = [
        latents(g, images, ["part_presence"])
        for g in (guide, guide.with_switches(noise="none"), guide.discretize())
    ]
    assert ((probabilities[0] > 0) & (probabilities[0] < 1)).all()
    assert (probabilities[0] == probabilities[1]).all() and (
        probabilities[0] == probabilities[2]
    ).all()


def test_distributions_of_logits_expand_and_integrate_to_one():
    logits = torch.tensor([0.5, -1.0])
    distribution = NoisyLogit(logits, 4.0).expand(torch.Size((3, 2)))
    assert distribution.batch_shape == (3, 2) and distribution.rsample().shape == (3, 2)
    grid = torch.linspace(-6, 6, 24_001)[:, None]
    mass = NoisyLogit(logits, 4.0).log_prob(grid).exp().sum(0) * 12 / 24_000
    torch.testing.assert_close(mass, torch.ones(2), rtol=1e-3, atol=0)
    assert NoisyLogit(logits, 4.0).log_prob(logits + 2.1).max() == -torch.inf
    sure = SureLogit(logits).expand(torch.Size((3, 2)))
    assert torch.equal(sure.rsample(), logits.expand(3, 2))
