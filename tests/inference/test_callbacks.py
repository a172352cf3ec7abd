"""Callbacks: their times, their arguments, and the changes that they can and cannot make."""

import signal

import numpy as np
import pytest
import torch
from test_resume import Interrupt
from toys import QUIET, assert_same, dataset, fit, pair, states

from capsule_zoo.inference import Check
from capsule_zoo.inference.training.checkpoint import load_checkpoint


@pytest.fixture
def data():
    return dataset()


def test_a_callback_sees_every_check(data):
    checks: list[Check] = []
    model, guide = pair()
    run = fit(model, guide, data, steps=7, every=3, callbacks=[checks.append], **QUIET)
    assert [check.step for check in checks] == [3, 6, 7]
    assert [check.epoch for check in checks] == [0, 1, 1]
    for check in checks:
        history = run.history.iloc[: check.step]
        assert check.loss == pytest.approx(history["loss"].mean())
        assert check.held_out == history["held_out"].iloc[-1]
        assert check.model is model and check.guide is guide
    seconds = [check.seconds for check in checks]
    assert 0 < seconds[0] < seconds[1] < seconds[2]


def test_after_ctrl_c_the_callback_is_called_once_more(tmp_path, data):
    path, calls = tmp_path / "run.safetensors", []

    def read(check):
        calls.append((check.step, load_checkpoint(path)["progress"]["step"]))
        return True  # has nothing left to stop

    options = {
        "checkpoint": path,
        "callbacks": [read],
        "transform": Interrupt(3, signal.SIGINT),
        **QUIET,
    }
    run = fit(*pair(), data, steps=9, **options)
    assert run.stopped == "interrupted" and calls == [(3, 3)]


@pytest.mark.parametrize(
    ("answer", "stops"),
    [
        (True, True),
        (np.bool_(True), True),
        (False, False),
        (None, False),
        (1, False),
        ("yes", False),
    ],
)
def test_true_alone_stops_the_run_and_says_who_it_was(data, answer, stops):
    others = []

    def good_enough(check):
        return answer if check.step == 4 else None

    callbacks = [good_enough, others.append]
    run = fit(*pair(), data, steps=6, every=2, callbacks=callbacks, **QUIET)
    assert (run.stopped == "stopped by the callback good_enough") == stops
    assert run.steps == (4 if stops else 6) and len(others) == run.steps // 2


def test_a_stopped_run_restores_the_best_state_where_there_is_patience(data):
    def stop(check):
        return check.step == 8

    options = {"every": 2, "patience": 50, "freeze": "guide", **QUIET}
    model, guide = pair()
    run = fit(model, guide, data, steps=90, callbacks=[stop], **options | {"lr": 2.0})
    assert run.best_step < run.steps == 8
    other, other_guide = pair()
    only = {"steps": run.best_step, "freeze": "guide", **QUIET, "lr": 2.0}
    fit(other, other_guide, data, **only)
    assert_same(states(model, guide), states(other, other_guide))


def test_callbacks_do_not_change_the_run(data):
    def meddle(check):
        assert not check.model.training and not check.guide.training
        torch.rand(3)
        check.guide(data.train.images[:2])

    options = {"steps": 8, "every": 2, **QUIET}
    plain, watched = pair(), pair()
    expected = fit(*plain, data, **options)
    run = fit(*watched, data, callbacks=[meddle], **options)
    assert list(run.history["loss"]) == list(expected.history["loss"])
    assert_same(states(*plain), states(*watched))
    assert all(module.training for module in watched)


def test_an_exception_leaves_a_checkpoint_to_go_on_from(tmp_path, data):
    path = tmp_path / "run.safetensors"

    def fail(check):
        if check.step == 4:
            raise OSError("the log is full")

    options = {"every": 2, **QUIET}
    whole, parts = pair(), pair()
    fit(*whole, data, steps=8, **options)
    with pytest.raises(OSError, match="the log is full"):
        fit(*parts, data, steps=8, checkpoint=path, callbacks=[fail], **options)
    fit(*parts, data, steps=8, resume=path, **options)
    assert_same(states(*whole), states(*parts))
