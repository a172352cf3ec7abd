"""The experiments on requests: what is requested, and the errors that are measured."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from miniature import few_digits

from capsule_zoo.experiments import Options
from capsule_zoo.experiments.generative_capsnet import beyond_training, bounds
from capsule_zoo.experiments.generative_capsnet.beyond_training import (
    RARE,
    ROTATED,
    SHIFTED,
    Task,
    error_tables,
    errors_of_rare,
    load_on_canvas,
)
from capsule_zoo.experiments.study import Job
from capsule_zoo.records import flatten

OPTIONS = Options(progress=False, processes=1)


@pytest.fixture
def small(monkeypatch):
    """Use few digits."""
    dataset = few_digits(40, 40)
    monkeypatch.setattr(beyond_training, "load_dataset", lambda *args, **kwargs: dataset)
    monkeypatch.setattr(beyond_training, "IMAGES", 2)
    return dataset


def test_the_error_of_an_angle_goes_the_short_way_round(small, monkeypatch):
    angles, estimate = (
        torch.tensor([[-179.0], [10.0], [0.0]]),
        torch.tensor([[178.0], [14.0], [-5.0]]),
    )
    monkeypatch.setattr(bounds, "rotate_and_infer", lambda *arguments: (None, angles, estimate))
    median, _, count = bounds.inferred_angles(None, small, OPTIONS)
    assert (median, count) == (4.0, 3)


def test_inside_is_what_was_asked_for_in_training():
    for line, points in SHIFTED.lines.items():
        inside = SHIFTED.inside(points)
        expected = [-4, -2, 0, 2, 4]
        assert [
            point[0] for point, is_inside in zip(points, inside, strict=True) if is_inside
        ] == expected, line
    beyond = replace(SHIFTED, rare=(-10, 10))  # 10 itself was not asked for
    assert beyond.inside(((10.0, 10.0), (-10.0, -10.0), (8.0, -12.0))).tolist() == [0, 1, 0]
    once = replace(ROTATED, rare=(18, 18))
    assert once.inside(((18.0,), (12.0,), (24.0,))).tolist() == [True, False, False]


def test_rare_classes_are_asked_for_in_their_own_range(small, monkeypatch):
    arguments = {}

    def noted(model, requests, ranges):
        arguments["ranges"] = ranges
        raise InterruptedError

    monkeypatch.setattr(beyond_training, "Requested", noted)
    job = Job("", Task("autoencoder", SHIFTED, steps=2), OPTIONS)
    with pytest.raises(InterruptedError):
        beyond_training.learn(job)
    assert [high for _, high in arguments["ranges"]] == [20, 20, 20, 20, 5, 20, 20, 20, 20, 5]


def test_a_black_image_errs_by_the_ink_that_is_asked_for(small):
    """On a canvas wide enough for every shift, no ink is lost: four times the mean square."""
    data = load_on_canvas(SHIFTED, OPTIONS)
    table = errors_of_rare(None, data, SHIFTED)
    ink = small.test.images[small.test.labels == RARE[0]][:2]
    expected = 4 * ink.square().sum() / (2 * 68 * 68)
    for errors in table.values():
        np.testing.assert_allclose(errors[0], expected, rtol=1e-4)


def flat(tables):
    metrics, _ = flatten(tables)
    return {name: tuple(metric.values()) for name, metric in metrics.items()}


def test_means_ratios_and_errors_by_hand():
    protocol = replace(ROTATED, lines={"circle": ((0.0,), (90.0,), (180.0,))})
    errors = np.array([[[1.0, 4.0, 6.0], [1, 1, 1]], [[2.0, 4.0, 4.0], [1, 1, 1]]])
    blank = {"circle": np.array([[10.0, 20.0, 30.0], [1, 1, 1]])}
    metrics = flat(error_tables({"mine": {"circle": errors}}, blank, protocol, "on"))
    assert metrics["on_mine_digit4_inside"] == (1.5, 0.5, 2)
    assert metrics["on_mine_digit4_outside"] == (4.5, 0.5, 2)
    assert metrics["on_mine_digit4_ratio"] == (3.5, pytest.approx(1.5), 2)  # of 5 and 2
    assert metrics["on_mine_digit4_outside_to_blank"][0] == pytest.approx(4.5 / 25)
    assert metrics["on_blank_digit4_outside"] == (25.0, None, 1)
    once = flat(error_tables({"mine": {"circle": errors[:1]}}, blank, protocol, "on"))
    assert once["on_mine_digit4_outside"] == (5.0, None, 1)
