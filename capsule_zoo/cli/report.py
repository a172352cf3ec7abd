"""The command `capsule-zoo report`: the whole zoo on one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from capsule_zoo.records import FOLDER


def report(
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
    results: Annotated[Path, typer.Option(help="Folder of the records.")] = FOLDER,
) -> None:
    """Write one page about the whole zoo: stories, pictures, comparisons, numbers, speeds.

    \b
    Example:
      capsule-zoo report --out zoo.html
    """
    from capsule_zoo.report.page import write_page

    print(f"written to {write_page(out, results)}")
