"""The part-whole experiments run from end to end in miniature and name what they promise."""

import math

import numpy as np
import pyro
import pytest
import torch
from miniature import few_digits

from capsule_zoo.experiments.part_whole import classification as part_whole
from capsule_zoo.experiments.part_whole.refine import Race, fastest
from capsule_zoo.registry import create


@pytest.fixture
def small_digits(monkeypatch):
    """Use a few digits for every data set."""
    few = few_digits(80, 16)
    monkeypatch.setattr(part_whole, "load_dataset", lambda *args, **kwargs: few)


def test_principal_components_are_uncorrelated_and_span_the_images():
    images = torch.randn(
        40, 1, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    few, whole = (part_whole.principal_components(images, n)(None, images) for n in (4, 32))
    assert few.shape == (40, 4) and whole.shape == (40, 9)  # 32 of nine pixels
    law = np.cov(whole.T)
    assert abs(law - np.diag(law.diagonal())).max() < 1e-12
    spread = np.cov(images.flatten(1).numpy().T)
    assert np.allclose(law.diagonal(), np.linalg.eigvalsh(spread)[::-1])
    assert np.allclose(few, whole[:, :4])


def test_probes_are_fitted_on_some_training_images_and_on_all(small_digits, monkeypatch):
    asked = []
    monkeypatch.setattr(part_whole, "linear_probe", lambda *args: asked.append(args))
    pyro.set_rng_seed(0)
    entry, data = create("part-whole", objects=3, parts=4), part_whole.load_dataset()
    few = dict(list(part_whole.READERS.items())[:2])
    found = part_whole.fit_probes(entry, data, few, probed=30)
    names = ["probe_presence", "probe_presence_pose"]
    assert list(found) == [name + ending for name in names for ending in ("", "_all")]
    assert [len(features) for features, *_ in asked] == [30, 80, 30, 80]
    for features, labels, _, test_labels in asked:
        assert torch.equal(labels, data.train.labels[: len(features)])
        assert torch.equal(test_labels, data.test.labels)


def test_drawn_presences_are_binary_and_parts_need_no_object(small_digits):
    pyro.set_rng_seed(0)
    entry, data = create("part-whole", objects=3, parts=4), part_whole.load_dataset()
    drawn, again, other = (
        part_whole.READERS["probe_drawn"](entry.guide, data.test.images, seed=seed)
        for seed in (0, 0, 1)
    )
    assert set(np.unique(drawn)) == {0.0, 1.0} and drawn.shape == (len(data.test), 3)
    assert (drawn == again).all() and (drawn != other).any()
    shares = part_whole.READERS["probe_presence"](entry.guide, data.test.images)
    assert ((shares > 0) & (shares < 1)).all()
    parts = part_whole.READERS["probe_parts"](entry.guide, data.test.images)
    assert parts.shape == (len(data.test), 4 * (1 + 6))


def test_a_race_ends_where_the_smoothed_objective_reaches_the_goal():
    climb = Race(torch.arange(101.0), begin=0.0, end=100.0, seconds=50.0, rate=0.1)
    # ten steps have a mean of 60 when the last of them is at 64.5
    assert climb.arrival(60.0) == pytest.approx(50 * 65 / 100)
    assert math.isinf(climb.arrival(1000.0))
    assert climb.arrival(98.0) == 50.0  # the end alone, scored with fresh noise, is above it
    slow, high = climb._replace(seconds=80.0), climb._replace(path=climb.path + 1, end=101.0)
    assert fastest([slow, climb], 60.0) is climb
    assert fastest([climb, high], 1000.0) is high
    assert high.numbers(1000.0)["arrived"][0] == 0 and high.numbers(1000.0)["steps"][0] == 100
    assert climb.numbers(60.0)["steps"][0] == 65
