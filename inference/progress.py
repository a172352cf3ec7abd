"""Where a run stands: steps, wall time, history, and the best value so far."""

from __future__ import annotations

import math
import time
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from capsule_zoo.inference.history import COLUMNS, Run

_WINDOW = 50  # steps whose mean loss the progress bar shows


class Progress:
    """The counters of a run, which a checkpoint holds and a resumed run takes up.

    Attributes:
        step: optimizer steps taken.
        best_loss, best_step, checks_since_best: see `Run` and `check`.
    """

    def __init__(self, steps_per_epoch: int) -> None:
        self.steps_per_epoch = steps_per_epoch
        self.step = 0
        self.best_loss = math.inf
        self.best_step = 0
        self.checks_since_best = 0
        self._rows: list[list[float]] = []
        self._checked = 0
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        """Wall time of the run, that before a resume included."""
        return time.monotonic() - self._began

    @property
    def unchecked(self) -> bool:
        """Whether a step was taken since the last check."""
        return self._checked < self.step

    def record(self, loss: float, gradient_norm: float, lr: float) -> None:
        """One more step."""
        epoch = self.step // self.steps_per_epoch
        self.step += 1
        row = [self.step, epoch, loss, math.nan, gradient_norm, lr, self.seconds]
        self._rows.append(row)

    def check(self, held_out: float) -> bool:
        """Note a held-out value; True when the value that is watched is the lowest so far.

        Watched is the held-out value or, where that is NaN, the mean training loss since the last
        check.
        """
        recent = [row[2] for row in self._rows[self._checked :]]
        self._rows[-1][3] = held_out
        self._checked = self.step
        watched = sum(recent) / len(recent) if math.isnan(held_out) else held_out
        if watched < self.best_loss:
            self.best_loss, self.best_step, self.checks_since_best = watched, self.step, 0
            return True
        self.checks_since_best += 1
        return False

    @property
    def recent_loss(self) -> float:
        """Mean training loss of the last steps, in nats per image; NaN before the first step."""
        recent = [row[2] for row in self._rows[-_WINDOW:]]
        return sum(recent) / len(recent) if recent else math.nan

    @property
    def latest(self) -> dict[str, Any]:
        """Where the run stands after its last step, in the words of `Check`."""
        last = self._rows[-1] if self._rows else [0, 0, math.nan, math.nan]
        numbers = {"step": self.step, "epoch": last[1], "seconds": self.seconds}
        return {**numbers, "loss": self.recent_loss, "held_out": last[3]}

    def summary(self) -> dict[str, str]:
        """What the progress bar shows beside the steps, in nats per image."""
        shown = {"loss": f"{self.recent_loss:.2f}"}
        if self._checked and not math.isnan(held_out := self._rows[self._checked - 1][3]):
            shown["held-out"] = f"{held_out:.2f}"
        return shown

    def run(self, stopped: str) -> Run:
        """The record that `fit` returns."""
        history = pd.DataFrame(self._rows, columns=list(COLUMNS))
        history = history.astype({"step": int, "epoch": int})
        return Run(history, self.best_loss, self.best_step, self.step, self.seconds, stopped)

    def state_dict(self) -> dict[str, float | int | Tensor]:
        """Everything that `load_state_dict` needs; the history as one tensor (steps, columns)."""
        rows = torch.tensor(self._rows, dtype=torch.float64).reshape(-1, len(COLUMNS))
        return {
            "step": self.step,
            "best_loss": self.best_loss,
            "best_step": self.best_step,
            "checks_since_best": self.checks_since_best,
            "checked": self._checked,
            "seconds": self.seconds,
            "history": rows,
        }

    def load_state_dict(self, state: dict) -> None:
        """Take up the run where `state_dict` left it; its clock goes on from there."""
        self.step = state["step"]
        self.best_loss = state["best_loss"]
        self.best_step = state["best_step"]
        self.checks_since_best = state["checks_since_best"]
        self._checked = state["checked"]
        self._rows = state["history"].tolist()
        self._began = time.monotonic() - state["seconds"]
