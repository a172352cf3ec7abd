"""A resumed run equals an uninterrupted one, and resumes from its own checkpoint only."""

import os
import signal

import pandas as pd
import pytest
import torch
from toys import QUIET, PointGuide, assert_same, conjugate_images, dataset, fit, pair, states

from capsule_zoo.inference import CheckpointError
from capsule_zoo.inference.training import trainer


def assert_same_history(left, right):
    columns = ["step", "epoch", "loss", "held_out", "gradient_norm", "lr"]
    pd.testing.assert_frame_equal(left[columns], right[columns], check_exact=True)


class Interrupt:
    """A transform that sends a signal, or raises what it is given, at one of its calls."""

    def __init__(self, call, error=None):
        self.calls = 0
        self.signal = error if isinstance(error, signal.Signals) else None
        self.call = call
        self.error = error

    def __call__(self, images, generator=None):
        self.calls += 1
        if self.calls == self.call:
            if self.signal is None:
                raise self.error
            os.kill(os.getpid(), self.signal)
        return (images + 1e-3 * torch.rand(images.shape, generator=generator)).clamp(0, 1)


@pytest.mark.parametrize(
    "error", [signal.SIGINT, signal.SIGTERM, KeyboardInterrupt()], ids=["int", "term", "exception"]
)
@pytest.mark.parametrize("call", [3, 7])
def test_an_interrupted_and_resumed_run_is_the_uninterrupted_run(tmp_path, call, error):
    path = tmp_path / "run.safetensors"
    options = {"steps": 13, "every": 5, "schedule": "cosine", "seed": 4, **QUIET}
    torch.manual_seed(0)
    data = dataset()
    whole = pair()
    expected = fit(*whole, data, transform=Interrupt(0), **options)
    parts = pair()
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    stopped = fit(*parts, data, transform=Interrupt(call, error), checkpoint=path, **options)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert stopped.stopped == "interrupted"
    assert stopped.steps == (call if isinstance(error, signal.Signals) else call - 1)
    again = pair(seed=9)  # other parameters, all of which the checkpoint replaces
    torch.manual_seed(1234)
    resumed = fit(*again, data, transform=Interrupt(0), resume=path, checkpoint=path, **options)
    assert_same(states(*whole), states(*again))
    assert_same_history(expected.history, resumed.history)
    assert (expected.best_loss, expected.best_step) == (resumed.best_loss, resumed.best_step)
    assert resumed.seconds > stopped.seconds


def test_a_run_is_saved_between_checks_and_a_killed_one_goes_on_from_there(tmp_path, monkeypatch):
    path = tmp_path / "run.safetensors"
    options = {"steps": 8, "every": 100, "seed": 4, **QUIET}
    torch.manual_seed(0)
    data = dataset()
    whole, again = pair(), pair(seed=9)
    expected = fit(*whole, data, transform=Interrupt(0), **options)
    for seconds in (300, 0):
        assert not path.exists()  # after a few steps, unless every one of them is saved
        monkeypatch.setattr(trainer, "SECONDS_BETWEEN_SAVES", seconds)
        with pytest.raises(RuntimeError, match="killed"):
            killed = Interrupt(6, RuntimeError("killed"))
            fit(*pair(), data, transform=killed, checkpoint=path, **options)
    resumed = fit(*again, data, transform=Interrupt(0), resume=path, **options)
    assert_same(states(*whole), states(*again))
    assert_same_history(expected.history, resumed.history)


def test_a_finished_run_can_be_prolonged(tmp_path):
    path = tmp_path / "run.safetensors"
    torch.manual_seed(0)
    data = dataset()
    whole, parts = pair(), pair()
    fit(*whole, data, epochs=4, **QUIET)
    fit(*parts, data, epochs=2, checkpoint=path, **QUIET)
    fit(*parts, data, epochs=4, resume=path, **QUIET)
    assert_same(states(*whole), states(*parts))


def test_a_checkpoint_of_another_model_is_refused_with_every_difference(tmp_path):
    path = tmp_path / "run.safetensors"
    model, guide = pair()
    fit(model, guide, conjugate_images(20), steps=1, checkpoint=path, **QUIET)
    before = states(model, guide)
    with pytest.raises(CheckpointError) as caught:
        fit(model, PointGuide(model).double(), conjugate_images(20), steps=2, resume=path, **QUIET)
    assert "another guide" in str(caught.value) and "extra offset" in str(caught.value)
    assert_same(before, states(model, guide))


def test_a_checkpoint_of_a_run_with_other_settings_is_refused(tmp_path):
    path = tmp_path / "run.safetensors"
    model, guide = pair()
    fit(model, guide, conjugate_images(20), steps=1, checkpoint=path, **QUIET)
    with pytest.raises(CheckpointError, match="seed=0, not 5"):
        fit(model, guide, conjugate_images(20), steps=2, seed=5, resume=path, **QUIET)
