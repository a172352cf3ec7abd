"""Writing of the small notebook that opens the explorer."""

import json
from pathlib import Path
from typing import Any

from capsule_zoo.data.datasets import full_name
from capsule_zoo.data.files import write_whole
from capsule_zoo.explore.sources import open_source
from capsule_zoo.registry import WEIGHTS, recipe_path


def write_notebook(
    path: Path, source: str, data: str | None, data_root: Path | None, overwrite: bool
) -> None:
    """Write the explorer's notebook, unless an identical notebook is there.

    Args:
        path: where to write it.
        source: an entry, trained weights, or a run folder.
        data, data_root: see `open_source`.
        overwrite: replace whatever is at `path`.

    Raises:
        ValueError: the source or the data cannot be opened, or `path` holds something else.
    """
    cell = _cell(source, data, data_root)
    code: dict[str, Any] = {"execution_count": None, "outputs": [], "metadata": {}, "source": cell}
    content = {
        "cells": [{"cell_type": "code", "id": "explorer", **code}],
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    if not overwrite and path.exists() and _first_cell(path) != cell:
        raise ValueError(
            f"{path} holds something else; replace it by --overwrite, or choose another --out"
        )
    open_source(source, data, data_root)  # an error is reported here, not in the browser
    if overwrite or not path.exists():
        write_whole(path, json.dumps(content, indent=1).encode())


def _cell(source: str, data: str | None, data_root: Path | None) -> str:
    """Return the code of the notebook's cell, with absolute paths."""
    recipe = recipe_path(source)
    if recipe is not None and recipe.parent != WEIGHTS:
        source = str(Path(source).resolve())
    options = {"data": data and full_name(data), "data_root": data_root and data_root.resolve()}
    texts = [repr(source), *(f"{name}={str(v)!r}" for name, v in options.items() if v)]
    return (
        "# Shift+Enter runs this\n"
        "from capsule_zoo.explore.explorer import Explorer\n"
        "\n"
        f"explorer = Explorer.of({', '.join(texts)})\n"
        "explorer"
    )


def _first_cell(path: Path) -> str | None:
    """Return the code of a notebook's first cell, or None if the file is not a notebook."""
    try:
        cells = json.loads(path.read_text())["cells"]
        return next("".join(c["source"]) for c in cells if c["cell_type"] == "code")
    except (ValueError, KeyError, TypeError, StopIteration):
        return None
