"""The house keeps its order: no circles, imports run down, shared folders hold what is shared."""

import ast
from statistics import median, quantiles

import pytest
from house import ROOT, House, report

# Ceilings, not goals. They rose for scenes, curvature and routings, and by 210 lines for the forms
# of matrix capsules in the article that programs follow, and for a fast ELU. The second rose by
# 306 lines for the search of what makes matrix capsules learn fast, and both by 6 for errors. The
# goals are 36,000 and 44,000 lines, and 20 in the ninth decile.
LINES = 40_644
LINES_WITH_EXPERIMENTS = 50_658
MEDIAN, NINTH_DECILE = 6, 18  # lines of a function without its docstring
ARGUMENTS = 12  # of the constructor of a model
FOLDERS = 5  # of the family that is spread widest
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


def test_the_house_does_not_grow_past_its_ceilings(house):
    assert house.lines("experiments", "benchmarks", "docs") <= LINES
    assert house.lines("benchmarks", "docs") <= LINES_WITH_EXPERIMENTS


def test_functions_stay_short_and_families_together(house):
    assert median(house.function_lines) <= MEDIAN
    assert quantiles(house.function_lines, n=10)[-1] <= NINTH_DECILE
    assert max(map(len, house.families.values())) <= FOLDERS


def test_constructors_of_models_take_few_arguments(house):
    assert house.widest_model[0] <= ARGUMENTS, house.widest_model


def test_the_measurements_are_printed(house):
    assert "circles of files" in report(house)


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
    seen = {"circle": house.circles, "upward": house.upward, "lonely": house.lonely}
    assert seen[broken], seen
