"""The command line: `capsule-zoo --help`.

Every command imports what it needs when it is called, so that help and lists come at once. What a
user can fix (a wrong name, absent data or devices, a damaged file, a loss that is not finite, too
little memory) is reported in a line or two, without a traceback, and the status is then 2.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from capsule_zoo.cli.discovery import list_entries, options, show
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
from capsule_zoo.cli.run_commands import (
    compare,
    error_rate,
    evaluate,
    figure,
    log_partition,
    publish,
    sample,
    train,
)
from capsule_zoo.explore.notebook import explore
from capsule_zoo.records import FOLDER
from capsule_zoo.report import report
from capsule_zoo.selfcheck import selfcheck

app = typer.Typer(
    name="capsule-zoo",
    help="Capsule models as joint distributions; routings as guides and objectives over them.",
    epilog="Begin with: capsule-zoo reproduce part-whole/digits",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit; status 2 for what the user can fix."""
    try:
        app(args=arguments)
    except (ValueError, OSError, RuntimeError) as error:
        words = _in_words(error)
        if words is None:
            raise
        print(f"capsule-zoo: {words}", file=sys.stderr)
        sys.exit(2)


def _in_words(error: ValueError | OSError | RuntimeError) -> str | None:
    """Return what to tell the user of an error that the user can fix; None for any other."""
    if isinstance(error, (ValueError, OSError)):
        return str(error)
    from torch import OutOfMemoryError

    from capsule_zoo.inference import NonFiniteLoss

    if isinstance(error, OutOfMemoryError):
        return f"{str(error).partition(chr(10))[0]} Give a lower --batch-size, or smaller sizes."
    return str(error) if isinstance(error, NonFiniteLoss) else None


app.callback(help=app.info.help)(options)
app.command("list")(list_entries)


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
    """Run an experiment; write its record and figures. Without a name, list the experiments.

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
        print_metrics({name: metric[:2] for name, metric in result.metrics.items()})
        print(f"written to {path} and figures beside it")
        found = experiments.as_metrics(result)
    print_json(as_json, found)


COMMANDS: tuple[Callable[..., None], ...] = (  # in the order of the help, after `list`
    show,
    train,
    evaluate,
    error_rate,
    log_partition,
    compare,
    sample,
    figure,
    publish,
    reproduce,
    explore,
    selfcheck,
    report,
)
for command in COMMANDS:
    app.command()(command)
