"""The command `capsule-zoo reproduce`: run an experiment and write its record."""

from __future__ import annotations

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
)
from capsule_zoo.records import FOLDER, flatten


def reproduce(
    experiment: Annotated[
        str | None, typer.Argument(metavar="EXPERIMENT", help="Leave out for a list.")
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Training time.  [default: a full run]")
    ] = None,
    seed: Seed = 0,
    data_root: DataRoot = None,
    device: Device = "cpu",
    out: Annotated[Path, typer.Option(help="Where records are written.")] = FOLDER,
    keep: Annotated[
        Path | None, typer.Option(help="Keep what was trained in this run folder.")
    ] = None,
    run: Annotated[
        str | None, typer.Option(help="Measure this run, or these weights, without training.")
    ] = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Run an experiment and write its record and figures.

    Without a name, the command lists the experiments.

    \b
    Examples:
      capsule-zoo reproduce
      capsule-zoo reproduce part-whole/digits
      capsule-zoo reproduce part-whole/digits --minutes 1 --seed 3 --out elsewhere
    """
    from capsule_zoo import experiments

    if experiment is None:
        names = experiments.list_experiments()
        found: dict = {name: experiments.find_experiment(name).summary for name in names}
        print_list(found)
    else:
        options = experiments.Options(
            minutes=minutes,
            seed=seed,
            data_root=data_root,
            device=device,
            run=run,
            progress=not quiet,
        )
        result, path = experiments.reproduce(experiment, options, folder=out, keep=keep)
        if result.table is not None:
            print(result.table.round(3).to_string(na_rep=""))
        found, _ = flatten(result.metrics)
        print_metrics({name: (metric["value"], metric["se"]) for name, metric in found.items()})
        print(f"written to {path}, with the figures next to it")
    print_json(as_json, found)
