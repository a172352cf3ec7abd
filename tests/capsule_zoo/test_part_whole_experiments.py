"""Distributions of the part-whole experiments: what is probed, turned and kept."""

import numpy as np
import pyro
import pytest
import torch
from miniature import few_digits

from capsule_zoo.data import Split
from capsule_zoo.experiments.part_whole import augment as part_whole_augment
from capsule_zoo.experiments.part_whole import classification as part_whole
from capsule_zoo.experiments.part_whole.augment import count_copies, likeness, part_consistency
from capsule_zoo.experiments.part_whole.transformations import count_choosing_parts, rotate_to_best
from capsule_zoo.experiments.shape_codes.objects import encode_at_each_rotation, read_kinds
from capsule_zoo.models import Capsules
from capsule_zoo.models.parts import poses
from capsule_zoo.registry import create, small_settings


@pytest.fixture
def small_digits(monkeypatch):
    """Use a few digits for every data set."""
    dataset = few_digits(80, 16)
    monkeypatch.setattr(part_whole, "load_dataset", lambda *args, **kwargs: dataset)


def test_principal_components_are_uncorrelated_and_span_the_images():
    images = torch.randn(
        40, 1, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    scores, whole = (part_whole.principal_components(images, n)(None, images) for n in (4, 32))
    assert scores.shape == (40, 4) and whole.shape == (40, 9)  # 32 of nine pixels
    distribution = np.cov(whole.T)
    assert abs(distribution - np.diag(distribution.diagonal())).max() < 1e-12
    spread = np.cov(images.flatten(1).numpy().T)
    assert np.allclose(distribution.diagonal(), np.linalg.eigvalsh(spread)[::-1])
    assert np.allclose(scores, whole[:, :4])


def test_probes_are_fitted_on_some_training_images_and_on_all(small_digits, monkeypatch):
    asked = []
    monkeypatch.setattr(part_whole, "linear_probe", lambda *args: asked.append(args))
    pyro.set_rng_seed(0)
    entry, data = create("part-whole", objects=3, parts=4), part_whole.load_dataset()
    readers = dict(list(part_whole.READERS.items())[:2])
    probes = part_whole.fit_probes(entry, data, readers, probed=30)
    assert list(probes) == ["probe", "probe_all"]
    assert all(list(row) == ["presence", "presence_pose"] for row in probes.values())
    assert [len(features) for features, *_ in asked] == [30, 80, 30, 80]
    for features, labels, _, test_labels in asked:
        assert torch.equal(labels, data.train.labels[: len(features)])
        assert torch.equal(test_labels, data.test.labels)


def test_drawn_presences_are_binary_and_parts_need_no_object(small_digits):
    pyro.set_rng_seed(0)
    entry, data = create("part-whole", objects=3, parts=4), part_whole.load_dataset()
    drawn, again, other = (
        part_whole.READERS["drawn"](entry.guide, data.test.images, seed=seed) for seed in (0, 0, 1)
    )
    assert set(np.unique(drawn)) == {0.0, 1.0} and drawn.shape == (len(data.test), 3)
    assert (drawn == again).all() and (drawn != other).any()
    fractions = part_whole.READERS["presence"](entry.guide, data.test.images)
    assert ((fractions > 0) & (fractions < 1)).all()
    parts = part_whole.READERS["parts"](entry.guide, data.test.images)
    assert parts.shape == (len(data.test), 4 * (1 + 6))


# Training on rotated images: every number is measured, and the measures tell parts apart


def test_every_kind_reads_an_image_at_its_own_turn():
    torch.manual_seed(0)
    entry = create("shape-codes", **{**small_settings("shape-codes"), "kinds": 3})
    parts = entry.model.levels[-1].size
    views = torch.randn(4, 5, 1, parts, 7)
    views[..., 0] = (views[..., 0] > 0).float()
    proposals = [read_kinds(entry.guide, sets) for sets in views]
    best = torch.stack([proposal.logits for proposal in proposals]).argmax(0)  # (images, kinds)
    assert len(best.unique()) > 1
    encoding = encode_at_each_rotation(entry.guide, views, temperature=2.0)
    for image in range(5):
        rotations = best[image].tolist()
        logits = torch.stack([proposals[t].logits[image, k] for k, t in enumerate(rotations)])
        codes = torch.stack([proposals[t].code[image, k] for k, t in enumerate(rotations)])
        weight = (logits / 2).softmax(0)
        torch.testing.assert_close(encoding.codes[image], weight[:, None] * codes)
        torch.testing.assert_close(encoding.explained[image], logits.logsumexp(0))
    with pytest.raises(ValueError, match="views is empty"):
        encode_at_each_rotation(entry.guide, [])


@pytest.mark.parametrize("swap, fraction", [(False, 1.0), (True, 0.0)])
def test_parts_are_kept_unless_they_swap(monkeypatch, swap, fraction):
    """Two parts follow a 90-degree rotation, as themselves or each as the other."""
    pose = poses.identity_like(torch.zeros(())).repeat(1, 2, 1)
    pose[0, :, 2] = torch.tensor([0.5, -0.5])
    rotation = poses.rotation(torch.tensor(torch.pi / 2))
    moved = poses.compose(poses.inverse(rotation), pose)
    if swap:
        moved = moved.flip(1)
    parts = iter([Capsules(torch.ones(1, 2), pose), Capsules(torch.ones(1, 2), moved)])
    monkeypatch.setattr(part_whole_augment, "infer_parts", lambda guide, images: next(parts))
    entry = create("part-whole", **small_settings("part-whole"))
    assert part_consistency(entry, torch.rand(1, 1, 12, 12), 90)[0] == fraction


def test_a_turned_template_is_a_copy_and_a_ring_is_not():
    y, x = torch.meshgrid(torch.linspace(-1, 1, 11), torch.linspace(-1, 1, 11), indexing="ij")
    bar = torch.exp(-((x / 0.6) ** 2) - (y / 0.2) ** 2)
    ring = torch.exp(-(((x**2 + y**2).sqrt() - 0.6) ** 2) / 0.02)
    alike = likeness(torch.stack([bar, bar.T, ring]))
    assert torch.allclose(alike.diagonal(), torch.ones(3), atol=1e-3)
    assert alike[0, 1] > 0.97 and alike[1, 0] > 0.97
    assert torch.minimum(alike, alike.T)[2, :2].max() < 0.94
    assert count_copies(alike) == 2 and count_copies(alike, least=0.7) == 3


# The experiments on transformed images run in miniature; turning helps where it should


def test_turning_undoes_quarter_turns_up_to_where_the_model_wants_them():
    """Rotated images come out the same however they were held."""
    torch.manual_seed(0)
    entry = create("part-whole", **{**small_settings("part-whole"), "epsilon": 1e-30})
    entry.model.double()
    entry.guide.double()
    images = torch.rand(9, 1, 12, 12, dtype=torch.float64)
    upright_images = []
    for held in (images, images.rot90(1, (2, 3))):
        torch.manual_seed(1)
        upright_images.append(rotate_to_best(entry.guide, Split(held), 16).images)
    torch.testing.assert_close(upright_images[1], upright_images[0])


def test_parts_are_shared_out_among_the_objects_that_they_may_choose():
    torch.manual_seed(0)
    entry = create("part-whole", **small_settings("part-whole"))
    images = torch.rand(3, 1, 12, 12)
    torch.manual_seed(0)
    fractions = count_choosing_parts(entry.guide, images)
    parts = entry.model.levels[-1].size
    assert fractions.shape == (3, entry.model.levels[0].size)
    assert (fractions >= 0).all() and (fractions.sum(1) <= parts).all()
    entry.model.epsilon = 1e9  # every part is the dummy's
    for selection in entry.model.selections:
        selection.epsilon = 1e9
    assert count_choosing_parts(entry.guide, images).sum() < 1e-3
