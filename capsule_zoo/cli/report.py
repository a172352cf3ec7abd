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

    With --json the last line counts the published numbers: all of them, and those that the records
    reach, are near to (within two standard errors), miss, or have not tried.

    \b
    Examples:
      capsule-zoo report --out zoo.html
      capsule-zoo report --json
    """
    from capsule_zoo.report.gallery import count_goals
    from capsule_zoo.report.page import write_page

    print(f"written to {write_page(out, results)}")
    print_json(as_json, count_goals(results) if as_json else {})
