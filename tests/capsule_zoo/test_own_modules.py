"""Modules outside the zoo add entries, guides, data sets and experiments."""

import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from capsule_zoo import create, experiments, register, registry
from capsule_zoo.data import datasets, register_dataset, registration
from capsule_zoo.data.registration import modules_outside
from capsule_zoo.registry import load, register_guide, save_entry, small_settings

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_the_command_line_imports_modules_of_the_current_folder(tmp_path):
    """The module is the one that the page on adding a model shows; a command is a process."""
    page = (ROOT / "docs" / "adding_a_model.md").read_text()
    example = r"with a call and three decorators:\n\n```python\n(.*?)```"
    (code,) = re.findall(example, page, re.DOTALL)
    (tmp_path / "my_module.py").write_text(code)
    commands = {
        "--import my_module train small-vae --data stripes --size 8 --steps 2 --out run --quiet": 0,
        "evaluate run --images 4 --particles 2": 2,
        "reproduce small-vae/stripes --import=my_module": 0,  # behind the command too
    }
    errors = []
    for command, status in commands.items():
        done = subprocess.run(
            [sys.executable, "-m", "capsule_zoo", *command.split()],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == status, done.stderr
        errors.append(done.stderr)
    assert json.loads((tmp_path / "run" / "config.json").read_text())["modules"] == ["my_module"]
    assert "capsule-zoo --import my_module" in errors[1] and len(errors[1].splitlines()) == 1
    record = json.loads((tmp_path / "runs/reproduced/small-vae" / "stripes.json").read_text())
    assert record["command"] == "capsule-zoo --import my_module reproduce small-vae/stripes"


@pytest.mark.parametrize(
    ("code", "name", "message"),
    [
        (None, "no_such_module", "found no module 'no_such_module'"),
        (None, "my_module.py", r"name of a module.*not 'my_module.py'|found no module"),
        (None, "a/b", "takes the name of a module"),
        ("import missing_part", "lacks_a_part", "lacks_a_part failed .*missing_part"),
        ("1 / 0", "divides", "divides failed .ZeroDivisionError.*python -c 'import divides'"),
    ],
)
def test_a_module_that_cannot_be_imported_is_refused(tmp_path, monkeypatch, code, name, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    if code:
        (tmp_path / f"{name}.py").write_text(code)
    with pytest.raises(ValueError, match=message):
        registration.import_by_name(name)


def test_installed_modules_come_before_those_of_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    registration.import_by_name("wave")
    assert sys.path[-1] == os.getcwd()


def test_a_guide_is_added_once_to_an_entry_that_exists(scratch):
    def again(entry):
        return entry.make_guide(entry.default_guide)

    assert register_guide("vae", "again")(again) is again
    assert list(create("vae").guides)[-1] == "again" and create("vae").default_guide != "again"
    for entry, name, message in (
        ("vae", "again", "vae has a guide named 'again' already"),
        ("vae", create("vae").default_guide, "already; choose another name"),
        ("vea", "other", "did you mean 'vae'"),
        ("vae", "Other one", "lower case with hyphens"),
    ):
        with pytest.raises(ValueError, match=message):
            register_guide(entry, name)


def test_weights_with_a_guide_of_another_module_say_which(scratch, tmp_path):
    def again(entry):
        return entry.make_guide(entry.default_guide)

    registry_of_vae = registry.find_registration("vae")
    register_guide("vae", "again")(again)
    entry = create("vae", **small_settings("vae"))
    save_entry(entry, tmp_path / "own")
    assert "modules" not in json.loads((tmp_path / "own" / "config.json").read_text())
    save_entry(entry.use_guide("again"), tmp_path / "run")
    assert load(tmp_path / "run").default_guide == "again"
    registry._registered["vae"] = registry_of_vae
    with pytest.raises(ValueError, match=rf"unknown guide 'again'.*import {__name__}; or capsule-"):
        load(tmp_path / "run")


def test_a_cell_of_a_notebook_may_run_again(scratch):
    def cell():
        """Make one entry, guide, data set and experiment."""

        def made(*arguments):
            return create("vae", **small_settings("vae")).model

        made.__module__ = "__main__"
        exec(  # in the module of a notebook
            'register("of-a-cell", model=made, guides={"first": made})',
            {"__name__": "__main__", "register": register, "made": made},
        )
        register_guide("vae", "of-a-cell")(made)
        register_dataset("of-a-cell")(made)
        experiments.experiment("of-a-cell/first")(made)
        return made

    cell()
    last = cell()
    assert (
        registry.find_registration("of-a-cell").model is create("vae").guides["of-a-cell"] is last
    )
    assert datasets._READERS["of-a-cell"] is last
    assert experiments._experiments["of-a-cell/first"].function is last
    with pytest.raises(ValueError, match="registered already"):
        register("vae", model=last, guides={"first": last})


def test_a_data_set_is_registered_once(scratch):
    @register_dataset("of-a-test")
    def reader(root, size):
        return datasets.digits(size)

    assert "of-a-test" in datasets.dataset_names()
    assert datasets.load_dataset("of-a-test", size=9).image_shape == (1, 9, 9)
    with pytest.raises(ValueError, match=f"registered already, by {__name__}"):
        register_dataset("of-a-test")(reader)
    with pytest.raises(ValueError, match="lower case with hyphens"):
        register_dataset("Of a test")


def test_a_function_with_fixed_arguments_belongs_to_its_own_module():
    assert modules_outside(partial(create, "vae")) == []
    assert modules_outside(partial(partial(json.dumps), indent=2)) == ["json"]
