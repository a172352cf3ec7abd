"""Every break on purpose still fits the code that it breaks; see `breaks.py`."""

import ast

import pytest
from breaks import BREAKS, PAGE, ROOT, replaced


@pytest.mark.parametrize("broken", BREAKS, ids=lambda broken: broken.name)
def test_a_break_changes_one_place_and_names_tests_that_are_there(broken):
    assert ast.dump(ast.parse(replaced(broken))) != ast.dump(
        ast.parse((ROOT / broken.file).read_text())
    )
    assert (ROOT / "tests" / broken.watch).is_file()


def test_the_page_has_a_row_for_every_break_that_names_a_test():
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")][-len(BREAKS) :]
    for broken, row in zip(BREAKS, rows, strict=True):
        assert row.startswith(f"| {broken.name} | `{broken.file}` | `{broken.watch}`: ")
