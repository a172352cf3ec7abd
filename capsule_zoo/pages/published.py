"""Numbers published in papers, and the numbers of the zoo that are compared with them.

The numbers are data: `results/published.csv` holds a row for each number as printed, with
percentages as fractions. A row says how the numbers are compared. A number can be reached only if
both numbers are measured alike, and if ours has a standard error.
"""

import csv
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from capsule_zoo.pages.markdown import with_error
from capsule_zoo.records import RESULTS, Metric

LIKE = "like for like"
KINDS = (
    LIKE,
    "another model of ours",
    "other features, data, supervision or search",
    "a baseline's own number",
    "read off a plot",
    "a source that could not be opened",
)
STATES = ("reached", "undecided", "missed", "not run", "not counted")
TABLE = "published.csv"


@dataclass(frozen=True)
class Goal:
    """A published number with its source, and the zoo's number.

    Attributes:
        entry: the entry that the number is about.
        record, metric: our record and the metric in it.
        worst: the metric at the other end of a bracket, or "". The worse of the two counts.
        quantity: the measured quantity, with its data.
        printed: the number as printed, with the sign before it if it is a bound.
        printed_se: its standard error; None if the source prints none.
        higher: True if higher is better.
        whose: the system that has the published number.
        source: the publication, with its table, figure or section, or a repository.
        kind: one of `KINDS`.
        note: differences that make the comparison difficult.
        ours: the worse metric of the record, or None before it is measured.
    """

    entry: str
    record: str
    metric: str
    worst: str
    quantity: str
    printed: str
    printed_se: float | None
    higher: bool
    whose: str
    source: str
    kind: str
    note: str
    ours: Metric | None = None

    @property
    def value(self) -> float:
        """The published number as a float, without the sign of a bound."""
        return float(self.printed.lstrip("\N{LESS-THAN OR EQUAL TO} "))

    @property
    def state(self) -> str:
        """Whether our number reaches the published one: one of `STATES`.

        It is "undecided" within two standard errors of both numbers, where both are equal, and
        where ours has no standard error: another seed might then give another answer.
        """
        if self.kind != LIKE:
            return "not counted"
        if self.ours is None:
            return "not run"
        gain = self.ours["value"] - self.value
        gain = gain if self.higher else -gain
        if self.ours["se"] is None:
            return "undecided"
        error = (self.ours["se"] ** 2 + (self.printed_se or 0) ** 2) ** 0.5
        if abs(gain) <= 2 * error:
            return "undecided"
        return "reached" if gain > 0 else "missed"

    def as_dict(self) -> dict[str, object]:
        """Return the row in JSON-compatible types."""
        columns = ("entry", "quantity", "printed", "whose", "source", "kind", "state", "note")
        ours = self.ours or {"value": None, "se": None}
        numbers = {"ours": ours["value"], "se": ours["se"]}
        return {
            **{n: getattr(self, n) for n in columns},
            **numbers,
            "record": f"{self.record}:{self.metric}",
        }


def read_published(folder: Path = RESULTS) -> list[Goal]:
    """Return the published numbers, without ours.

    Raises:
        ValueError: the folder holds no table of them, or one with an unknown kind.
    """
    path = folder / TABLE
    if not path.is_file():
        raise ValueError(f"there is no {TABLE} in {folder}; the zoo's own lies in {RESULTS}")
    with path.open(newline="", encoding="utf-8") as file:
        rows = [_row(**cells) for cells in csv.DictReader(file)]
    for row in rows:
        if row.kind not in KINDS:
            raise ValueError(f"{path}: kind must be one of {', '.join(KINDS)}, not {row.kind!r}")
    return rows


def _row(*, printed_se: str, higher: str, **text_fields: Any) -> Goal:
    error = float(printed_se) if printed_se else None
    return Goal(printed_se=error, higher=higher == "yes", **text_fields)


def goals_of(records: Mapping[str, dict]) -> list[Goal]:
    """Return every published number, with the metric that is compared with it."""
    return [replace(row, ours=our_metric(row, records)) for row in read_published()]


def our_metric(row: Goal, records: Mapping[str, dict]) -> Metric | None:
    """Return our metric for a published number: the worse of two bounds; None if unmeasured."""
    metrics = records.get(row.record, {}).get("metrics", {})
    candidates = [metrics[name] for name in (row.metric, row.worst) if name in metrics]
    return (min if row.higher else max)(
        candidates, key=lambda metric: metric["value"], default=None
    )


def count(goals: Iterable[Goal]) -> dict[str, int]:
    """Count published numbers: all, the ones compared like for like, and by state."""
    goals = list(goals)
    counts = Counter(goal.state for goal in goals)
    alike = sum(goal.kind == LIKE for goal in goals)
    return {"published": len(goals), "like for like": alike, **{s: counts[s] for s in STATES}}


def lines(goals: Iterable[Goal]) -> str:
    """List published numbers and ours in Markdown, entry by entry."""
    result: list[str] = []
    for entry, rows in groupby(goals, key=lambda goal: goal.entry):
        result += ["", f"{entry}:", ""]
        for goal in rows:
            ours = "" if goal.ours is None else f"ours {with_error(goal.ours)}, "
            state = f"not comparable: {goal.kind}" if goal.state == "not counted" else goal.state
            result.append(f"- {goal.quantity}: {ours}published {goal.printed} ({state})")
            result.append("; ".join(filter(None, (f"  {goal.whose} ({goal.source})", goal.note))))
    return "\n".join(result[1:])
