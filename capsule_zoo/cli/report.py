"""The command `capsule-zoo report`: the whole zoo on one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from capsule_zoo.cli.options import AsJson, print_json
from capsule_zoo.records import FOLDER


def report(
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
    results: Annotated[Path, typer.Option(help="Folder of the records.")] = FOLDER,
    as_json: AsJson = False,
) -> None:
    """Write one page about the whole zoo: stories, pictures, comparisons, numbers, speeds.

    With --json the last line counts the published numbers by state; see `capsule-zoo published`.

    \b
    Examples:
      capsule-zoo report --out zoo.html
      capsule-zoo report --json
    """
    from capsule_zoo.report.gallery import read_records
    from capsule_zoo.report.page import write_page
    from capsule_zoo.report.published import count, goals_of

    print(f"written to {write_page(out, results)}")
    print_json(as_json, count(goals_of(read_records(results))) if as_json else {})


def published(
    entry: Annotated[
        str | None, typer.Argument(metavar="ENTRY", help="Leave out for all entries.")
    ] = None,
    results: Annotated[Path, typer.Option(help="Folder of the records.")] = FOLDER,
    as_json: AsJson = False,
) -> None:
    """Print the numbers that papers published, beside ours.

    Only what is compared like for like can be reached. Within two standard errors a number is
    undecided, and of a bracket the worse end counts.

    \b
    Examples:
      capsule-zoo published
      capsule-zoo published shape-codes --json
    """
    from capsule_zoo.nearest import unknown
    from capsule_zoo.report.gallery import read_records
    from capsule_zoo.report.published import count, goals_of, lines

    goals = goals_of(read_records(results))
    known = sorted({goal.published.entry for goal in goals})
    if entry is not None and entry not in known:
        raise ValueError(unknown("entry with published numbers", entry, known))
    chosen = [goal for goal in goals if entry in (None, goal.published.entry)]
    print("\n".join(lines(chosen)))
    print("\n" + ", ".join(f"{number} {what}" for what, number in count(chosen).items()))
    print_json(as_json, [goal.as_dict() for goal in chosen])
