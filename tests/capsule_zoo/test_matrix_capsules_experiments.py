"""The experiments on matrix capsules run in miniature and name what they promise."""

import pytest
import torch
from miniature import few_views

from capsule_zoo.experiments import Job, Options
from capsule_zoo.experiments.matrix_capsules import viewpoints
from capsule_zoo.experiments.matrix_capsules.viewpoints import Trainings, match, novel_values
from capsule_zoo.experiments.zoo.equal_network import Task

QUICK = Options(minutes=0.003, progress=False, processes=1)


NETWORK = dict(features=4, capsules=(2, 2, 2))


def points(*errors):
    return [{"familiar": familiar, "novel": novel} for familiar, novel in errors]


def test_networks_are_matched_where_the_worse_one_is_best():
    paths = {
        "capsules": points((0.5, 0.6), (0.2, 0.3), (0.05, 0.2)),
        "cnn": points((0.4, 0.7), (0.18, 0.5), (0.3, 0.4)),
    }
    found = match(paths)
    assert found["cnn"] == {"familiar": 0.18, "novel": 0.5}
    share = (0.2 - 0.18) / (0.2 - 0.05)
    assert found["capsules"]["familiar"] == pytest.approx(0.18)
    assert found["capsules"]["novel"] == pytest.approx(0.3 + share * (0.2 - 0.3))


def test_a_training_that_begins_below_the_common_error_is_judged_at_its_start():
    paths = {"capsules": points((0.5, 0.6)), "cnn": points((0.1, 0.7), (0.05, 0.5))}
    assert match(paths)["cnn"] == {"familiar": 0.1, "novel": 0.7}


def test_novel_views_are_those_that_are_not_familiar():
    assert novel_values(few_views(), "azimuth") == [3]
    assert novel_values(few_views(), "elevation") == [3]


def test_a_try_is_judged_by_views_that_it_was_not_trained_on(monkeypatch):
    seen, both = {}, (few_views(), few_views())
    monkeypatch.setattr(viewpoints, "load_views", lambda _: both)
    monkeypatch.setattr(viewpoints, "train", lambda e, split, *_, **how: seen.update(how, of=split))
    monkeypatch.setattr(viewpoints, "error_rate", lambda _, __, split: split)
    given = Trainings(size=17, views=5, sizes=NETWORK)
    task = Task("matrix-capsules", "plain", "azimuth", 0.02, 0.1, given, is_try=True)
    judged = viewpoints.learn(Job("", task, QUICK))["validation_error"]
    whole = viewpoints.split_views(task)[0]
    assert len(judged) == 5 and len(seen["of"]) == len(whole) - 5 and seen["lr"] == 0.02
    brightness = [split.images.sum((1, 2, 3)) for split in (judged, seen["of"], whole)]
    torch.testing.assert_close(torch.cat(brightness[:2]).sort()[0], brightness[2].sort()[0])
