"""Published numbers: only like with like is reached, and the table names what exists."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
from terminal import run

from capsule_zoo.pages.published import (
    KINDS,
    LIKE,
    RESULTS,
    STATES,
    Goal,
    count,
    goals_of,
    our_metric,
    read_published,
)
from capsule_zoo.records import read_records

ROW = Goal(
    "a", "a/b", "m", "", "share", "0.9", None, True, "them", "Nobody 2020, table 1", LIKE, ""
)
ROWS = read_published()
NAMED = r"table \d|figure \d|section \d|abstract|repository [\w-]+/|equation \d"  # a place


def metric_entry(value: float, se: float | None = 0.01) -> dict:
    return {"value": value, "se": se, "n": 9}


@pytest.mark.parametrize(
    ("value", "higher", "state"),
    [
        (0.93, True, "reached"),
        (0.91, True, "undecided"),
        (0.89, True, "undecided"),
        (0.87, True, "missed"),
        (0.93, False, "missed"),
        (0.87, False, "reached"),
    ],
)
def test_two_standard_errors_decide(value, higher, state):
    assert replace(ROW, higher=higher, ours=metric_entry(value)).state == state


def test_the_error_of_the_source_counts_too():
    assert replace(ROW, printed_se=0.02, ours=metric_entry(0.94)).state == "undecided"
    assert replace(ROW, ours=metric_entry(0.94)).state == "reached"


@pytest.mark.parametrize("printed_se", [None, 0.001])
def test_a_number_of_ours_without_an_error_decides_nothing(printed_se):
    for value in (0.5, 0.9, 1.0):
        row = replace(ROW, printed_se=printed_se, ours=metric_entry(value, None))
        assert row.state == "undecided"


def test_the_same_number_is_not_reached():
    for value, state in ((0.9, "undecided"), (0.91, "reached"), (0.89, "missed")):
        assert replace(ROW, ours=metric_entry(value, 0.0)).state == state


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != LIKE])
def test_only_like_for_like_is_counted(kind):
    assert replace(ROW, kind=kind, ours=metric_entry(2.0)).state == "not counted"
    assert replace(ROW, kind=kind, ours=None).state == "not counted"
    assert replace(ROW, ours=None).state == "not run"


def test_states_but_one_add_up_to_the_rows_that_are_compared_like_for_like():
    counts = count(ROWS)
    assert counts["published"] - counts["not counted"] == counts["like for like"] > 0


@pytest.mark.parametrize(("higher", "worse"), [(True, -5.0), (False, -4.0)])
def test_the_worse_end_of_a_bracket_counts(higher, worse):
    records = {"a/b": {"metrics": {"m": metric_entry(-4.0), "w": metric_entry(-5.0)}}}
    assert our_metric(replace(ROW, worst="w", higher=higher), records)["value"] == worse


def test_the_table_is_sound():
    records = read_records(RESULTS)
    for row in ROWS:
        assert re.search(NAMED, row.source) or "opened" in row.kind, row.source
        assert row.value and row.quantity and row.whose and row.kind in KINDS
        if row.record in records:
            assert {row.metric, row.worst} - {""} <= set(records[row.record]["metrics"]), row
    assert len({(r.record, r.metric, r.whose, r.quantity) for r in ROWS}) == len(ROWS)


def test_the_variant_that_counts_is_the_one_that_validation_prefers():
    """Of the variants of one record, no published row picks the one that is better on test."""
    records, start, checked = read_records(RESULTS), "validation_error_", 0
    for row in ROWS:
        metrics = records.get(row.record, {}).get("metrics", {})
        errors = {n.removeprefix(start): metrics[n]["value"] for n in metrics if start in n}
        if errors:
            assert row.metric == f"test_error_{min(errors, key=lambda name: errors[name])}"
            checked += 1
    assert checked


@pytest.mark.parametrize(
    ("system", "kind", "entry"),
    [
        ("stacked capsule autoencoder", "another model of ours", "stacked-capsule-autoencoder"),
        ("sparse unsupervised capsules", "another model of ours", ""),
        ("CapsNet", "another model of ours", "capsule-network"),
        ("Efficient-CapsNet", "another model of ours", ""),
        ("DRAW", "another model of ours", ""),
        ("RBM", "another model of ours", ""),
        ("deep Boltzmann machine", "another model of ours", ""),
        ("autoencoder", "a baseline's own number", "capsule-helmholtz"),
        ("convolutional network", "a baseline's own number", ""),
        ("RANSAC", "a baseline's own number", ""),
    ],
)
def test_a_system_is_of_one_kind_in_every_row(system, kind, entry):
    """But for the entry that is the same model, and one whose data decide."""
    kinds = {row.kind for row in ROWS if row.whose.startswith(system) and row.entry != entry}
    assert kinds == {kind}


def test_an_unknown_kind_is_refused(tmp_path):
    text = (RESULTS / "published.csv").read_text().replace(LIKE, "alike", 1)
    (tmp_path / "published.csv").write_text(text)
    with pytest.raises(ValueError, match=r"kind must be one of .* not 'alike'"):
        read_published(tmp_path)


def test_without_the_table_the_message_says_where_it_lies(tmp_path):
    with pytest.raises(ValueError, match=f"the zoo's own lies in {RESULTS}"):
        read_published(tmp_path)


def test_the_command_prints_every_row_and_counts_them(capsys):
    assert run("published", "--results", RESULTS, "--json") == 0
    printed = capsys.readouterr().out.splitlines()
    rows = json.loads(printed[-1])
    goals = goals_of(read_records(RESULTS))
    assert [row["state"] for row in rows] == [goal.state for goal in goals]
    assert {"entry", "kind", "printed", "ours", "se", "state"} <= rows[0].keys()
    counted = count(goals)
    assert sum(counted[state] for state in STATES) == counted["published"] == len(ROWS)
    assert f"{counted['reached']} reached" in printed[-2]


def test_one_entry_is_chosen_and_an_unknown_one_refused(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # which has no folder of records
    assert run("published", "shape-codes", "--json") == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {row["entry"] for row in rows} == {"shape-codes"}
    assert run("published", "shape-code", "--results", RESULTS) == 2
    assert "shape-codes" in capsys.readouterr().err


def test_a_terminal_without_signs_of_unicode_shows_question_marks():
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = ["published", "capsule-rbm", "--results", str(RESULTS)]
    done = subprocess.run(
        [sys.executable, "-m", "capsule_zoo", *command],
        env=os.environ | plain,
        capture_output=True,
        text=True,
    )
    assert not done.returncode, done.stderr
    assert re.search(r"ours \?84\.\d+ \? 0\.\d+, published", done.stdout) and done.stdout.isascii()
