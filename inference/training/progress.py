"""The progress of a run (steps, time, history, best value), and its record."""

import json
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from capsule_zoo.data.files import write_whole
from capsule_zoo.models.checks import check_one_of

if TYPE_CHECKING:
    import pandas as pd

    from capsule_zoo.inference.training.schedule import Budget

COLUMNS = ("step", "epoch", "loss", "held_out", "gradient_norm", "lr", "seconds")
CLOCKS = {"wall": "monotonic", "processor": "process_time"}
_COUNTS = "step", "best_loss", "best_step", "checks_since_best"  # counters in a checkpoint
_WINDOW = 50  # steps whose mean loss the progress bar shows


def history_of(progress: dict) -> "pd.DataFrame":
    """Return the history of a run from the progress in a checkpoint; earlier stages come first."""
    import pandas as pd  # takes a fifth of a second; `list` and `show` do not need it

    _, earlier, seconds, *_ = progress["before"]
    rows: Tensor = progress["history"].clone()
    rows[:, COLUMNS.index("step")] += len(earlier)
    rows[:, COLUMNS.index("seconds")] += seconds
    table = pd.DataFrame([*earlier.tolist(), *rows.tolist()], columns=list(COLUMNS))
    return table.astype({"step": int, "epoch": int})


@dataclass
class Run:
    """The record of one call of `fit`.

    Attributes:
        history: one row a step: step, epoch, loss and held_out (nats per image; held_out is NaN
            where it was not computed), gradient_norm, lr, seconds since the start.
        best_loss: lowest held-out value, or, without a validation split, the lowest mean training
            loss between two checks; nats per image.
        best_step: the step at which `best_loss` was reached.
        steps: optimizer steps taken, including steps before a resume.
        seconds: time by the `clock` of `Checks`, including time before a resume.
        stopped: the reason why the run ended.
        units: the unit of the losses.
    """

    history: "pd.DataFrame"
    best_loss: float
    best_step: int
    steps: int
    seconds: float
    stopped: str
    units: str = "nats per image"

    def __repr__(self) -> str:
        """Return a one-line summary of the run; the table is `history`."""
        best = f"best loss {self.best_loss:.2f} {self.units} at step {self.best_step}"
        return f"Run({self.steps} steps, {self.seconds:.1f} s, {best}; {self.stopped})"

    @property
    def metrics(self) -> dict[str, float | int | str]:
        """Return all fields of the record except the history."""
        return {name: value for name, value in vars(self).items() if name != "history"}

    def save(self, folder: str | os.PathLike) -> None:
        """Write `history.csv` and `metrics.json` into `folder`, which is created if necessary."""
        folder = Path(folder)
        write_whole(folder / "history.csv", self.history.to_csv(index=False).encode())
        finite_metrics = {
            k: None if value == math.inf else value for k, value in self.metrics.items()
        }
        metrics = (
            json.dumps(finite_metrics, indent=2, allow_nan=False) + "\n"
        )  # inf before the first check
        write_whole(folder / "metrics.json", metrics.encode())


class Before(NamedTuple):
    """The earlier stages of a run; none by default.

    Attributes:
        stage: number of the present stage.
        rows: history of the stages, (steps, columns).
        seconds: time of the stages.
        short: number and steps of each stage that had fewer steps than it needs.
        whole: the length of the whole run, of which messages speak; None without stages.
    """

    stage: int = 0
    rows: Tensor = torch.zeros(0, len(COLUMNS), dtype=torch.float64)
    seconds: float = 0.0
    short: tuple[tuple[int, int], ...] = ()
    whole: "Budget | None" = None


