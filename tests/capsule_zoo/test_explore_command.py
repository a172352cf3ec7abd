"""`capsule-zoo explore` writes a notebook that runs, and reports mistakes in one line."""

import json
import os
from pathlib import Path

import pytest
from terminal import run
from test_cli import get_refusal

from capsule_zoo.cli import explore
from capsule_zoo.registry import create, save_entry, small_settings


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Return a run folder of the smallest part-whole entry."""
    monkeypatch.chdir(tmp_path)
    save_entry(
        create("part-whole", **small_settings("part-whole")), tmp_path / "run", data="digits"
    )
    return tmp_path / "run"


@pytest.fixture
def opened(monkeypatch) -> list:
    """Record the command lines that would open the notebook."""
    commands: list = []
    monkeypatch.setattr(os, "execv", lambda path, arguments: commands.append(arguments))
    monkeypatch.setattr(explore, "find_spec", lambda name: True)
    return commands


def code_of(path: Path) -> str:
    import nbformat  # takes two seconds, and no other test needs it

    written = nbformat.read(path, as_version=4)
    nbformat.validate(written)
    return "\n".join(cell.source for cell in written.cells if cell.cell_type == "code")


def test_the_notebook_builds_the_explorer_wherever_it_lies(folder, opened, monkeypatch, tmp_path):
    pytest.importorskip("anywidget")
    assert run("explore", "run", "--no-open", "--out", "elsewhere/mine.ipynb") == 0
    monkeypatch.chdir(tmp_path / "elsewhere")
    namespace: dict = {}
    exec(code_of(tmp_path / "elsewhere" / "mine.ipynb"), namespace)
    assert namespace["explorer"].view.image_shape == (1, 12, 12) and not opened
    assert len(namespace["explorer"].images) == 400


@pytest.mark.parametrize("name", ["letters", "folder:letters"])
def test_a_folder_of_pictures_is_found_wherever_the_notebook_lies(name, folder, opened, tmp_path):
    from PIL import Image

    Path("letters").mkdir()
    for i in range(5):
        Image.linear_gradient("L").rotate(72 * i).resize((12, 12)).save(f"letters/{i}.png")
    assert run("explore", "run", "--no-open", "--data", name) == 0
    assert f"data='folder:{tmp_path / 'letters'}'" in code_of(Path("explore-run.ipynb"))


def test_it_is_opened_by_what_is_installed(folder, opened, monkeypatch, capsys):
    assert run("explore", "run") == 0
    assert opened[-1][1:] == ["-m", "voila", "explore-run.ipynb"]
    monkeypatch.setattr(explore, "find_spec", lambda name: name != "voila")
    assert run("explore", "run") == 0  # the same notebook is no hindrance
    assert opened[-1][1:] == ["-m", "jupyterlab", "explore-run.ipynb"]
    monkeypatch.setattr(explore, "find_spec", lambda name: name == "voila" or None)
    capsys.readouterr()
    assert run("explore", "run") == 0
    assert "pip install 'capsule-zoo[explore]'" in capsys.readouterr().out and len(opened) == 2


def test_another_notebook_is_replaced_only_when_told(folder, opened, capsys):
    path = Path("explore-run.ipynb")
    for content in ("mine", json.dumps({"cells": []})):
        path.write_text(content)
        assert "--overwrite" in get_refusal(capsys, "explore", "run", "--no-open")
        assert path.read_text() == content
    assert run("explore", "run", "--no-open", "--overwrite") == 0
    assert "Explorer.of" in code_of(path)


def test_an_entry_that_was_never_trained_is_shown_as_such(tmp_path, monkeypatch, opened):
    pytest.importorskip("anywidget")
    from capsule_zoo.explore.explorer import Explorer

    panel = Explorer.of("generative-capsnet")
    assert "generative-capsnet, not trained" in panel.children[0].value
    assert panel.view.image_shape == (1, 28, 28)
