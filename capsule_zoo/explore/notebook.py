"""`capsule-zoo explore`: a small notebook that builds the explorer, and a server that shows it."""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from capsule_zoo.cli.options import Data, DataRoot

NEEDED = ("ipywidgets", "anywidget")
SERVERS = ("voila", "jupyterlab")  # the first one that is installed; Voila shows the widgets alone
INSTALL = "pip install 'capsule-zoo[explore]'"


def explore(
    source: Annotated[
        str, typer.Argument(metavar="ENTRY", help="An entry, trained weights, or a run folder.")
    ],
    data: Data = None,
    data_root: DataRoot = None,
    out: Annotated[
        Path | None, typer.Option(help="The notebook.  [default: explore-ENTRY.ipynb]")
    ] = None,
    opened: Annotated[bool, typer.Option("--open/--no-open", help="Show it in a browser.")] = True,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the notebook.")] = False,
) -> None:
    """Move objects and parts by hand and see the image follow; drop an image, see its parse.

    Writes a notebook and opens it with Voila or JupyterLab, whichever is installed.

    \b
    Examples:
      capsule-zoo explore part-whole-mnist
      capsule-zoo explore runs/part-whole-digits-0 --no-open
    """
    from capsule_zoo.data.files import write_whole
    from capsule_zoo.explore.sources import open_source

    path = out or Path(f"explore-{Path(source).resolve().name}.ipynb")
    open_source(source, data, data_root)  # whatever can be mended is told before a browser opens
    cell = _cell(source, data, data_root)
    if path.exists() and not overwrite and _first_cell(path) != cell:
        raise ValueError(
            f"{path} holds something else; replace it by --overwrite, or choose another --out"
        )
    if overwrite or not path.exists():
        write_whole(path, json.dumps(_notebook(cell), indent=1).encode())
    print(f"the notebook is {path}", flush=True)
    server = next(filter(find_spec, SERVERS), None)
    if server is None or not all(map(find_spec, NEEDED)):
        print(f"to see it, install what shows it: {INSTALL}")
    elif opened:
        os.execv(sys.executable, [sys.executable, "-m", server, str(path)])


def _cell(source: str, data: str | None, data_root: Path | None) -> str:
    """The code; paths in it hold from wherever the notebook lies."""
    if (Path(source) / "config.json").is_file():
        source = str(Path(source).resolve())
    kind, _, folder = (data or "").partition(":")
    if kind == "folder":
        data = f"folder:{Path(folder).expanduser().resolve()}"
    given = {"data": data, "data_root": None if data_root is None else str(data_root.resolve())}
    words = [repr(source), *(f"{name}={value!r}" for name, value in given.items() if value)]
    return (
        "# Shift+Enter runs this\n"
        "from capsule_zoo.explore.explorer import Explorer\n"
        "\n"
        f"explorer = Explorer.of({', '.join(words)})\n"
        "explorer"
    )


def _first_cell(path: Path) -> str | None:
    """The code that a notebook begins with, if it is one."""
    try:
        cells = json.loads(path.read_text())["cells"]
        return next("".join(c["source"]) for c in cells if c["cell_type"] == "code")
    except (ValueError, KeyError, TypeError, StopIteration):
        return None


def _notebook(cell: str) -> dict:
    code: dict[str, Any] = {"execution_count": None, "outputs": [], "metadata": {}, "source": cell}
    return {
        "cells": [{"cell_type": "code", "id": "explorer", **code}],
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }
