"""The README: its numbers are those of the records, and its Python runs."""

import re
from pathlib import Path

import pytest

from capsule_zoo import readme
from capsule_zoo.records import write_record

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"


def test_every_number_is_that_of_its_record():
    text = README.read_text()
    assert "<!-- record:" in text
    assert readme.fill(text, ROOT / "results") == text, "run: python -m capsule_zoo.readme"


def test_its_pictures_are_there():
    for picture in re.findall(r"!\[[^]]*\]\(([^)]+)\)", README.read_text()):
        assert (ROOT / picture).is_file(), picture


def test_its_python_runs(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert code.count("\n") <= 14
    small = re.sub(r"steps=\d+", "steps=1", code).replace("digits.test[:48]", "digits.test[:3]")
    small = small.replace("digits.train,", "digits.train[:8],")
    exec(compile(small, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "elbo" in printed and "widened" in printed


def test_a_block_is_filled_and_the_rest_kept(tmp_path):
    metrics = {
        "accuracy": {"value": 0.5, "se": 0.01, "n": 100},
        "size": {"value": 3.0, "se": None, "n": 1},
    }
    write_record(
        "toy/one", metrics, command="do it", seed=0, data="none", seconds=60.0, folder=tmp_path
    )
    text = "before\n<!-- record: toy/one -->\nold\n<!-- end -->\nafter\n"
    filled = readme.fill(text, tmp_path)
    assert filled.startswith("before\n") and filled.endswith("after\n") and "old" not in filled
    assert "| accuracy | 0.5000 | 0.0100 | 100 |" in filled and "| size | 3.0000 |  | 1 |" in filled
    assert readme.fill(filled, tmp_path) == filled
    chosen = readme.fill("<!-- record: toy/one s* -->\n<!-- end -->", tmp_path)
    assert "| size |" in chosen and "accuracy" not in chosen
    assert chosen.startswith("<!-- record: toy/one s* -->\n") and chosen.endswith("<!-- end -->")
    with pytest.raises(ValueError, match="has no metric that matches 'x"):
        readme.fill("<!-- record: toy/one x* -->\n<!-- end -->", tmp_path)
    with pytest.raises(ValueError, match="no record"):
        readme.fill("<!-- record: toy/two -->\n<!-- end -->", tmp_path)
