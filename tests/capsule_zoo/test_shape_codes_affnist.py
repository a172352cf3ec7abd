"""Digits under affine maps, read where objects of shifted digits explain their parts best."""

import math

import pyro
import pytest
import torch

from capsule_zoo.data import Split
from capsule_zoo.experiments.shape_codes import affnist as experiment
from capsule_zoo.experiments.shape_codes.affnist import (
    DEGREES,
    SCALE_X,
    SCALE_Y,
    SEARCH,
    center_ink,
    matrices_of,
    moved_digits,
    read_moved,
)
from capsule_zoo.experiments.shape_codes.objects import read_objects
from capsule_zoo.inference.probes import fit_probe
from capsule_zoo.models import Capsules
from capsule_zoo.models.parts.part_sets import as_part_sets
from capsule_zoo.registry import Entry, create, small_settings


def made() -> Entry:
    pyro.set_rng_seed(0)
    entry = create("shape-codes", **small_settings("shape-codes"))
    with torch.no_grad():
        bias = entry.guide.read_parts.pool.read.bias.unflatten(0, (3, -1))
        bias[:, 0] = 9  # every part is present
    return entry


def some_sets(number: int) -> Split:
    generator = torch.Generator().manual_seed(0)
    parts = Capsules(torch.ones(number, 3), torch.randn(number, 3, 6, generator=generator))
    return Split(as_part_sets(parts), torch.arange(number) % 2)


def blobs(number: int) -> Split:
    images = torch.zeros(number, 1, 12, 12)
    for i in range(number):
        images[i, 0, 4:8, 3 + i % 3 : 7] = 1
    return Split(center_ink(images), torch.arange(number) % 2)


def probe_of(entry: Entry) -> object:
    sets = some_sets(60)
    return fit_probe(read_objects(entry.guide, sets.images).features(), sets.labels)


def test_motions_are_affine_maps():
    motions = torch.zeros(2, 4)
    motions[0, DEGREES] = 90
    motions[1, SCALE_X], motions[1, SCALE_Y] = math.log(2), math.log(3)
    rotation, scale = matrices_of(motions)
    torch.testing.assert_close(rotation, torch.tensor([[0.0, 1, 0], [-1, 0, 0]]), atol=1e-6, rtol=0)
    torch.testing.assert_close(scale, torch.tensor([[2.0, 0, 0], [0, 3, 0]]), atol=1e-6, rtol=0)


def test_densities_are_those_in_the_frame_of_the_digit_as_given(monkeypatch):
    """A digit that is grown by a factor s has parts whose three columns of two are s times larger.

    The parser finds the same parts here, whatever it sees, so that only the factor changes.
    """
    entry = made()
    test, probe = blobs(5), probe_of(entry)
    sets = some_sets(5)
    monkeypatch.setattr(experiment, "part_sets", lambda *_: sets)
    motions = torch.zeros(5, 4)
    still = read_moved(entry, probe, test, motions)
    motions[:, SCALE_X] += 0.3
    motions[:, SCALE_Y] += 0.2
    grown = read_moved(entry, probe, test, motions)
    parts, columns = 3, 3
    expected = still.explained + parts * columns * (0.3 + 0.2)
    torch.testing.assert_close(grown.explained, expected)


def test_the_search_keeps_what_explains_best():
    entry = made()
    test, probe = blobs(6), probe_of(entry)
    accuracies, motions = moved_digits(entry, probe, test)
    assert list(accuracies) == ["as they are", *(name for name, *_ in SEARCH)]
    best = read_moved(entry, probe, test, motions)
    for step in range(-20, 21, 10):
        tried = torch.zeros(6, 4)
        tried[:, DEGREES] = step
        assert (best.explained >= read_moved(entry, probe, test, tried).explained - 1e-3).all()
    right = (best.answers == test.labels).double().mean().item()
    assert accuracies["rotated again"][0] == pytest.approx(right)
