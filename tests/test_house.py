"""The house keeps its order: no circles, imports run down, shared folders hold what is shared."""

import ast

import pytest
from house import ROOT, House

# Files of shared folders that one file uses, and why they lie there.
WITH_ONE_USER = {
    "capsule_zoo/runs/cards.py": "a card is made of a run folder; the command only prints it"
}


@pytest.fixture(scope="module")
def house() -> House:
    return House(ROOT)


def test_no_files_import_each_other_in_a_circle(house):
    assert house.circles == []


def test_imports_run_down(house):
    assert len(house.upward) <= 1, house.upward


def test_a_shared_folder_holds_what_two_files_use(house):
    assert set(house.lonely) == set(WITH_ONE_USER)


@pytest.mark.parametrize("broken", ["circle", "upward", "lonely"])
def test_each_fault_is_seen(broken):
    house = House(ROOT)
    files = {"models/base.py": "", "models/networks/layers.py": "", "models/vae.py": ""}
    files["inference/fit.py"] = "from capsule_zoo.models import base"
    if broken == "circle":
        files["models/base.py"] = "import capsule_zoo.models.vae"
        files["models/vae.py"] = "from capsule_zoo.models import base"
    if broken == "upward":
        files["models/base.py"] = "from capsule_zoo.inference.fit import fit"
    if broken == "lonely":
        files["models/vae.py"] = "from capsule_zoo.models.networks.layers import Layer"
    house.__dict__["files"] = {name: ast.parse(text) for name, text in files.items()}
    faults = {"circle": house.circles, "upward": house.upward, "lonely": house.lonely}
    assert faults[broken], faults
