"""The command `capsule-zoo reproduce`: run an experiment and write its record."""

import json
from pathlib import Path
from typing import Annotated

import typer

from capsule_zoo.cli.options import (
    AsJson,
    DataRoot,
    Device,
    Quiet,
    Seed,
    print_json,
    print_list,
    print_metrics,
    read_settings,
)
from capsule_zoo.records import REPRODUCED, read_record


def reproduce(
    experiment: Annotated[
        str | None, typer.Argument(metavar="EXPERIMENT", help="Leave out for a list.")
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Minutes of training.  [default: those of a full run]")
    ] = None,
    seed: Seed = 0,
    data_root: DataRoot = None,
    device: Device = "cpu",
    out: Annotated[Path, typer.Option(help="Folder of the record.")] = REPRODUCED,
    keep: Annotated[
        Path | None, typer.Option(help="Keep the trained entry, and all runs, in this folder.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="A setting, as JSON or none. May be repeated."
        ),
    ] = None,
    settings: Annotated[
        bool, typer.Option("--settings", help="List the settings of the experiment.")
    ] = False,
    run: Annotated[
        str | None, typer.Option(help="Measure this run, or these weights, without training.")
    ] = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Run an experiment and write its record and figures.

    Without a name, the command lists the experiments. The record is EXPERIMENT.json in the folder
    --out, runs/reproduced by default; the records of a checkout, which its pages show, change with
    --out results only. Under each table of a page is the command that makes its numbers again.

    Repeat the command to continue an experiment that was interrupted: its runs are kept in the
    folder EXPERIMENT, next to the record, until the record is written.

    \b
    Examples:
      capsule-zoo reproduce
      capsule-zoo reproduce shape-codes/digits
      capsule-zoo reproduce shape-codes/digits --minutes 1 --seed 3 --out elsewhere
      capsule-zoo reproduce shape-codes/digits --out results
      capsule-zoo reproduce part-whole/guides --settings
      capsule-zoo reproduce part-whole/guides --set images=500 --set particles=50
    """
    if experiment is None:
        print_json(as_json, _list())
        return
    if settings:
        print_json(as_json, _list_settings(experiment))
        return
    from capsule_zoo import experiments
    from capsule_zoo.pages import markdown

    options = experiments.Options(
        minutes=minutes, seed=seed, data_root=data_root, device=device, run=run, progress=not quiet
    )
    overrides = read_settings(set_, experiments.find_experiment(experiment).settings)
    result, path = experiments.reproduce(experiment, options, folder=out, keep=keep, **overrides)
    record, table = read_record(experiment, out), result.table
    print(markdown.table(record) if table is None else table.round(3).to_string(na_rep=""))
    print_metrics(
        {name: (metric["value"], metric["se"]) for name, metric in record["metrics"].items()}
    )
    print(f"written to {path}, with the figures next to it")
    print_json(as_json, record["metrics"])


def _list() -> dict[str, str]:
    """Print all experiments, and return their summaries by name."""
    from capsule_zoo.experiments import find_experiment, list_experiments, not_here

    summaries = {name: find_experiment(name).summary for name in list_experiments()}
    print_list(summaries)
    print(
        not_here() or "\nThe settings of one of them: capsule-zoo reproduce EXPERIMENT --settings"
    )
    return summaries


def _list_settings(name: str) -> dict[str, object]:
    """Print the settings of an experiment and return their default values, by name."""
    from capsule_zoo.experiments import find_experiment

    experiment = find_experiment(name)
    print(experiment.summary)
    for setting in experiment.settings.values():
        print(
            f"\n  --set {setting.name}={json.dumps(setting.default)}\n      {setting.description}"
        )
    if not experiment.settings:
        print("\nIt has no settings for --set; --minutes and --seed are those of every experiment.")
    return experiment.fill_settings({})
