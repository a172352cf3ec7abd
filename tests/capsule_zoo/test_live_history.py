"""A run can be watched while it trains: history.csv and TensorBoard's events grow with it."""

import pandas as pd
import pytest
from terminal import run, small_words
from test_cli import TRAIN

from capsule_zoo.inference.training import trainer
from capsule_zoo.runs.folder import RunFolder


class Killed(BaseException):
    """Raised while a run writes, as if the machine had been turned off."""


@pytest.fixture
def history_recorder(monkeypatch):
    """Save after every step, and keep what history.csv holds each time; `at` ends the run there."""
    histories, log = [], RunFolder._log

    def look(self, history):
        log(self, history)
        histories.append(pd.read_csv(self.folder / "history.csv"))
        if len(history) == look.at:
            raise Killed

    look.at = None
    monkeypatch.setattr(trainer, "SECONDS_BETWEEN_SAVES", -1)
    monkeypatch.setattr(RunFolder, "_log", look)
    return histories, look


def losses(folder, steps, *more):
    assert run(*TRAIN, "--steps", steps, "--out", folder, *more) == 0
    return pd.read_csv(folder / "history.csv")


@pytest.mark.long
def test_history_grows_with_the_run_and_a_resumed_run_goes_on_with_it(tmp_path, history_recorder):
    histories, look = history_recorder
    whole = losses(tmp_path / "whole", 5)
    assert [len(history) for history in histories] == [1, 2, 3, 4, 5, 5]  # saved at the end as well
    for history in histories[:4]:
        pd.testing.assert_frame_equal(history, whole.iloc[: len(history)])
    histories.clear()
    look.at = 3
    with pytest.raises(Killed):
        run(*TRAIN, "--steps", 5, "--out", tmp_path / "killed")
    look.at = None
    resumed = losses(tmp_path / "killed", 5, "--resume")
    assert [list(history["step"]) for history in histories[-3:-1]] == [
        [1, 2, 3, 4],
        [1, 2, 3, 4, 5],
    ]
    pd.testing.assert_frame_equal(resumed.drop(columns="seconds"), whole.drop(columns="seconds"))


@pytest.mark.long
def test_history_of_a_run_in_stages_counts_all_steps(tmp_path, history_recorder):
    histories, _ = history_recorder
    name = "stacked-capsule-autoencoder"
    entry = ["train", name, *small_words(name), "--data", "digits", "--quiet"]
    assert run(*entry, "--steps", "4", "--batch-size", "8", "--out", tmp_path / "run") == 0
    final = pd.read_csv(tmp_path / "run" / "history.csv")
    assert len(final) >= 4
    for history in (histories[0], histories[len(histories) // 2], histories[-1]):
        assert list(history["step"]) == list(range(1, len(history) + 1))
        assert list(history["loss"]) == list(final["loss"][: len(history)])


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_events_for_tensorboard_hold_the_history(tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    folder = tmp_path / "run"
    losses(folder, 2, "--log", "tensorboard")
    history = losses(folder, 4, "--log", "tensorboard", "--resume")
    accumulator = events.EventAccumulator(str(folder))
    accumulator.Reload()
    scalars = accumulator.Scalars("loss")
    assert [scalar.step for scalar in scalars] == [1, 2, 3, 4]
    assert [scalar.value for scalar in scalars] == pytest.approx(list(history["loss"]))
    assert [scalar.step for scalar in accumulator.Scalars("held_out")] == [2, 4]
