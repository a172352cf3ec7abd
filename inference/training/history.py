"""The record of a training run: its history, its best value and the reason why it stopped."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from torch import Tensor

from capsule_zoo.data.files import write_whole

COLUMNS = ("step", "epoch", "loss", "held_out", "gradient_norm", "lr", "seconds")


def history_of(progress: dict) -> pd.DataFrame:
    """Return the history up to a checkpoint, from its progress; earlier stages come first."""
    _, earlier, seconds = progress["before"]
    own: Tensor = progress["history"].clone()
    own[:, COLUMNS.index("step")] += len(earlier)
    own[:, COLUMNS.index("seconds")] += seconds
    table = pd.DataFrame([*earlier.tolist(), *own.tolist()], columns=list(COLUMNS))
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
        stopped: why the run ended, in words.
    """

    history: pd.DataFrame
    best_loss: float
    best_step: int
    steps: int
    seconds: float
    stopped: str

    @property
    def metrics(self) -> dict[str, float | int | str]:
        """Return everything except the history."""
        numbers = {name: value for name, value in vars(self).items() if name != "history"}
        return {**numbers, "units": "nats per image"}

    def save(self, folder: str | os.PathLike) -> None:
        """Write `history.csv` and `metrics.json` into `folder`, which is created if necessary."""
        folder = Path(folder)
        write_whole(folder / "history.csv", self.history.to_csv(index=False).encode())
        metrics = json.dumps(self.metrics, indent=2) + "\n"
        write_whole(folder / "metrics.json", metrics.encode())
