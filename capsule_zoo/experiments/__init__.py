"""The papers' experiments, each run by `capsule-zoo reproduce <model>/<name>`.

An experiment is a function from `Options` to a `Result`. A decorator registers it, in any module of
this package:

    @experiment("part-whole/digits")
    def digits(options: Options) -> Result: ...
"""

from __future__ import annotations

import fnmatch
import pkgutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import pyro

from capsule_zoo.nearest import unknown
from capsule_zoo.records import (
    FOLDER,
    Metrics,
    check_experiment_name,
    flatten,
    read_record,
    write_record,
)

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from capsule_zoo.registry import Entry

ROLES = ("comparison",)


@dataclass(frozen=True)
class Options:
    """What a user may choose of an experiment.

    Attributes:
        minutes: training time; None for a full run, whose length the experiment knows.
        seed: of everything that is random.
        data_root: see `load_dataset`.
        device: where to train.
        run: a run folder, or the name of trained weights, to measure instead of training anew.
        progress: say what is being done and show progress bars, on stderr.

    Raises:
        ValueError: `minutes` is not above 0.
    """

    minutes: float | None = None
    seed: int = 0
    data_root: str | Path | None = None
    device: str = "cpu"
    run: str | None = None
    progress: bool = True

    def __post_init__(self) -> None:
        if self.minutes is not None and not self.minutes > 0:
            raise ValueError(
                f"minutes must be positive, not {self.minutes!r}; leave it out for a full run"
            )

    def say(self, words: str) -> None:
        """Tell the user what comes next."""
        if self.progress:
            print(f"== {words}", file=sys.stderr, flush=True)

    def refuse_run(self) -> None:
        """Raise ValueError if a run is given: the experiment is about trainings of its own."""
        if self.run:
            raise ValueError(
                "run names what was trained before, but this experiment measures its own training "
                "runs; leave --run out"
            )


@dataclass
class Result:
    """What an experiment found.

    Attributes:
        metrics: headline numbers by name, and tables of them; see `capsule_zoo.records.Metrics`.
        figures: by name.
        table: what to print next to the metrics.
        entry: what was trained, for those who want to go on with it.
    """

    metrics: Metrics
    figures: dict[str, Figure] = field(default_factory=dict)
    table: pd.DataFrame | None = None
    entry: Entry | None = None


@dataclass(frozen=True)
class Experiment:
    """A registered experiment: call it with options.

    Attributes:
        name: `<model>/<name>`.
        function: what it does.
        data: name of the data set that it is about.
        about: name of the entry whose family it belongs to.
        role: "comparison" if it compares the model's guides, routings or decoders, and opens the
            model's section of the report.
        lead: name of the figure with which the model's section begins, if it is one of this
            experiment's figures.
    """

    name: str
    function: Callable[[Options], Result]
    data: str
    about: str = ""
    role: str | None = None
    lead: str | None = None

    def __call__(self, options: Options) -> Result:
        pyro.set_rng_seed(options.seed)  # parameters are drawn before anything else is seeded
        return self.function(options)

    @property
    def summary(self) -> str:
        """What it shows, in the first line of its docstring."""
        return (self.function.__doc__ or "").strip().partition("\n")[0]


_Function = Callable[[Options], Result]
_experiments: dict[str, Experiment] = {}


def experiment(
    name: str,
    *,
    data: str | None = None,
    about: str | None = None,
    role: str | None = None,
    lead: str | None = None,
) -> Callable[[_Function], _Function]:
    """Return a decorator that lists a function under `<model>/<name>`.

    Args:
        data: the data set's name; by default `<name>`.
        about: the entry whose family it belongs to; by default `<model>`.
        role, lead: see `Experiment`.

    Raises:
        ValueError: the name is taken, or not of that form, or the role is unknown.
    """
    check_experiment_name(name)
    if role is not None and role not in ROLES:
        raise ValueError(unknown("role", role, ROLES))
    model, _, own = name.partition("/")

    def decorate(function: _Function) -> _Function:
        if name in _experiments:
            raise ValueError(
                f"an experiment named {name!r} is registered already, by "
                f"{_experiments[name].function.__module__}; choose another name"
            )
        _experiments[name] = Experiment(name, function, data or own, about or model, role, lead)
        return function

    return decorate


def list_experiments(pattern: str = "*") -> list[str]:
    """Names of the experiments that match a shell pattern such as `"part-whole/*"`, sorted."""
    for module in pkgutil.iter_modules(__path__):
        import_module(f"{__name__}.{module.name}")
    return sorted(fnmatch.filter(_experiments, pattern))


def find_experiment(name: str) -> Experiment:
    """The experiment of that name.

    Raises:
        ValueError: there is none; names the nearest ones.
    """
    known = list_experiments()
    if name not in known:
        raise ValueError(unknown("experiment", name, known))
    return _experiments[name]


def reproduce(
    name: str, options: Options, *, folder: str | Path = FOLDER, keep: str | Path | None = None
) -> tuple[Result, Path]:
    """Run an experiment and write its record and its figures.

    Args:
        folder: where records lie.
        keep: an empty folder for the trained entry, as a run folder.

    Returns:
        The result and the path of the record.

    Raises:
        ValueError: there is no such experiment or no such device, or `keep` is in use.
    """
    from capsule_zoo.inference.training.workers import usable_device
    from capsule_zoo.registry import save
    from capsule_zoo.runs.folder import in_use

    chosen = find_experiment(name)
    usable_device(options.device)
    if keep is not None and in_use(Path(keep)):
        raise ValueError(f"{keep} is in use; choose an empty or a new folder to keep the entry in")
    began = time.perf_counter()
    result = chosen(options)
    minutes = f" --minutes {options.minutes:g}" if options.minutes else ""
    seed = f" --seed {options.seed}" if options.seed else ""
    run = f" --run {options.run}" if options.run else ""
    metrics, tables = flatten(result.metrics)
    path = write_record(
        name,
        metrics,
        tables=tables,
        command=f"capsule-zoo reproduce {name}{minutes}{seed}{run}",
        seed=options.seed,
        data=chosen.data,
        seconds=time.perf_counter() - began,
        figures=result.figures,
        folder=folder,
    )
    if keep is not None and result.entry is not None:
        record = read_record(name, folder)
        made = {key: record[key] for key in ("command", "versions", "machine", "seconds")}
        save(result.entry, keep, data=chosen.data, seed=options.seed, training=made)
    elif keep is not None:
        options.say(f"{name} has no single entry to keep in {keep}")
    return result, path
