"""Objects that start as clusters: votes, codes and the encoder reproduce a known mixture."""

from functools import partial

import pyro
import pytest
import torch

from capsule_zoo.guides import EMConstellations, PartReader, PerceptronObjects, StackedCapsuleGuide
from capsule_zoo.guides.parts.part_reader import Proposal
from capsule_zoo.guides.parts.stacked_capsule_autoencoder import as_reads
from capsule_zoo.inference.training.starts.factor_analyzers import FactorAnalyzers
from capsule_zoo.models import Capsules, StackedCapsuleAutoencoder, poses
from capsule_zoo.models.parts.object_votes import FeaturedCapsules
from capsule_zoo.settings import configure
from capsule_zoo.zoo.stacked_capsule_autoencoder.clustered_objects import (
    posterior_codes,
    start_objects,
    to_parameters,
)

NUMBER, PARTS = 300, 4


def some_poses(*shape):
    """Return poses about half as large as the image, near its middle, upright within 60 degrees."""
    raw = torch.randn(*shape, 6) * torch.tensor([0.3, 0.3, 0.05, 0.02, 0.05, 0.05])
    return poses.from_parameters(raw)


@pytest.fixture
def scene():
    """Return a guide, reads of images of two kinds, the kinds, and the mean arrangement of each."""
    pyro.set_rng_seed(0)
    sizes = dict(object_features=4, part_features=3, template_size=4, hidden=8)
    model = configure(StackedCapsuleAutoencoder, (1, 8, 8), objects=2, parts=PARTS, **sizes)
    objects = partial(PerceptronObjects, width=32)
    guide = StackedCapsuleGuide(model, reader=partial(PartReader, channels=4), above=objects)
    means = some_poses(2, PARTS)
    kinds = torch.arange(NUMBER) % 2
    bend = torch.randn(NUMBER, 1, 1) * 0.1 * torch.tensor([0.0, 0, 1, 0, 0, 0])  # x of all parts
    pose = means[kinds] + bend + 0.01 * torch.randn(NUMBER, PARTS, 6)
    logits = torch.full((NUMBER, PARTS), 4.0)
    logits[kinds == 1, 0] = -4.0  # the second kind lacks the first part
    features = torch.randn(NUMBER, PARTS, 7 + 3)
    return guide, as_reads(Proposal(logits, pose, features)), kinds, means


def test_votes_clusters_and_presences_are_those_of_the_kinds(scene):
    guide, reads, kinds, means = scene
    clusters = start_objects(guide, reads, seed=3, updates=100)
    order = torch.randperm(NUMBER, generator=torch.Generator().manual_seed(3))
    object_of = [clusters[kinds[order] == kind].mode().values.item() for kind in (0, 1)]
    assert sorted(object_of) == [0, 1]
    relation = guide.model.relation_of(torch.zeros(2, 4))
    first = poses.from_parameters(torch.tensor([3.0, 3, 0, 0, 0, 0]))
    votes = poses.compose(first, relation.pose)
    for kind, which in enumerate(object_of):
        rows = slice(kind, None)  # the second kind lacks the first part
        torch.testing.assert_close(votes[which, rows], means[kind, rows], rtol=0, atol=0.03)
    lacking = relation.presence_logits[object_of[1]]
    assert lacking[0] < -1 < 1 < lacking[1:].min()
    guide.eval()
    features = torch.zeros(NUMBER, PARTS, 3)
    read = reads.squeeze(1)
    parts = FeaturedCapsules(read[..., 0], read[..., 1:7], features)
    logits = guide.infer_objects(guide.model, parts).logits
    named = torch.tensor(object_of)[kinds]
    assert (logits.argmax(-1) == named).float().mean() > 0.95


def test_features_bend_the_constellation_along_the_cluster(scene):
    """The clusters bend along x; so must the votes, when the first number of a feature moves."""
    guide, reads, _, _ = scene
    start_objects(guide, reads, updates=0)
    moved = []
    for code in (-1.0, 0.0, 1.0):
        feature = torch.zeros(2, 4)
        feature[:, 0] = code
        moved.append(guide.model.relation_of(feature).pose)
    mask = guide.model.relation.presence_bias > 0
    step = ((moved[2] - moved[0]) / 2)[mask]
    assert (step[:, 2].abs() > 0.05).all()
    assert (step[:, [0, 1, 3, 4, 5]].abs() < 0.01).all()
    torch.testing.assert_close((moved[2] + moved[0])[mask] / 2, moved[1][mask], rtol=0, atol=0.02)


def test_codes_are_the_posterior_of_a_linear_distribution():
    torch.manual_seed(0)
    loadings = torch.randn(2, 3, 6, 4, dtype=torch.float64)
    variance = torch.rand(2, 3, 6, dtype=torch.float64) + 0.1
    fraction = torch.full((2,), 0.5, dtype=torch.float64)
    mean = torch.randn(2, 3, 6, dtype=torch.float64)
    distribution = FactorAnalyzers(
        fraction, torch.full((2, 3), 0.9), mean, loadings, variance
    ).principal()
    parts = Capsules(torch.ones(5, 3).double(), torch.randn(5, 3, 6, dtype=torch.float64))
    codes = posterior_codes(distribution, parts)
    for kind in range(2):
        slope, noise = (
            distribution.loadings[kind].flatten(0, 1),
            distribution.variance[kind].flatten(),
        )
        evidence = slope @ slope.T + noise.diag()
        away = (parts.pose - mean[kind]).flatten(1)
        torch.testing.assert_close(codes[:, kind], away @ torch.linalg.solve(evidence, slope))


def test_parameters_give_back_their_poses():
    torch.manual_seed(0)
    pose = some_poses(50).double()
    torch.testing.assert_close(poses.from_parameters(to_parameters(pose)), pose)


def test_steps_of_em_keep_their_features(scene):
    guide, reads, _, _ = scene
    routed = guide.with_above(partial(EMConstellations, iterations=2))
    before = routed.infer_objects.feature.clone()
    start_objects(routed, reads, updates=5)
    assert torch.equal(routed.infer_objects.feature, before)


def test_too_few_images_are_refused_and_nothing_is_changed(scene):
    guide, reads, _, _ = scene
    before = guide.model.relation.static.clone()
    with pytest.raises(ValueError, match="reads holds 1 images, but the model has 2 objects"):
        start_objects(guide, reads[:1])
    with pytest.raises(ValueError, match="updates must be at least 0"):
        start_objects(guide, reads, updates=-1)
    assert torch.equal(guide.model.relation.static, before)
