"""Pages show everything registered and recorded, and docstrings reach Sphinx as intended."""

import re
import shutil
from importlib import import_module
from pathlib import Path

import pytest
import torch
from matplotlib import pyplot as plt

from capsule_zoo.experiments import list_experiments
from capsule_zoo.records import write_record
from capsule_zoo.registry import create, list_models, small_settings

DOCS = Path(__file__).parents[2] / "docs"


RESULTS = sorted((DOCS.parent / "results").glob("*/README.md"))


@pytest.fixture
def pages(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    import pages

    return pages


@pytest.fixture
def docstrings(pages):
    import docstrings

    return docstrings


@pytest.mark.parametrize(
    ("marker", "names"),
    [("entry", list_models()), ("experiments", {n.split("/")[0] for n in list_experiments()})],
)
def test_everything_registered_is_asked_for_once(pages, marker, names):
    texts = "".join(path.read_text() for path in (DOCS / "models").glob("*.md"))
    texts += "".join(pages.others().values())
    assert sorted(re.findall(rf"<!-- {marker}: (\S+) -->", texts)) == sorted(names)


def test_what_has_a_record_shows_it_and_all_else_says_that_it_has_none(
    pages, monkeypatch, tmp_path, unpainted
):
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    waiting = pages.experiments("part-whole", "../")
    assert "### part-whole" not in waiting and "png" not in waiting
    for name in list_experiments("part-whole/*"):
        assert f"`capsule-zoo reproduce {name}`" in waiting

    write_record(
        "part-whole/classify",
        {"answer": {"value": 0.4242, "se": 0.0101, "n": 7}},
        command="capsule-zoo reproduce part-whole/classify --seed 5",
        seed=5,
        data="digits",
        seconds=60,
        figures={"parses": plt.figure()},
        folder=tmp_path,
    )
    measured, _, waiting = pages.experiments("part-whole", "../").partition("### Not measured yet")
    assert "| answer | 0.424 ± 0.010 | 7 |" in measured
    assert "![classify parses](../results/part-whole/classify_parses.png)" in measured
    assert "--seed 5" in measured and "part-whole/classify" not in waiting


PARTS = ("models", "guides", "inference", "data", "figures")


@pytest.mark.parametrize("name", ["capsule_zoo", *(f"capsule_zoo.{part}" for part in PARTS)])
def test_the_reference_groups_every_name_once(pages, name):
    package = import_module(name)
    text = (DOCS / "api" / f"{name.rpartition('.')[2]}.md").read_text()
    asked = re.findall(rf"^<!-- reference: {package.__name__} (.*) -->$", text, re.MULTILINE)
    public = [n for n in package.__all__ if callable(getattr(package, n))]
    assert sorted(" ".join(asked).split()) == sorted(public)
    for group in asked:
        filled = pages.fill(f"<!-- reference: {package.__name__} {group} -->")
        assert len(re.findall(r"^\.\. auto(?:class|function)::", filled, re.MULTILINE)) == len(
            group.split()
        )


def test_every_page_of_results_is_on_the_site_with_its_pictures(pages):
    texts = "".join(path.read_text() for path in (DOCS / "models").glob("*.md"))
    families = {path.parent.name for path in (DOCS.parent / "results").glob("*/README.md")}
    assert sorted(re.findall(r"<!-- results: (\S+) -->", texts)) == sorted(families)
    text = pages.results("part-whole", "../../")
    assert "](../../results/part-whole/classify_templates.png)" in text
    assert text.count("](") == text.count("![") and "\n# " not in text
    for path in re.findall(r"\(\.\./\.\./(results/[^)]+)\)", text):
        assert (DOCS.parent / path).is_file()


@pytest.mark.parametrize("page", RESULTS, ids=lambda page: page.parent.name)
def test_a_page_of_results_is_short_and_shows_a_picture_and_one_table_of_comparisons(page):
    """At most 900 words, as a reader sees them: without the comments that request numbers."""
    text = page.read_text("utf-8")
    assert len(re.sub("<!--.*?-->", "", text, flags=re.DOTALL).split()) <= 900
    assert not re.search("^ *<!-- (value|verdict)", text, re.MULTILINE)  # breaks the paragraph
    before, *tables = text.split("| question | ours | compared with | verdict |\n")
    assert len(tables) == 1 and re.search(r"^!\[[^]]+\]\([^)]+\.png\)$", before, re.MULTILINE)
    assert "\n|" not in before  # no other table comes first
    rows = tables[0].partition("\n\n")[0].splitlines()[1:]
    assert 5 <= len(rows) <= 12
    assert all("<!-- verdict: " in row and "<!-- value: " in row for row in rows)


@pytest.mark.skipif(shutil.which("dot") is None, reason="graphviz's program dot is not installed")
@pytest.mark.parametrize("name", list_models())
def test_the_plate_diagram_shows_every_site_and_plate(pages, name):
    pytest.importorskip("graphviz", reason="the Python package graphviz is not installed")
    state = torch.get_rng_state()
    text = pages.diagram(name).decode()
    assert torch.equal(torch.get_rng_state(), state) and text.rstrip().endswith("</svg>")
    model = create(name, **small_settings(name)).model
    labels = {*(site.name for site in model.sites), *model.plate_dims, model.space.site}
    assert {word for word in labels if f">{word}</text>" not in text} == set()


def test_a_page_that_asks_for_what_there_is_not_is_refused(pages):
    for text in ("<!-- entrance: part-whole -->", "<!-- entry: part-hole -->"):
        with pytest.raises(ValueError, match="unknown"):
            pages.fill(text)


STORY = """Story of `EMRouting` and of `nobody`, where |x| * y.

Then:

    x_i ~ Normal(0, I)    # `EMRouting`, (B, 6)

        deeper | still

Args:
    rate: how fast,
        for how long.
"""


def test_indented_blocks_are_code_and_stay_as_they_are(docstrings):
    lines = docstrings.to_restructured_text(STORY.split("\n"))
    start = lines.index(".. code-block:: story")
    assert lines[start + 1 : start + 5] == [
        "",
        "   x_i ~ Normal(0, I)    # `EMRouting`, (B, 6)",
        "",
        "       deeper | still",
    ]
    assert lines[-4:] == ["Args:", "    rate: how fast,", "        for how long.", ""]


def test_public_names_in_backticks_are_links_and_no_mark_is_taken_for_markup(docstrings):
    first = docstrings.to_restructured_text(STORY.split("\n"))[0]
    assert first == (
        r"Story of :py:obj:`~capsule_zoo.guides.EMRouting` and of `nobody`, where \|x\| \* y."
    )
