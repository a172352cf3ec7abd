"""The papers' experiments, each run by `capsule-zoo reproduce <model>/<name>`.

An experiment is a function of `Options` and of its own settings that returns a `Result`. A
decorator registers it, in any module of this package:

    @experiment("part-whole/guides", data="mnist", minutes=30)
    def guides(options: Options, *, images: int = 1000, particles: int = 100) -> Result: ...

`capsule-zoo reproduce part-whole/guides --set images=500` changes a setting, and the record says
which settings were used.
"""

import fnmatch
import json
import pkgutil
import shlex
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, is_dataclass, replace
from functools import cache
from importlib import import_module
from inspect import signature
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pyro

from capsule_zoo._version import __version__
from capsule_zoo.data.registration import modules_outside, refuse_taken
from capsule_zoo.experiments.options import Options as Options
from capsule_zoo.experiments.study import Job as Job
from capsule_zoo.experiments.study import Study as Study
from capsule_zoo.experiments.training import create_untrained as create_untrained
from capsule_zoo.experiments.training import load_or_train as load_or_train
from capsule_zoo.experiments.training import train as train
from capsule_zoo.models.checks import check_known, unknown_name_message
from capsule_zoo.records import (
    REPRODUCED,
    Metrics,
    check_experiment_name,
    flatten,
    plain,
    read_record,
    write_json,
    write_record,
)
from capsule_zoo.registry import Entry, save_entry
from capsule_zoo.runs.folder import is_in_use, read_metrics, refuse_unwritable
from capsule_zoo.settings import Argument, arguments_of, fits, values_of

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


@dataclass
class Result:
    """The results that an experiment returns.

    Attributes:
        metrics: headline numbers by name, and tables of them; see `capsule_zoo.records.Metrics`.
        figures: figures by name.
        table: the comparison to print; None to print the tables of the record.
        entry: the trained entry, which can be kept.
    """

    metrics: Metrics
    figures: "dict[str, Figure]" = field(default_factory=dict)
    table: "pd.DataFrame | None" = None
    entry: Entry | None = None


@dataclass(frozen=True)
class Experiment:
    """A registered experiment; call it with options and with its own settings.

    Attributes:
        name: `<model>/<name>`.
        function: the function that runs it; its keyword arguments are the settings, or the fields
            of a dataclass that it takes after the options.
        data: name of the experiment's data set.
        minutes: training time of a full run; None if it has no fixed length.
        of_runs: whether the experiment can measure `options.run`; others refuse a run.
        defaults: values of settings that replace the defaults of the function or the dataclass.
    """

    name: str
    function: Callable[..., Result]
    data: str
    minutes: float | None = None
    of_runs: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def takes(self) -> type | None:
        """The dataclass of settings that the function takes; None if it takes settings by name."""
        types = [
            parameter.annotation for parameter in signature(self.function).parameters.values()
        ][1:2]
        return next((t for t in types if isinstance(t, type) and is_dataclass(t)), None)

    def __call__(self, options: Options, **settings: object) -> Result:
        """Run the experiment; without `options.runs` its training runs are not kept.

        Raises:
            ValueError: a setting is unknown, or of another type than its default, or a run is given
                to an experiment that measures its own runs.
        """
        self.check(settings)
        if options.run and not self.of_runs:
            raise ValueError(
                "run names what was trained before, but this experiment measures its own training "
                "runs; leave --run out"
            )
        with ExitStack() as stack:
            runs = options.runs or Path(stack.enter_context(TemporaryDirectory()))
            options = replace(options, runs=runs, full=self.minutes)
            pyro.set_rng_seed(options.seed)  # parameters are drawn before anything else is seeded
            settings = {**self.defaults, **settings}
            if self.takes is not None:
                return self.function(options, self.takes(**settings))
            return self.function(options, **settings)

    @property
    def summary(self) -> str:
        """A one-line summary: the first line of the function's docstring."""
        return (self.function.__doc__ or "").strip().partition("\n")[0]

    @property
    def settings(self) -> dict[str, Argument]:
        """The settings by name, with defaults, types and descriptions."""
        arguments = arguments_of(self.takes or self.function)
        return arguments | {n: replace(arguments[n], default=v) for n, v in self.defaults.items()}

    def check(self, settings: Mapping[str, object]) -> None:
        """Raise ValueError unless all settings are known, of the right type, and positive.

        A setting that is a fraction or a rate, not a number of something, may be 0.
        """
        arguments = self.settings
        for name in settings:
            check_known(f"setting of {self.name}", name, arguments)
        values_of(settings, arguments, self.name)
        for name, value in settings.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            if not (value > 0 or (value == 0 and fits(0.5, arguments[name].hint))):
                raise ValueError(f"{name} of {self.name} must be positive, not {value!r}")

    def fill_settings(self, settings: Mapping[str, object]) -> dict[str, object]:
        """Return all settings of a run: given settings, and defaults for the others."""
        return {name: setting.default for name, setting in self.settings.items()} | {**settings}


