"""Every notebook runs from top to bottom in miniature, and is stored with its outputs."""

import re
import sys
from pathlib import Path

import nbformat
import pytest
from IPython.core.interactiveshell import InteractiveShell
from matplotlib import pyplot as plt
from traitlets.config import Config

from capsule_zoo import list_models

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


@pytest.fixture
def shell():
    """Return a new shell in this process: a kernel of its own would import everything again."""
    InteractiveShell.clear_instance()
    main = sys.modules["__main__"]  # which a shell replaces, and which new processes read
    made = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
    yield made
    made.reset()
    InteractiveShell.clear_instance()
    sys.modules["__main__"] = main


@pytest.mark.filterwarnings("default")  # as in a kernel
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path, shell, monkeypatch, request):
    if '"mnist"' in path.read_text().replace("\\", ""):
        request.getfixturevalue("mnist_root")
    monkeypatch.setenv("CAPSULE_ZOO_QUICK", "1")
    monkeypatch.chdir(FOLDER)
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "code":
            shell.run_cell(cell.source).raise_error()
            plt.close("all")  # as the kernel's backend does


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_stored_with_outputs_and_without_errors(path):
    assert path.stat().st_size < 600_000, "store smaller pictures: of 64 colors, or fewer"
    cells = [c for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]
    assert all(cell.execution_count for cell in cells)
    kinds = [output.output_type for cell in cells for output in cell.outputs]
    assert "error" not in kinds and "display_data" in kinds
    assert "site-packages" not in path.read_text()  # a warning, with a folder of somebody's machine


def test_the_first_notebook_lists_all_entries_and_links_all_notebooks():
    cells = nbformat.read(FOLDER / "00_start_here.ipynb", as_version=4).cells
    listed = next(c for c in cells if c.cell_type == "code" and "list_models()}" in c.source)
    table = listed.outputs[0].data["text/plain"]
    assert re.findall(r"^([a-z][\w-]*) ", table, re.MULTILINE) == list_models()
    text = "".join(cell.source for cell in cells if cell.cell_type == "markdown")
    others = {path.name for path in NOTEBOOKS} - {"00_start_here.ipynb"}
    assert set(re.findall(r"\]\((\w+\.ipynb)\)", text)) == others


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_its_links_lead_to_notebooks(path):
    linked = re.findall(r"\((\w+\.ipynb)[)#]", path.read_text())
    assert all((FOLDER / name).is_file() for name in linked)
