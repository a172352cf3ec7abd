"""The command `capsule-zoo selfcheck`, which tests the zoo's probabilities by known laws."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from capsule_zoo.cli.options import AsJson, Seed, print_json
from capsule_zoo.records import REPRODUCED


def selfcheck(
    quick: Annotated[bool, typer.Option("--quick", help="Few simulations: seconds.")] = False,
    faults: Annotated[
        bool, typer.Option("--faults", help="Kill training runs and give odd inputs instead.")
    ] = False,
    seed: Seed = 0,
    out: Annotated[Path, typer.Option(help="Where the record is written.")] = REPRODUCED,
    as_json: AsJson = False,
) -> None:
    """Test posteriors, samplers and gradients against known laws.

    The exit status is 1 if an exact one fails. With --faults, training runs are killed at random
    moments and resumed, thousands of damaged or odd inputs are given, checkpoints are written where
    there is no room, and two processes take the steps of one (ten minutes; with --quick fewer of
    all). The exit status is 1 if a run ends elsewhere, an error is unclear, or an earlier
    checkpoint is lost.

    \b
    Examples:
      capsule-zoo selfcheck
      capsule-zoo selfcheck --quick --seed 3 --out elsewhere
      capsule-zoo selfcheck --faults
    """
    if faults:
        raise typer.Exit(_faults(quick, seed, out, as_json))
    from capsule_zoo.selfcheck.checks import as_dict, run, table, write

    rows, seconds = run(quick, seed, say=lambda name: typer.echo(f"  {name}", err=True))
    print(table(rows))
    print(f"written to {write(rows, quick, seed, seconds, out)}")
    print_json(as_json, as_dict(rows))
    raise typer.Exit(int(any(row.failed for row in rows)))


def _faults(quick: bool, seed: int, out: Path, as_json: bool) -> int:
    """Try all faults, print what was found, write the record, and return the exit status."""
    from capsule_zoo.cli.app import main
    from capsule_zoo.selfcheck import faults

    def say(words: str) -> None:
        typer.echo(f"  {words}", err=True)

    found = faults.run(seed, main, say=say, **(faults.QUICK if quick else {}))
    print("\n".join(faults.lines(found)))
    print(f"written to {faults.write(found, quick, seed, out)}")
    print_json(as_json, found.metrics)
    return int(any(counts.bad for counts in found.counts.values()))