_Function = Callable[..., Result]
_experiments: dict[str, Experiment] = {}


def experiment(
    name: str, *, data: str | None = None, **details: Any
) -> Callable[[_Function], _Function]:
    """Return a decorator that registers a function as the experiment `<model>/<name>`.

    Args:
        data: the data set's name; by default `<name>`.
        details: further attributes of `Experiment`.
    """
    check_experiment_name(name)
    _, _, short_name = name.partition("/")

    def decorate(function: _Function) -> _Function:
        if modules_outside(function):
            _import_experiments()  # the zoo's own experiments keep their names
        held = _experiments.get(name)
        refuse_taken("an experiment", name, held and held.function, function)
        _experiments[name] = Experiment(name, function, data or short_name, **details)
        return function

    return decorate


def list_experiments(pattern: str = "*") -> list[str]:
    """Return the sorted names of experiments that match a pattern such as `"part-whole/*"`."""
    _import_experiments()
    return sorted(fnmatch.filter(_experiments, pattern))


@cache
def _import_experiments() -> None:
    for module in pkgutil.walk_packages(__path__, f"{__name__}."):
        import_module(module.name)


def find_experiment(name: str) -> Experiment:
    """Return the experiment of a name; raise ValueError with the nearest names if there is none."""
    names = list_experiments()
    if name not in names:
        raise ValueError(
            ". ".join(filter(None, [unknown_name_message("experiment", name, names), not_here()]))
        )
    return _experiments[name]


def not_here() -> str:
    """Return advice on installing the zoo's experiments; "" if they are installed."""
    if any(module.ispkg for module in pkgutil.iter_modules(__path__)):
        return ""
    return (
        "Experiments lie in a checkout of the zoo, not in the wheel: clone its repository and run "
        "`pip install -e .` there"
    )


def reproduce(
    name: str,
    options: Options,
    /,
    *,
    folder: str | Path = REPRODUCED,
    keep: str | Path | None = None,
    **settings: object,
) -> tuple[Result, Path]:
    """Run an experiment and write its record and its figures.

    Training runs are run folders in the folder `<folder>/<name>`, next to the record. If the call
    is interrupted, an equal call goes on from there: it reads the runs that ended, and resumes the
    others. When the record is written, the runs are deleted, or moved to `keep`. The record's
    seconds include this call, and the runs of earlier calls.

    Args:
        folder: folder of the records; `results` replaces the records of a checkout.
        keep: an empty or new folder for the trained entry, as a run folder, and for all runs of a
            study, in its folder `runs`.
        settings: settings of the experiment that replace its defaults.

    Returns:
        The result and the path of the record.

    Raises:
        ValueError: there is no such experiment, setting or device, `keep` is in use, or the folder
            of the runs holds something else.
    """
    from capsule_zoo.inference.training.workers import usable_device

    selected = find_experiment(name)
    selected.check(settings)
    usable_device(options.device)
    if keep is not None and is_in_use(Path(keep)):
        raise ValueError(f"{keep} is in use; choose an empty or a new folder to keep the entry in")
    fill_settings = selected.fill_settings(settings)
    runs, began = Path(folder) / name, time.time()
    refuse_unwritable(runs)
    command = command_of(name, options, settings)
    options.say(f"{name}: {selected.summary}")
    if options.minutes is not None:
        options.say(f"Trained for {options.minutes:g} minutes instead, and then measured")
    before = _begin(runs, name, options, fill_settings, command)
    if before:
        options.say(f"Going on with the runs in {runs}; delete that folder to begin again")
    result = selected(replace(options, runs=runs), **settings)
    metrics, tables = flatten(result.metrics)
    path = write_record(
        name,
        metrics,
        tables=tables,
        command=command,
        settings=fill_settings,
        seed=options.seed,
        data=selected.data,
        seconds=before + time.time() - began,
        figures=result.figures,
        folder=folder,
    )
    if keep is not None:
        _keep(Path(keep), result, selected, options, read_record(name, folder))
        Path(keep).mkdir(parents=True, exist_ok=True)
        shutil.move(runs, Path(keep) / "runs")
    else:
        shutil.rmtree(runs)
    return result, path


