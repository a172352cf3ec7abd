"""The command `capsule-zoo explore`: write the explorer's notebook and show it in a browser."""

import os
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from capsule_zoo.cli.options import Data, DataRoot, EntryArgument

NEEDED = ("ipywidgets", "anywidget")
# The first one that is installed opens the notebook; Voila shows the widgets alone.
SERVERS = {"voila": "voila", "jupyterlab": "jupyter lab"}
INSTALL = "pip install 'capsule-zoo[explore]'"


def explore(
    source: EntryArgument,
    data: Data = None,
    data_root: DataRoot = None,
    out: Annotated[
        Path | None, typer.Option(help="The notebook.  [default: explore-ENTRY.ipynb]")
    ] = None,
    opened: Annotated[bool, typer.Option("--open/--no-open", help="Show it in a browser.")] = True,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the notebook.")] = False,
) -> None:
    """Open a notebook to move objects and parts by hand and to parse your own images.

    Writes a notebook and opens it with Voila or JupyterLab, whichever is installed. An entry that
    is not trained shows scikit-learn's digits by default.

    \b
    Examples:
      capsule-zoo explore part-whole-mnist
      capsule-zoo explore runs/part-whole-digits-0 --no-open
    """
    from capsule_zoo.data.progress import announce
    from capsule_zoo.explore.notebook import write_notebook

    path = out or Path(f"explore-{Path(source).resolve().name}.ipynb")
    write_notebook(path, source, data, data_root, overwrite)
    print(f"the notebook is {path}", flush=True)
    server = next(filter(find_spec, SERVERS), None)
    if server is None or not all(map(find_spec, NEEDED)):
        print(f"to see it, install what shows it: {INSTALL}")
    elif not opened:
        print(f"open it by: {SERVERS[server]} {shlex.quote(str(path))}")
    else:
        announce("starting the browser; Ctrl-C ends the server")
        os.execv(sys.executable, [sys.executable, "-m", server, str(path)])
