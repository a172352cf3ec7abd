"""Every notebook runs from top to bottom in miniature without data files, and has its outputs."""

import json
import re
import sys
from pathlib import Path

import pytest
from matplotlib import pyplot as plt

from capsule_zoo import list_models

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def cells_of(path: Path, kind: str) -> list[dict]:
    """Return the cells of a kind, "code" or "markdown"; every cell has a name of its own."""
    cells = json.loads(path.read_text())["cells"]
    assert len({cell["id"] for cell in cells}) == len(cells)
    return [cell for cell in cells if cell["cell_type"] == kind]


@pytest.fixture
def shell():
    """Return a new shell in this process: a kernel of its own would import everything again."""
    from IPython.core.interactiveshell import InteractiveShell  # takes a second, and no other test
    from traitlets.config import Config  # needs it

    InteractiveShell.clear_instance()
    main = sys.modules["__main__"]  # which a shell replaces, and which new processes read
    made = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
    yield made
    made.reset()
    InteractiveShell.clear_instance()
    sys.modules["__main__"] = main


@pytest.mark.long
@pytest.mark.filterwarnings("default")  # as in a kernel
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path, shell, monkeypatch, few_climbs, tmp_path):
    monkeypatch.setenv("CAPSULE_ZOO_QUICK", "1")
    monkeypatch.setenv("CAPSULE_ZOO_DATA", str(tmp_path))
    monkeypatch.chdir(FOLDER)
    for cell in cells_of(path, "code"):
        shell.run_cell("".join(cell["source"])).raise_error()
        plt.close("all")  # as the kernel's backend does


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_stored_with_outputs_and_without_errors(path):
    assert path.stat().st_size < 600_000, "store smaller pictures: of 64 colors, or fewer"
    cells = cells_of(path, "code")
    assert all(cell["execution_count"] for cell in cells)
    kinds = [output["output_type"] for cell in cells for output in cell["outputs"]]
    assert "error" not in kinds and "display_data" in kinds
    assert "site-packages" not in path.read_text()  # a warning, with a folder of somebody's machine


def test_the_first_notebook_lists_all_entries_and_links_all_notebooks():
    start = FOLDER / "00_start_here.ipynb"
    listed = next(c for c in cells_of(start, "code") if "list_models()}" in "".join(c["source"]))
    table = "".join(listed["outputs"][0]["data"]["text/plain"])
    assert re.findall(r"^([a-z][\w-]*) ", table, re.MULTILINE) == list_models()
    text = "".join(line for cell in cells_of(start, "markdown") for line in cell["source"])
    others = {path.name for path in NOTEBOOKS} - {"00_start_here.ipynb"}
    assert set(re.findall(r"\]\((\w+\.ipynb)\)", text)) == others


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_its_links_lead_to_notebooks(path):
    linked = re.findall(r"\((\w+\.ipynb)[)#]", path.read_text())
    assert all((FOLDER / name).is_file() for name in linked)