def _begin(
    runs: Path, name: str, options: Options, settings: Mapping[str, object], command: str
) -> float:
    """Prepare the folder of an experiment's runs, and return the seconds of earlier calls.

    The seconds include runs that ended, and the training time of runs that did not end.
    """
    option_names = ("minutes", "seed", "run", "device")
    made = {"experiment": name, "version": __version__, "data_root": str(options.data_root)}
    made = plain(
        {**made, **{item: getattr(options, item) for item in option_names}, "settings": settings}
    )
    config = runs / "config.json"
    if not config.is_file() and is_in_use(runs):
        raise ValueError(f"{runs} is in use; choose another folder for the record")
    if {*runs.glob("*")} <= {config}:  # no run was begun, as after a refused command
        write_json(config, {**made, "command": command})
        return 0.0
    before = json.loads(config.read_text())
    if differ := [f"{key}={before.get(key)!r}" for key in made if made[key] != before.get(key)]:
        raise ValueError(
            f"{runs} holds unfinished runs of {name} with {', '.join(differ)}; go on with them by "
            "the same command, delete that folder, or choose another folder for the record"
        )
    ended = {path.parent: read_metrics(path.parent) for path in runs.rglob("metrics.json")}
    spent = {folder: item["seconds"] for folder, item in ended.items() if "seconds" in item}
    histories = [p for p in runs.rglob("history.csv") if spent.keys().isdisjoint(p.parents)]
    trained = sum(float(path.read_text().rsplit(",", 1)[1]) for path in histories)
    outermost = [item for item in spent if spent.keys().isdisjoint(item.parents)]
    return sum(spent[item] for item in outermost) + trained


def _keep(keep: Path, result: Result, selected: Experiment, options: Options, record: dict) -> None:
    """Save the trained entry of a result in a run folder."""
    if result.entry is None:
        options.say(f"{selected.name} has no single entry to keep in {keep}")
        return
    made = {key: record[key] for key in ("command", "versions", "machine", "seconds")}
    save_entry(result.entry, keep, data=selected.data, seed=options.seed, training=made)


def command_of(name: str, options: Options, settings: Mapping[str, object]) -> str:
    """Return the command line that runs an experiment with the given options and settings."""
    modules = modules_outside(find_experiment(name).function)
    imports = "".join(f" --import {module}" for module in modules)
    device = None if options.device == "cpu" else options.device
    minutes = options.minutes and f"{options.minutes:g}"
    option_values = {"minutes": minutes, "seed": options.seed, "run": options.run, "device": device}
    flags = "".join(f" --{flag} {shlex.quote(str(v))}" for flag, v in option_values.items() if v)
    values = {key: v if isinstance(v, str) else json.dumps(v) for key, v in settings.items()}
    overrides = "".join(f" --set {shlex.quote(f'{key}={value}')}" for key, value in values.items())
    return f"capsule-zoo{imports} reproduce {name}{flags}{overrides}"
