"""Counts of trials that went wrong."""

from __future__ import annotations

from dataclasses import dataclass, field

from capsule_zoo.records import Metric


@dataclass
class Counts:
    """What was tried and what went wrong.

    Attributes:
        tried: number of trials.
        refused: number of trials that ended in an error that a user can fix.
        bad: a line for each trial that went wrong.
    """

    tried: int = 0
    refused: int = 0
    bad: list[str] = field(default_factory=list)

    def metric(self) -> Metric:
        """Return the number of bad trials as a metric."""
        return Metric(value=float(len(self.bad)), se=None, n=self.tried)
