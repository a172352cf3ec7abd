"""The study of every entry's first minute in miniature, and what its scores mean."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from miniature import few_digits

from capsule_zoo.experiments import Options, reproduce
from capsule_zoo.experiments.common.curves import LONGER, times_of
from capsule_zoo.experiments.study import Study
from capsule_zoo.experiments.zoo import time_to_quality
from capsule_zoo.experiments.zoo.time_to_quality import curve_of, goal_of, relative_error
from capsule_zoo.inference.evaluation.classification import Share
from capsule_zoo.records import read_record
from capsule_zoo.registry import create, small_sizes

OPTIONS = Options(progress=False, processes=1, minutes=0.02)


@pytest.fixture
def small(monkeypatch):
    """Use few digits."""
    few = few_digits(32, 16, size=17)
    monkeypatch.setattr(time_to_quality, "load_dataset", lambda name, root: few)
    return few


def test_times_are_those_of_the_first_errors_below_the_levels():
    quick = [(1.0, 10, 1.2), (2.0, 20, 0.9), (3.0, 30, 0.4), (4.0, 40, 0.6)]
    slow = [(1.0, 9, 1.3), (2.0, 18, 1.0), (4.0, 36, 0.8)]
    found = times_of([quick, slow], {"start": 1.0, "good": 0.5})
    assert found["start_seeds"] == (2, None, 2) and found["good_seeds"] == (1, None, 2)
    assert found["start_seconds"] == (3.0, pytest.approx(1.0), 2)
    assert found["start_updates"] == (28.0, pytest.approx(8.0), 2)
    assert not {"good_seconds", "good_updates"} & set(found)
    assert found["error"][0] == pytest.approx(0.7) and found["updates"][0] == 38


def test_an_entry_that_draws_and_a_classifier_have_goals_of_their_own():
    assert goal_of("vae", small_sizes("vae")) == 0.5
    assert goal_of("cnn", small_sizes("cnn")) == 0.1


def test_a_classifier_has_started_where_it_is_right_more_often_than_not(small, monkeypatch):
    monkeypatch.setattr(time_to_quality, "error_rate", lambda *given: Share(0.4, 0.1, 16))
    assert relative_error(create("cnn", **small_sizes("cnn")), small) == pytest.approx(0.8)


def test_measurements_lie_apart_and_their_time_does_not_count(small, monkeypatch, steady_clock):
    measuring = 0.2

    def slow(entry, data):
        steady_clock.seconds += measuring
        return 1.0

    monkeypatch.setattr(time_to_quality, "relative_error", slow)
    (job,) = Study({"vae": small_sizes("vae")}).jobs(replace(OPTIONS, minutes=0.02))
    times = [seconds for seconds, _, _ in curve_of(job, data="digits", every=1)]
    assert len(times) > 3
    assert all(b >= LONGER * a for a, b in pairwise(times))
    assert times[-1] <= 1.2 + 0.3 - measuring * (len(times) - 1)


def test_the_best_constant_image_scores_one(small, monkeypatch):
    entry = create("vae", **small_sizes("vae"))
    mean = small.train.images.mean(0)
    monkeypatch.setattr(time_to_quality, "infer", lambda guide, images: {})
    painted = mean.expand(len(small.validation), -1, -1, -1)
    monkeypatch.setattr(time_to_quality, "mean_images", lambda *args, **kwargs: painted)
    assert relative_error(entry, small) == pytest.approx(1.0)
    held_out = small.validation.images
    monkeypatch.setattr(time_to_quality, "mean_images", lambda *args, **kwargs: held_out)
    assert relative_error(entry, small) == 0


def test_every_entry_is_timed_and_drawn(small, tmp_path):
    names = ["cnn", "overlapping-capsules", "shape-codes", "rbm"]
    settings = dict(seeds=2, every=1, entries=tuple(names), small=True)
    reproduce("zoo/time-to-quality", OPTIONS, folder=tmp_path, **settings)
    found = read_record("zoo/time-to-quality", tmp_path)["metrics"]
    for name in names:
        own = name.replace("-", "_")
        assert found[f"start_seeds_{own}"]["n"] == found[f"good_seeds_{own}"]["n"] == 2
        reached = found[f"start_seeds_{own}"]["value"] == 2
        assert (f"start_seconds_{own}" in found) == reached
        assert found[f"updates_{own}"]["value"] > 0
    assert torch.isfinite(torch.tensor([metric["value"] for metric in found.values()])).all()
    assert (tmp_path / "zoo/time-to-quality.png").is_file()
