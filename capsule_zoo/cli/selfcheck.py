"""The command `capsule-zoo selfcheck`, which tests the zoo's probabilities by known laws."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from capsule_zoo.cli.options import AsJson, Seed, print_json
from capsule_zoo.records import FOLDER


def selfcheck(
    quick: Annotated[bool, typer.Option("--quick", help="Few simulations: seconds.")] = False,
    seed: Seed = 0,
    out: Annotated[Path, typer.Option(help="Where the record is written.")] = FOLDER,
    as_json: AsJson = False,
) -> None:
    """Test posteriors, samplers and gradients against known laws.

    The exit status is 1 if an exact one fails.

    \b
    Examples:
      capsule-zoo selfcheck
      capsule-zoo selfcheck --quick --seed 3 --out elsewhere
    """
    from capsule_zoo.selfcheck.checks import as_dict, run, table, write

    rows, seconds = run(quick, seed, say=lambda name: typer.echo(f"  {name}", err=True))
    print(table(rows))
    print(f"written to {write(rows, quick, seed, seconds, out)}")
    print_json(as_json, as_dict(rows))
    raise typer.Exit(int(any(row.failed for row in rows)))
