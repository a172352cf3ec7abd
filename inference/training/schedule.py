"""The length of a run, and the schedule of its learning rate."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from numbers import Real

from capsule_zoo.data.progress import Bar
from capsule_zoo.inference.training.progress import Progress

MANY_MINUTES = 10  # minutes of a run above which there is a warning
FEW_STEPS = 20

# Schedules by name: the factor of the learning rate after a fraction of the run.
SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda fraction: 1.0,
    "cosine": lambda fraction: 0.5 * (1 + math.cos(math.pi * fraction)),
    "linear": lambda fraction: 1 - fraction,
}


@dataclass(frozen=True)
class Budget:
    """The limit of a run: a number of steps, a number of seconds, or whichever comes first.

    Attributes:
        steps: optimizer steps in all, infinite when only time counts.
        seconds: time in all, infinite when only steps count.
        description: the limits in the user's words.
    """

    steps: float
    seconds: float
    description: str

    @classmethod
    def of(
        cls, epochs: int | None, steps: int | None, minutes: float | None, per_epoch: int
    ) -> "Budget":
        """Return a budget; raise ValueError if no limit is given or one is not positive."""
        asked = {"epochs": epochs, "steps": steps, "minutes": minutes}
        limits = {name: limit for name, limit in asked.items() if limit is not None}
        if not limits:
            raise ValueError("give epochs, steps or minutes, to say when training ends")
        for name, limit in limits.items():
            if not isinstance(limit, Real) or not 0 < limit < math.inf:
                raise ValueError(f"{name} must be positive and finite, not {limit!r}")
        most = min(limits.get("steps", math.inf), limits.get("epochs", math.inf) * per_epoch)
        seconds = 60 * limits.get("minutes", math.inf)
        description = " or ".join(f"{limit:g} {name}" for name, limit in limits.items())
        return cls(most, seconds, description)

    def after(self, steps: int, seconds: float) -> "Budget":
        """Return the budget left after some steps and seconds, at least one step and one second."""
        return replace(
            self, steps=max(1, self.steps - steps), seconds=max(1.0, self.seconds - seconds)
        )

    def limits_of_fraction(self, fraction: float) -> dict[str, float]:
        """Return the arguments of `fit` for a fraction of the budget, at least one step."""
        limits: dict[str, float] = {}
        if math.isfinite(self.steps):
            limits["steps"] = max(1, round(fraction * self.steps))
        if math.isfinite(self.seconds):
            limits["minutes"] = fraction * self.seconds / 60
        return limits

    def fraction(self, progress: Progress) -> float:
        """Return the completed fraction of the run; 1 ends it."""
        return max(progress.step / self.steps, progress.seconds / self.seconds)

    def warning(self, progress: Progress) -> str | None:
        """Return a warning if the run takes many minutes, or few steps, at its present pace."""
        pace = progress.pace
        minutes, steps = pace * (self.steps - progress.step) / 60, self.seconds / pace
        if MANY_MINUTES < minutes < math.inf and math.isinf(self.seconds):
            effect = f"{self.description} take about {minutes:.0f} minutes; give fewer, or a time"
        elif steps < FEW_STEPS:
            effect = f"{self.description} allow {steps:.0f} steps; give more, or smaller images"
        else:
            return None
        return f"a step takes {pace:.2g} s, so that {effect}"

    def reason(self) -> str:
        """Return the reason why a run with an exhausted budget stopped."""
        return f"reached {self.description}"

    def bar(self, progress: Progress, enabled: bool) -> Bar:
        """Return a progress bar over steps or, if time is limited, over percents of the run."""
        unit, total = ("steps", self.steps) if self._counts_steps else ("%", 100)
        done = self._done(progress)
        return Bar("training", unit, total, done=done, enabled=enabled, lasting=True)

    def advance(self, bar: Bar, progress: Progress) -> None:
        """Advance the bar to the present state of the run."""
        if bar.is_enabled:
            bar.advance(self._done(progress), progress.summary(steps=not self._counts_steps))

    @property
    def _counts_steps(self) -> bool:
        return math.isinf(self.seconds)

    def _done(self, progress: Progress) -> float:
        return progress.step if self._counts_steps else 100 * self.fraction(progress)
