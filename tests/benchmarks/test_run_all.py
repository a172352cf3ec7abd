"""One command runs every benchmark, and the tables hold what the records say."""

import re
from pathlib import Path

import pytest

from capsule_zoo.pages import markdown as readme
from capsule_zoo.records import read_record

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"

SCRIPT = """
import json, pathlib, sys
folder = pathlib.Path(sys.argv[sys.argv.index("--out") + 1], "benchmarks")
folder.mkdir(parents=True)
metrics = {"ratio_peer": {"value": len(sys.argv), "se": 0.5, "n": 7}}
rest = dict(experiment="benchmarks/toy", seed=0, versions={}, machine="one core", seconds=1.0)
tables = {"": {"ratio": {"peer": "ratio_peer"}}}
record = dict(rest, command="do it", data="noise", metrics=metrics, tables=tables)
(folder / "toy.json").write_text(json.dumps(record))
"""


@pytest.fixture
def run_all(load_benchmark):
    return load_benchmark("run_all")


def test_nothing_measured_stands_outside_the_tables():
    text = (BENCHMARKS / "README.md").read_text()
    rest = re.sub(r"<!-- \w+: .*?<!-- end -->", "", text, flags=re.DOTALL)
    assert not re.search(r"\d\.\d", rest)


def test_every_benchmark_is_run_and_listed(run_all):
    timed = {p.stem for p in BENCHMARKS.glob("*.py") if "__main__" in p.read_text()}
    assert set(run_all.names()) == timed - {"generative_capsules", "run_all"}
    listed = re.findall(
        r"^\| \[`(\w+)`\]\((\w+)\.py\)", (BENCHMARKS / "README.md").read_text(), re.M
    )
    assert [label for label, _ in listed] == [file for _, file in listed] == run_all.names()


def test_every_ratio_on_record_is_a_row():
    page = readme.ratios("benchmarks", ROOT / "results")
    for path in (ROOT / "results" / "benchmarks").glob("*.json"):
        record = read_record(f"benchmarks/{path.stem}", ROOT / "results")
        ratios = record["tables"].get("", {}).get("ratio", {})
        for peer, name in ratios.items():
            assert f"| {path.stem} | {peer} | {record['metrics'][name]['value']:.2f} |" in page
        assert f"`{record['command']}`" in page or not ratios  # rates have a page of their own


def test_one_that_fails_stops_no_other_and_is_named(run_all, tmp_path, monkeypatch):
    monkeypatch.setattr(run_all, "HERE", tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a_broken.py").write_text("raise SystemExit(3)")
    (tmp_path / "toy.py").write_text(SCRIPT)
    (tmp_path / "harness.py").touch()
    (tmp_path / "README.md").write_text("<!-- ratios: benchmarks -->\nold\n<!-- end -->\n")
    assert run_all.names() == ["a_broken", "toy"]
    with pytest.raises(SystemExit, match="failed: a_broken"):
        run_all.main(["--repeats", "2"])
    page = (tmp_path / "README.md").read_text()
    assert "| toy | peer | 5.00 | 0.50 |  | 7 |" in page and "old" not in page
    assert "- `do it`: noise." in page
    run_all.main(["toy", "--out", "elsewhere"])
    assert (tmp_path / "elsewhere" / "benchmarks" / "toy.json").is_file()
    assert (tmp_path / "README.md").read_text() == page
