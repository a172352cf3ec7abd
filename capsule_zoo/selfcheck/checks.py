"""Registers, runs and reports the checks of the zoo's probabilities.

    sbc_       prior draws have uniform ranks among the draws of their posterior, or follow the
               probabilities that it gives them
    geweke_    samplers leave invariant the distribution that they sample from
    gradient_  the mean of an objective's gradients is the exact gradient

All checks use machines so small that the prior, the evidence and every gradient are known without
the checked code. Exact inference must pass. Approximate inference is checked in the same way and
reported as approximate, so it is expected to fail. A check is a function from the number of
simulations to an `Outcome`, registered by a decorator in a module of this package:

    @check("sbc_exact_switches", of=[ExactSwitches])
    def exact_switches(number: int) -> Outcome: ...

The chance that any exact check fails although the code is correct is at most `ALPHA` (Holm).
"""

from __future__ import annotations

import pkgutil
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pyro
import torch

from capsule_zoo.inference.evaluation.calibration import Outcome, holm
from capsule_zoo.records import REPRODUCED, Metric, write_record

ALPHA = 0.01
NUMBER = {"sbc": (10_000, 2000), "geweke": (10_000, 2000), "gradient": (400, 40)}  # full and quick

_checks: dict[str, Check] = {}


@dataclass(frozen=True)
class Check:
    """A registered check.

    Attributes:
        name: `<kind>_<subject>`; the kinds are the keys of `NUMBER`.
        function: takes the number of simulations and returns the outcome.
        of: the classes whose inference is checked.
        approximate: True if the check is expected to be off.
        share: the fraction of the usual number of simulations that the check uses.
    """

    name: str
    function: Callable[[int], Outcome]
    of: tuple[type, ...]
    approximate: bool
    share: float

    def __call__(self, quick: bool = False, seed: int = 0) -> Outcome:
        """Run the check with its own random draws and restore the global state."""
        full, few = NUMBER[self.name.partition("_")[0]]
        number = round(self.share * full)
        with pyro.get_param_store().scope(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed + zlib.crc32(self.name.encode()))
            return self.function(min(number, few) if quick else number)


@dataclass(frozen=True)
class Row:
    """A row of the report: a check that was run.

    Attributes:
        check: the check.
        outcome: its outcome.
        p: its p-value, corrected for the number of exact or of approximate checks.
    """

    check: Check
    outcome: Outcome
    p: float

    @property
    def failed(self) -> bool:
        """Return True if the check is off and is not expected to be off."""
        return self.p < ALPHA and not self.check.approximate

    @property
    def verdict(self) -> str:
        if self.check.approximate:
            return "off" if self.p < ALPHA else "not seen to be off"
        return "FAILS" if self.failed else "holds"


def check(
    name: str, *, of: Iterable[type], approximate: bool = False, share: float = 1.0, **options: Any
) -> Callable[[Callable[..., Outcome]], Callable[..., Outcome]]:
    """Return a decorator that registers a function of a number of simulations; it may be stacked.

    Args:
        name, of, approximate, share: see `Check`.
        options: passed to the function, so one function can make several checks.
    """

    def decorate(function: Callable[..., Outcome]) -> Callable[..., Outcome]:
        if name in _checks:
            raise ValueError(f"a check named {name!r} is registered already; choose another name")
        _checks[name] = Check(name, partial(function, **options), tuple(of), approximate, share)
        return function

    return decorate


def list_checks() -> list[Check]:
    """Return all checks, the exact ones first."""
    package = import_module("capsule_zoo.selfcheck")
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        import_module(module.name)
    return sorted(_checks.values(), key=lambda c: (c.approximate, c.name))


def run(
    quick: bool = False, seed: int = 0, say: Callable[[str], None] = lambda words: None
) -> tuple[list[Row], float]:
    """Run all checks and correct their p-values; call `say` with the name of each as it begins.

    Returns:
        The rows, and the seconds that they took.
    """
    began, checks, outcomes = time.perf_counter(), list_checks(), []
    for each in checks:
        say(each.name)
        outcomes.append(each(quick, seed))
    return corrected(checks, outcomes), time.perf_counter() - began


def corrected(checks: list[Check], outcomes: list[Outcome]) -> list[Row]:
    """Correct p-values by Holm's method, separately for exact and for approximate checks."""
    rows = []
    for approximate in (False, True):
        family = [
            pair
            for pair in zip(checks, outcomes, strict=True)
            if pair[0].approximate == approximate
        ]
        corrections = holm([outcome.p for _, outcome in family])
        rows += [Row(*pair, p) for pair, p in zip(family, corrections, strict=True)]
    return rows


def table(rows: list[Row]) -> str:
    """Return the rows as text, with the approximate checks in a separate part."""
    line = "{:34}{:>10}{:>7}{:>10}{:>12}  {}".format
    lines = [line("check", "statistic", "n", "p", "corrected p", "verdict")]
    for number, row in enumerate(rows):
        if row.check.approximate and (number == 0 or not rows[number - 1].check.approximate):
            lines.append("approximate, expected to be off:")
        statistic, n, p = row.outcome
        numbers = f"{statistic:.2f}", n, f"{p:.2g}", f"{row.p:.2g}"
        lines.append(line(row.check.name, *numbers, row.verdict))
    return "\n".join(lines)


def metrics(rows: list[Row]) -> dict[str, Metric]:
    """Return the number of checks of either kind that are off, and every corrected p-value."""
    exact = [row for row in rows if not row.check.approximate]
    rest = [row for row in rows if row.check.approximate]
    found = {
        "alpha": Metric(value=ALPHA, se=None, n=1),
        "exact_failed": Metric(value=sum(row.failed for row in exact), se=None, n=len(exact)),
        "approximate_off": Metric(value=sum(r.p < ALPHA for r in rest), se=None, n=len(rest)),
    }
    return found | {row.check.name: Metric(value=row.p, se=None, n=row.outcome.n) for row in rows}


def as_dict(rows: list[Row]) -> dict[str, dict]:
    """Return the rows by name, as values that JSON can hold."""
    return {
        row.check.name: {
            **row.outcome._asdict(),
            "corrected_p": row.p,
            "verdict": row.verdict,
            "approximate": row.check.approximate,
        }
        for row in rows
    }


def write(
    rows: list[Row], quick: bool, seed: int, seconds: float, folder: str | Path = REPRODUCED
) -> Path:
    """Write the record, `selfcheck/full` or `selfcheck/quick`, and return its path."""
    return write_record(
        f"selfcheck/{'quick' if quick else 'full'}",
        metrics(rows),
        command=f"capsule-zoo selfcheck{' --quick' if quick else ''} --seed {seed}",
        seed=seed,
        data="machines small enough to be summed by hand",
        seconds=seconds,
        folder=folder,
    )
