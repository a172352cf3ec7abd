"""Formatting of numbers for readers, and of the metrics of a record as tables.

Metrics have flat names such as `elbo_normal` and `elbo_delta`. Where these are a quantity and a
variant, so many of the one under so many of the other, they are shown as a table; `as_grids` finds
out by itself.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

FULL_ENOUGH = 0.5  # share of a grid's cells that must be there
RELAXED = "_relaxed"  # variants of another model, whose bounds compare with each other only
_WORDS = {
    "elbo": "ELBO", "iwae": "IWAE", "ess": "ESS", "map": "MAP objective", "cnn": "CNN",
    "vae": "VAE", "rbm": "RBM", "kl": "KL", "ais": "(AIS)", "raise": "(reverse AIS)",
    "fgsm": "FGSM", "em": "EM", "vb": "VB", "mnist": "MNIST", "affnist": "affNIST",
    "cifar10": "CIFAR-10", "neg": "negative", "pareto": "Pareto",
    "autonormal": "AutoNormal", "autodelta": "AutoDelta",
}  # fmt: skip


def in_words(name: str) -> str:
    """Return a metric's name for readers: `iwae_100_low_rank` as "IWAE-100 low rank"."""
    words = re.sub(r"(?<=iwae)_(?=\d)", "-", name).split("_")
    return " ".join(re.sub(r"^[a-z0-9]+", lambda m: _WORDS.get(m[0], m[0]), w) for w in words)


def rounded(value: float, se: float | None = None) -> tuple[str, str]:
    """Round a value and its standard error to two digits of the error; to four without one."""
    if se:
        decimals = 1 - math.floor(math.log10(float(f"{se:.1e}")))
        texts = [f"{round(x, decimals):,.{max(decimals, 0)}f}" for x in (value, se)]
    elif float(value).is_integer() or abs(value) >= 10_000:
        texts = [f"{value:,.0f}", ""]
    else:
        digits = 3 - math.floor(math.log10(float(f"{abs(value):.3e}")))
        texts = [f"{value:,.{max(0, digits)}f}", ""]
    return texts[0].replace("-", "\N{MINUS SIGN}"), texts[1]


def duration(seconds: float) -> str:
    """Return wall time in a suitable unit."""
    for unit, length in (("hours", 3600), ("minutes", 60)):
        if seconds >= 1.5 * length:
            return f"{seconds / length:.{1 if seconds < 10 * length else 0}f} {unit}"
    return f"{seconds:.0f} seconds"


@dataclass(frozen=True)
class Grid:
    """A table of metrics, by quantity and variant.

    Attributes:
        columns, rows: the quantities and the variants.
        names: name of the metric in each cell that is present, by (row, column).
    """

    columns: tuple[str, ...]
    rows: tuple[str, ...]
    names: dict[tuple[str, str], str]

    @property
    def fill(self) -> float:
        """Return the share of the cells that are present."""
        return len(self.names) / (len(self.columns) * len(self.rows))


def as_grids(names: Sequence[str]) -> tuple[list[Grid], list[str]]:
    """Return metrics as grids of at least two rows and columns, and the metrics in no grid.

    Every name is cut in two where the part that it shares with most others ends: its beginning or
    its end, whichever makes the fuller grids. Rows whose numbers do not compare with the others'
    are in a grid of their own.
    """
    options = [_grids(_cut(names, by)) for by in (_beginnings, _ends)]
    grids = max(options, key=lambda found: sum(len(grid.names) * grid.fill for grid in found))
    gathered = {name for grid in grids for name in grid.names.values()}
    return list(_apart(grids)), [name for name in names if name not in gathered]


def _apart(grids: list[Grid]) -> Iterator[Grid]:
    """Yield grids without relaxed variants, each followed by the grid of its relaxed variants."""
    for grid in grids:
        for relaxed in (False, True):
            names = {k: v for k, v in grid.names.items() if k[0].endswith(RELAXED) is relaxed}
            if names:
                columns = tuple(c for c in grid.columns if any(k[1] == c for k in names))
                yield Grid(columns, tuple(dict.fromkeys(row for row, _ in names)), names)


Cut = tuple[str, str]  # quantity, variant


def _beginnings(name: str) -> list[tuple[str, Cut]]:
    return [(quantity, (quantity, variant)) for quantity, variant in _cuts(name)]


def _ends(name: str) -> list[tuple[str, Cut]]:
    return [(variant, (quantity, variant)) for quantity, variant in _cuts(name)]


def _cuts(name: str) -> list[Cut]:
    words = name.split("_")
    return [("_".join(words[:i]), "_".join(words[i:])) for i in range(1, len(words))]


def _cut(names: Sequence[str], parts: Callable[[str], list[tuple[str, Cut]]]) -> dict[str, Cut]:
    """Cut every name that can be cut, at the end of the longest part that most names share."""
    shared = Counter(part for name in names for part, _ in parts(name))
    return {
        name: max(parts(name), key=lambda p: (shared[p[0]], p[0].count("_")))[1]
        for name in names
        if "_" in name
    }


def _grids(cuts: dict[str, Cut]) -> list[Grid]:
    """Return grids of the quantities that have a variant in common."""
    groups: list[dict[str, Cut]] = []
    for name, cut in cuts.items():
        near = [g for g in groups if any(set(cut) & set(c) for c in _sides(g, cut))]
        merged = {k: v for group in near for k, v in group.items()} | {name: cut}
        groups = [group for group in groups if group not in near] + [merged]
    grids = [
        Grid(
            tuple(dict.fromkeys(quantity for quantity, _ in group.values())),
            tuple(dict.fromkeys(variant for _, variant in group.values())),
            {(variant, quantity): name for name, (quantity, variant) in group.items()},
        )
        for group in groups
    ]
    return [
        grid
        for grid in grids
        if min(len(grid.rows), len(grid.columns)) >= 2 and grid.fill >= FULL_ENOUGH
    ]


def _sides(group: dict[str, Cut], cut: Cut) -> list[Cut]:
    """Return the cuts of a group that share a quantity or a variant with this cut."""
    return [other for other in group.values() if other[0] == cut[0] or other[1] == cut[1]]
