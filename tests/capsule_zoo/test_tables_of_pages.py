"""Contents of pages: rounding, metrics as tables, stories of docstrings."""

import json
import sys
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from capsule_zoo.pages.markdown import fill, grids_of, round_metric, table, verdict
from capsule_zoo.pages.stories import read_story
from capsule_zoo.records import FIELDS, read_record
from capsule_zoo.registry import create, list_models, small_settings

RESULTS = Path(__file__).resolve().parents[2] / "results"


def number(text: str) -> float:
    return float(text.replace(",", "").replace("\N{MINUS SIGN}", "-"))


@pytest.mark.parametrize(
    ("value", "se", "text"),
    [
        (363.0698, 2.7583, ("363.1", "2.8")),
        (0.9572, 0.0020240, ("0.9572", "0.0020")),
        (-86.345, 0.0996, ("\N{MINUS SIGN}86.34", "0.10")),
        (1.0, 0.00998, ("1.000", "0.010")),
        (12345.6, 261.0, ("12,350", "260")),
        (8512.0, None, ("8,512", "")),
        (-12336951034118144.0, None, ("\N{MINUS SIGN}1.23e+16", "")),
        (6.564753, None, ("6.565", "")),
        (0.0, None, ("0", "")),
        (99.99996, None, ("100.0", "")),
        (0.5, 0.0, ("0.5000", "")),
    ],
)
def test_numbers_are_rounded_to_two_digits_of_their_error(value, se, text):
    assert round_metric(value, se) == text


@settings(deadline=None)
@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e5))
def test_rounding_changes_a_number_by_less_than_a_twentieth_of_its_error(value, se):
    estimate, error = map(number, round_metric(value, se))
    assert abs(estimate - value) <= 0.0501 * se + 1e-9 and abs(error - se) <= 0.0501 * se


@pytest.mark.parametrize("columns", [6, 7])
def test_a_table_of_more_than_six_columns_is_transposed(columns):
    metrics = {f"q{i}_{row}": dict(value=i, se=None, n=9) for i in range(columns) for row in "ab"}
    grid = {f"q{i}": {row: f"q{i}_{row}" for row in "ab"} for i in range(columns)}
    made = dict(command="x", data="digits", seed=0, seconds=60, machine="one core")
    lines = table({"metrics": metrics, "tables": {"losses": grid}, **made}).splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines if line[:1] == "|"]
    del cells[1]  # the line below the head
    if columns == 7:
        assert cells[0] == ["losses", "a", "b", "*n*"]
        cells = [list(row) for row in zip(*cells, strict=True)]
    quantities, numbers = ([f(i) for i in range(columns)] for f in ("q{}".format, str))
    assert cells == [
        ["losses", *quantities],
        *([row, *numbers] for row in "ab"),
        ["*n*", *["9"] * columns],
    ]


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*/*.json")), ids=lambda p: p.stem)
def test_every_metric_is_shown_once(path):
    record = read_record(f"{path.parent.name}/{path.stem}", RESULTS)
    grids, rest = grids_of(record)
    gathered = [name for grid in grids for name in grid.names.values()]
    assert sorted(gathered + rest) == sorted(record["metrics"])


@pytest.mark.parametrize("name", list_models())
def test_every_model_has_a_story_with_its_process(name):
    module = type(create(name, **small_settings(name)).model).__module__
    story = read_story(sys.modules[module].__doc__)
    assert story.title and story.subtitle, f"{module} opens with `Name: what it is about.`"
    assert story.references, f"{module} ends its docstring with `References:`"
    lines = f"{story.opening}\n{story.more}".splitlines()
    process = [line for line in lines if line.startswith("    ") and "~" in line]
    ends_in_code = story.opening.splitlines()[-1].startswith("    ")
    assert process and ends_in_code, f"{module} writes `site ~ Distribution(...)`, indented"
    paragraph = story.opening.split("\n\n")[0]
    assert len(paragraph) > 80 and paragraph[0] != " ", f"{module} tells a paragraph before that"


@pytest.mark.parametrize(
    ("ours", "other", "higher", "expected"),
    [
        ((0.9, 0.03), (0.8, 0.04), True, "undecided (2.0 s.e.)"),
        ((0.91, 0.03), (0.8, 0.04), True, "better (2.2 s.e.)"),
        ((0.91, 0.03), (0.8, 0.04), False, "worse (2.2 s.e.)"),
        ((-90.0, 0.5), (-84.0, None), True, "worse (12 s.e.)"),
        ((0.5, None), (0.4, None), True, "undecided (no standard error)"),
        ((0.5, 0.1), (0.5, None), True, "equal"),
    ],
)
def test_a_verdict_counts_the_standard_errors_of_both_numbers(ours, other, higher, expected):
    metrics = [{"value": value, "se": se, "n": 5} for value, se in (ours, other)]
    assert verdict(*metrics, higher) == expected


def test_verdicts_of_a_page_are_filled_in(tmp_path):
    record = {**dict.fromkeys(FIELDS, ""), "metrics": {}}
    for name, value in (("ours", 3.0), ("baseline", 2.0)):
        record["metrics"][name] = {"value": value, "se": 0.3, "n": 5}
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "one.json").write_text(json.dumps(record))
    tag = "<!-- verdict: vae/one ours lower than {} -->{}<!-- end -->"
    for other, expected in (
        ("vae/one baseline", "worse (2.4 s.e.)"),
        ("3.9", "better (3.0 s.e.)"),
        ("3.9±.4", "undecided (1.8 s.e.)"),
    ):
        assert fill(tag.format(other, "old"), tmp_path) == tag.format(other, expected)
    with pytest.raises(ValueError, match="no metric 'none'"):
        fill(tag.format("vae/one none", ""), tmp_path)