class Progress:
    """The counters of a run, which checkpoints store and restore.

    Attributes:
        before: the earlier stages of the run.
        step: optimizer steps taken.
        best_loss, best_step, checks_since_best: see `Run` and `check`.
    """

    def __init__(self, steps_per_epoch: int, before: Before, clock: str = "wall") -> None:
        check_one_of("clock", clock, tuple(CLOCKS))
        self._now = getattr(time, CLOCKS[clock])
        self.before = before
        self.steps_per_epoch = steps_per_epoch
        self.step = 0
        self.best_loss = math.inf
        self.best_step = 0
        self.checks_since_best = 0
        self._rows: list[list[float]] = []
        self._checked = 0
        self._began = self._now()
        self._ended: float | None = None

    @property
    def seconds(self) -> float:
        """The time of the run in seconds, including time before a resume."""
        return (self._now() if self._ended is None else self._ended) - self._began

    def stop(self) -> None:
        """Stop the clock, so that a checkpoint and the record of the run hold equal times."""
        self._ended = self._now()

    @property
    def pace(self) -> float:
        """The time of the last step in seconds; NaN after fewer than two, or if no time passed."""
        before, last = [row[6] for row in self._rows[-2:]] if len(self._rows) > 1 else (0.0, 0.0)
        return last - before or math.nan

    @property
    def has_unchecked_step(self) -> bool:
        """True if a step was taken since the last check."""
        return self._checked < self.step

    def record(self, loss: float, gradient_norm: float, lr: float) -> None:
        """Record one more step."""
        epoch = self.step // self.steps_per_epoch
        self.step += 1
        row = [self.step, epoch, loss, math.nan, gradient_norm, lr, self.seconds]
        self._rows.append(row)

    def check(self, held_out: float) -> bool:
        """Record a held-out value, and return True if the monitored value is the lowest so far.

        The monitored value is the held-out value or, if that is NaN, the mean training loss since
        the last check.
        """
        recent = [row[2] for row in self._rows[self._checked :]]
        self._rows[-1][3] = held_out
        self._checked = self.step
        watched = sum(recent) / len(recent) if math.isnan(held_out) else held_out
        if watched < self.best_loss:
            self.best_loss = watched
            self.best_step = self.step
            self.checks_since_best = 0
            return True
        self.checks_since_best += 1
        return False

    @property
    def recent_loss(self) -> float:
        """Return the mean training loss of the last steps, in nats per image; NaN at the start."""
        recent = [row[2] for row in self._rows[-_WINDOW:]]
        return sum(recent) / len(recent) if recent else math.nan

    @property
    def latest(self) -> dict[str, Any]:
        """Return the state of the run after its last step, as arguments of `Check`."""
        last = self._rows[-1] if self._rows else [0, 0, math.nan, math.nan]
        numbers = {"step": self.step, "epoch": last[1], "seconds": self.seconds}
        return {**numbers, "loss": self.recent_loss, "held_out": last[3]}

    def summary(self, steps: bool) -> str:
        """Return the text of the progress bar: pace, and losses in nats.

        Args:
            steps: include the number of steps, which a bar over seconds does not show.
        """
        parts = [f"{self.step:,} steps"] * steps
        recent = [row[6] for row in self._rows[-_WINDOW:]]
        if len(recent) > 1 and recent[-1] > recent[0]:
            parts.append(f"{(len(recent) - 1) / (recent[-1] - recent[0]):.3g} steps/s")
        parts.append(f"loss {self.recent_loss:.2f}")
        if self._checked and not math.isnan(held_out := self._rows[self._checked - 1][3]):
            parts.append(f"held-out {held_out:.2f}")
        return ", ".join(parts)

    def run(self, stopped: str) -> Run:
        """Return the record that `fit` returns, of all stages."""
        history, earlier = history_of(self.state_dict()), len(self.before.rows)
        steps, seconds = earlier + self.step, self.before.seconds + self.seconds
        return Run(history, self.best_loss, earlier + self.best_step, steps, seconds, stopped)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for `load_state_dict`; the history is one tensor (steps, columns)."""
        rows = torch.tensor(self._rows, dtype=torch.float64).reshape(-1, len(COLUMNS))
        counts = {name: getattr(self, name) for name in _COUNTS}
        times = {"checked": self._checked, "seconds": self.seconds}
        return {**counts, **times, "history": rows, "before": self.before[:4]}

    def load_state_dict(self, state: dict) -> None:
        """Restore the run of `state_dict`; its clock continues from there."""
        for name in _COUNTS:
            setattr(self, name, state[name])
        self._checked = state["checked"]
        self._rows = state["history"].tolist()
        self.before = Before(*state.get("before", ()))._replace(whole=self.before.whole)
        self._began = self._now() - state["seconds"]
