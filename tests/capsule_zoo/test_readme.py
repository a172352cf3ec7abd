"""Pages that show records: their numbers are those of the records, and the README's Python runs."""

import re
from pathlib import Path

import pytest
import torch
from torch.distributions import Normal

from capsule_zoo.inference import compare
from capsule_zoo.pages import markdown as readme
from capsule_zoo.records import Table, flatten, write_record

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = {str(page.relative_to(ROOT)): page for page in readme.pages(ROOT)}


@pytest.mark.parametrize("name", PAGES)
def test_every_number_is_that_of_its_record(name):
    text = PAGES[name].read_text()
    assert re.search("<!-- (record|value): ", text)
    assert readme.fill(text, ROOT / "results") == text, "run: python -m capsule_zoo.pages.markdown"


def test_the_readme_is_short_and_has_two_numbers_a_model():
    text = README.read_text()
    tokens = re.sub(r"<!--.*?-->|```python.*?```|[|±]", "", text, flags=re.DOTALL).split()
    assert len(tokens) <= 700
    assert not re.search("^ *<!-- value", text, re.MULTILINE)  # breaks the paragraph
    rows = re.findall(r"^\|.*results/.*\|$", text, re.M)
    assert len(rows) >= 11
    for row in rows:
        *_, number, baseline = [cell.strip() for cell in row.strip("|").split("|")]
        (record,) = re.findall(r"^<!-- value: (\S+) \S+ -->[^<]+<!-- end -->$", number)
        assert baseline.startswith(f"<!-- value: {record} ") or re.fullmatch(
            "\N{MINUS SIGN}?[0-9.]+", baseline
        )


@pytest.mark.parametrize("name", PAGES)
def test_what_it_links_to_is_there(name):
    page = PAGES[name]
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        assert link.startswith("http") or (page.parent / link.partition("#")[0]).is_file(), link


def test_every_family_with_records_stands_on_a_page_that_the_readme_links_to():
    families = {path.parent.name for path in (ROOT / "results").glob("*/*.json")}
    linked = [name for name in PAGES if f"({name})" in README.read_text()]
    for family in families - {"benchmarks"}:
        results_page = f"results/{family}/README.md"
        assert results_page in linked or (
            results_page not in PAGES
            and any(f"<!-- record: {family}/" in PAGES[name].read_text() for name in linked)
        )


def readme_python() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


def test_its_python_runs(capsys):
    code, _ = readme_python()
    assert code.count("\n") <= 15
    small = re.sub(r"steps=\d+", "steps=1", code).replace("digits.test[:48]", "digits.test[:3]")
    small = small.replace("digits.train,", "digits.train[:8],")
    exec(compile(small, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "elbo" in printed and "widened" in printed


@pytest.mark.long
def test_its_examination_of_a_program_runs(capsys):
    _, code = readme_python()
    short = "steps=5, fitting=5, particles=100, chains=4, temperatures=5, simulated=2, observed="
    exec(compile(code.replace("observed=", short, 1), "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "lost_elbo" in printed and "auto_normal" in printed


@pytest.mark.slow
def test_its_python_paints_what_it_was_never_shown():
    """The code runs as it stands; the margins allow for rounding on other machines."""
    names: dict = {}
    exec(compile(readme_python()[0], "README.md", "exec"), names)
    digits, model = names["digits"], names["model"]
    pairs = {name: (model, names[name]) for name in ("normal", "wide")}
    bounds = compare(pairs, digits.test[:48], num_particles=10)["elbo"]
    black = Normal(torch.zeros(()), model.sigma_image)
    blank = black.log_prob(digits.test.images[:48]).sum((1, 2, 3)).mean()
    assert blank < -1500 and bounds.min() > 100  # as the README says


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
    assert "| accuracy | 0.500 ± 0.010 | 100 |" in filled and "| size | 3 | 1 |" in filled
    assert readme.fill(filled, tmp_path) == filled
    content = readme.fill("<!-- record: toy/one s* -->\n<!-- end -->", tmp_path)
    assert "| size |" in content and "accuracy" not in content
    assert content.startswith("<!-- record: toy/one s* -->\n") and content.endswith("<!-- end -->")
    line = "a <!-- value: toy/one accuracy --><!-- end --> b"
    assert readme.fill(line, tmp_path) == line.replace("><", ">0.500 ± 0.010<")
    with pytest.raises(ValueError, match="has no metric 'none'"):
        readme.fill("<!-- value: toy/one none --><!-- end -->", tmp_path)
    with pytest.raises(ValueError, match="has no metric that matches 'x"):
        readme.fill("<!-- record: toy/one x* -->\n<!-- end -->", tmp_path)
    with pytest.raises(ValueError, match="no record"):
        readme.fill("<!-- record: toy/two -->\n<!-- end -->", tmp_path)


def test_variants_are_rows_and_quantities_are_columns(tmp_path):
    metrics, tables = flatten(
        {
            "elbo": {"normal": (-1.25, 0.1, 1000), "low_rank": (2.0, None, 5)},
            "ess": {"low_rank": (3.5, None, 5)},
            "relaxed": Table({"elbo": {"normal": (7.0, None, 5)}}, "{quantity}_{variant}_relaxed"),
        }
    )
    rest = dict(command="do it", seed=0, data="none", seconds=60.0, folder=tmp_path)
    write_record("toy/one", metrics, tables=tables, **rest)
    lines = readme.fill("<!-- record: toy/one -->\n<!-- end -->", tmp_path).splitlines()
    assert lines[1:11] == [
        "|  | ELBO | ESS |",
        "| --- | --: | --: |",
        "| normal | \N{MINUS SIGN}1.25 ± 0.10 |  |",
        "| low rank | 2 | 3.500 |",
        "| *n* | 5 to 1,000 | 5 |",
        "",
        "| relaxed | ELBO |",
        "| --- | --: |",
        "| normal | 7 |",
        "| *n* | 5 |",
    ]
    rows = readme.fill("<!-- record: toy/one ess_* -->\n<!-- end -->", tmp_path).splitlines()
    assert rows[1:5] == ["|  | ESS |", "| --- | --: |", "| low rank | 3.500 |", "| *n* | 5 |"]
