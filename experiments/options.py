"""The options that every experiment has."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self


@dataclass(frozen=True)
class Options:
    """The options of a run of any experiment.

    Attributes:
        minutes: training time; None for a full run, whose length the experiment knows.
        seed: seed of all random numbers.
        data_root: see `load_dataset`.
        device: where to train.
        run: a run folder, or the name of trained weights, to measure instead of a new training run.
        progress: report every stage and show progress bars, on stderr.
        processes: the number of runs of a study that are trained in parallel; by default as many as
            torch has threads. With 1 they follow each other in this process.
        runs: the folder in which training runs are saved, and from which they go on; None to save
            nothing.
        full: minutes of a full run, which the experiment fills in.

    Raises:
        ValueError: `minutes` or `processes` is not positive.
    """

    minutes: float | None = None
    seed: int = 0
    data_root: str | Path | None = None
    device: str = "cpu"
    run: str | None = None
    progress: bool = True
    processes: int | None = None
    runs: Path | None = None
    full: float | None = None

    def __post_init__(self) -> None:
        if self.minutes is not None and not self.minutes > 0:
            raise ValueError(
                f"minutes must be positive, not {self.minutes!r}; leave it out for a full run"
            )
        if self.processes is not None and self.processes < 1:
            raise ValueError(f"processes must be 1 or more, not {self.processes!r}")

    @property
    def budget(self) -> float:
        """Training time of the whole experiment, in minutes."""
        budget = self.minutes or self.full
        if budget is None:
            raise ValueError("minutes are needed: this function has no full length of its own")
        return budget

    def shorten_steps(self, steps: int) -> int:
        """Scale the steps of a full run to this run's time; at least 2."""
        length = self.budget / (self.full or self.budget)
        return max(2, round(steps * min(length, 1)))

    def limit(self, steps: int) -> dict[str, Any]:
        """Return a training run's limit for `fit`: the given minutes, or else a number of steps."""
        return {"steps": steps} if self.minutes is None else {"minutes": self.minutes}

    def within(self, name: str) -> Self:
        """Return these options with runs in a subfolder of the given name."""
        return replace(self, runs=self.runs and self.runs / name)

    def say(self, message: str) -> None:
        """Print the next stage of the experiment, if progress is shown."""
        if self.progress:
            print(f"== {message}", file=sys.stderr, flush=True)
