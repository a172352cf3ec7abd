"""The experiments of stacked capsule autoencoders, shrunk until they take seconds."""

from dataclasses import replace

import pytest
import torch

from capsule_zoo.data import Dataset, Split
from capsule_zoo.experiments.stacked_capsule_autoencoder import clusters as experiments
from capsule_zoo.inference import Checks
from capsule_zoo.inference.training.stages import fit_stages
from capsule_zoo.registry import create, small_settings

NAME = "stacked-capsule-autoencoder"


@pytest.fixture
def entry():
    torch.manual_seed(0)
    return create(NAME, **small_settings(NAME))


def test_explained_shares_are_at_most_one_image_each(entry):
    images = torch.rand(7, 1, 12, 12)
    fractions = experiments.explained_fractions(entry, images, batch_size=3)
    assert fractions.shape == (7, 2)
    assert (fractions >= 0).all() and (fractions.sum(1) <= 1 + 1e-6).all()


def test_explained_shares_have_no_noise(entry):
    images = torch.rand(7, 1, 12, 12)
    first = experiments.explained_fractions(entry, images)
    noisier = replace(entry, guide=entry.guide.with_switches(width=9.0))
    assert (experiments.explained_fractions(noisier, images) == first).all()


@pytest.mark.long
def test_parts_and_objects_are_learned_one_after_the_other_and_then_together(entry):
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(30, 1, 12, 12, generator=generator)
    split = Split(images, torch.arange(30) % 3)
    data = Dataset("noise", split[:20], split[20:25], split[25:], ("a", "b", "c"))
    moved = []
    for stage in entry.stages(entry):
        before = {name: value.clone() for name, value in named(entry).items()}
        fit_stages([stage], data, steps=3, batch_size=10, checks=Checks(progress=False))
        moved.append(
            {name for name, value in named(entry).items() if (value != before[name]).any()}
        )
    parts, objects, together = moved
    lower = {name for name in named(entry) if any(x in name for x in ("template", "read_parts"))}
    assert parts >= lower and not any("relation" in name for name in parts)
    assert not any("infer_objects" in name for name in parts)
    assert not objects & lower
    assert {"relation.static", "infer_objects.read.weight"} <= objects
    assert together >= lower | {"relation.static", "infer_objects.read.weight"}


def named(entry):
    """Return all numbers of the model and the guide by name, without running statistics."""
    return {
        n: p.data for module in (entry.model, entry.guide) for n, p in module.named_parameters()
    }
