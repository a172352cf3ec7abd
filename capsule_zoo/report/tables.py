"""Formatting of numbers for readers, and of the metrics of a record as grids."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass

_WORDS = {
    "elbo": "ELBO", "iwae": "IWAE", "ess": "ESS", "map": "MAP objective", "cnn": "CNN",
    "vae": "VAE", "rbm": "RBM", "kl": "KL", "ais": "(AIS)", "raise": "(reverse AIS)",
    "fgsm": "FGSM", "em": "EM", "vb": "VB", "mnist": "MNIST", "affnist": "affNIST",
    "cifar10": "CIFAR-10", "neg": "negative", "pareto": "Pareto",
    "autonormal": "AutoNormal", "autodelta": "AutoDelta",
}  # fmt: skip


def in_words(name: str) -> str:
    """Return a metric's name for readers: `iwae_100_low_rank` as "IWAE-100 low rank"."""
    name = re.sub(r"(?<![^_])0_(?=\d)", "0.", name)  # a decimal
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


def seeds(record: dict) -> str:
    """Return from how many seeds a record is: "3 seeds", "one seed", or "seed 0" by default."""
    number = record.get("settings", {}).get("seeds")
    if number is None:
        return f"seed {record['seed']}"
    return "one seed" if number == 1 else f"{number} seeds"


@dataclass(frozen=True)
class Grid:
    """A table of metrics, by quantity and variant.

    Attributes:
        title: the title of the table, or "".
        columns, rows: the quantities and the variants.
        names: name of the metric in each cell that is present, by (row, column).
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    names: dict[tuple[str, str], str]


def grids_of(record: dict, chosen: Collection[str] | None = None) -> tuple[list[Grid], list[str]]:
    """Return the grids of a record, and the names of its metrics in no grid.

    Args:
        chosen: names of the metrics to show; by default all of them. A row or column without any
            of them is left out.
    """
    wanted = list(record["metrics"]) if chosen is None else chosen
    grids = []
    for title, columns in record["tables"].items():
        names = {
            (variant, quantity): name
            for quantity, variants in columns.items()
            for variant, name in variants.items()
            if name in wanted
        }
        if names:
            rows = tuple(dict.fromkeys(row for row, _ in names))
            quantities = tuple(dict.fromkeys(quantity for _, quantity in names))
            grids.append(Grid(title, quantities, rows, names))
    gathered = {name for grid in grids for name in grid.names.values()}
    rest = [name for name in record["metrics"] if name in wanted and name not in gathered]
    return grids, rest
