"""Training on rotated images: every number is measured, and the measures tell parts apart."""

import pytest
import torch

from capsule_zoo.experiments.part_whole import augment as part_whole_augment
from capsule_zoo.experiments.part_whole.augment import count_copies, likeness, parts_kept
from capsule_zoo.experiments.shape_codes.objects import read_at_own_turns, read_kinds
from capsule_zoo.models import Capsules
from capsule_zoo.models.parts import poses
from capsule_zoo.registry import create, small_settings


def test_every_kind_reads_an_image_at_its_own_turn():
    torch.manual_seed(0)
    entry = create("shape-codes", **{**small_settings("shape-codes"), "kinds": 3})
    parts = entry.model.levels[-1].size
    views = torch.randn(4, 5, 1, parts, 7)
    views[..., 0] = (views[..., 0] > 0).float()
    seen = [read_kinds(entry.guide, sets) for sets in views]
    best = torch.stack([each.logits for each in seen]).argmax(0)  # (images, kinds)
    assert len(best.unique()) > 1
    found = read_at_own_turns(entry.guide, views, temperature=2.0)
    for image in range(5):
        turns = best[image].tolist()
        logits = torch.stack([seen[t].logits[image, k] for k, t in enumerate(turns)])
        codes = torch.stack([seen[t].code[image, k] for k, t in enumerate(turns)])
        weight = (logits / 2).softmax(0)
        torch.testing.assert_close(found.codes[image], weight[:, None] * codes)
        torch.testing.assert_close(found.explained[image], logits.logsumexp(0))
    with pytest.raises(ValueError, match="views is empty"):
        read_at_own_turns(entry.guide, [])


@pytest.mark.parametrize("swap, share", [(False, 1.0), (True, 0.0)])
def test_parts_are_kept_unless_they_swap(monkeypatch, swap, share):
    """Two parts follow a quarter turn, as themselves or each as the other."""
    pose = poses.identity_like(torch.zeros(())).repeat(1, 2, 1)
    pose[0, :, 2] = torch.tensor([0.5, -0.5])
    turn = poses.rotation(torch.tensor(torch.pi / 2))
    moved = poses.compose(poses.inverse(turn), pose)
    if swap:
        moved = moved.flip(1)
    found = iter([Capsules(torch.ones(1, 2), pose), Capsules(torch.ones(1, 2), moved)])
    monkeypatch.setattr(part_whole_augment, "infer_parts", lambda guide, images: next(found))
    entry = create("part-whole", **small_settings("part-whole"))
    assert parts_kept(entry, torch.rand(1, 1, 12, 12), 90)[0] == share


def test_a_turned_template_is_a_copy_and_a_ring_is_not():
    y, x = torch.meshgrid(torch.linspace(-1, 1, 11), torch.linspace(-1, 1, 11), indexing="ij")
    bar = torch.exp(-((x / 0.6) ** 2) - (y / 0.2) ** 2)
    ring = torch.exp(-(((x**2 + y**2).sqrt() - 0.6) ** 2) / 0.02)
    alike = likeness(torch.stack([bar, bar.T, ring]))
    assert torch.allclose(alike.diagonal(), torch.ones(3), atol=1e-3)
    assert alike[0, 1] > 0.97 and alike[1, 0] > 0.97
    assert torch.minimum(alike, alike.T)[2, :2].max() < 0.94
    assert count_copies(alike) == 2 and count_copies(alike, least=0.7) == 3
