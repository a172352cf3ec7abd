"""The statistical self-check, `capsule-zoo selfcheck`: see `capsule_zoo.selfcheck.checks`.

This file holds the command alone and imports what it needs when it is called.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def command(
    quick: Annotated[bool, typer.Option("--quick", help="Few simulations: seconds.")] = False,
    seed: Annotated[int, typer.Option(help="Of everything that is random.", min=0)] = 0,
    out: Annotated[Path, typer.Option(help="Where the record is written.")] = Path("results"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on the last line.")] = False,
) -> None:
    """Test posteriors, samplers and gradients against known laws; status 1 if an exact one fails.

    \b
    Examples:
      capsule-zoo selfcheck
      capsule-zoo selfcheck --quick --seed 3 --out elsewhere
    """
    from capsule_zoo.runs import plain
    from capsule_zoo.selfcheck.checks import as_dict, run, table, write

    rows, seconds = run(quick, seed, say=lambda name: typer.echo(f"  {name}", err=True))
    typer.echo(table(rows))
    typer.echo(f"written to {write(rows, quick, seed, seconds, out)}")
    if as_json:
        typer.echo(json.dumps(plain(as_dict(rows))))
    raise typer.Exit(int(any(row.failed for row in rows)))
