"""The documentation's Python runs as it stands, page by page, as a reader would type it."""

import re
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

DOCS = Path(__file__).parents[2] / "docs"
MADE = ("notebooks", "others")  # by `make docs`
TRIED_IN_A_COPY = {"adding_a_model.md"}  # by test_contributing and test_own_modules


def blocks_of(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)


PAGES = {
    str(page.relative_to(DOCS)): page
    for page in sorted(DOCS.rglob("*.md"))
    if page.relative_to(DOCS).parts[0] not in MADE and blocks_of(page)
}


def run(page: Path) -> dict[str, object]:
    """Return the names defined after all blocks of a page have run, one after the other."""
    names: dict[str, object] = {}
    for number, code in enumerate(blocks_of(page), 1):
        exec(compile(code, f"{page.name}, block {number}", "exec"), names)
    return names


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Not enough tail samples")  # Pyro's, of a guide hardly trained
@pytest.mark.parametrize("name", sorted(set(PAGES) - TRIED_IN_A_COPY))
def test_the_code_of_a_page_runs_and_gives_the_shapes_that_its_comments_state(
    name, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)  # the code may write files
    names = run(PAGES[name])
    stated = [line for code in blocks_of(PAGES[name]) for line in code.splitlines()]
    checked = 0
    for line in stated:
        call, _, comment = line.partition("  # ")
        if shape := re.search(r"\((\d+(?:, \d+)+)\)", comment):
            assert tuple(eval(call, names).shape) == tuple(map(int, shape[1].split(", "))), line
            checked += 1
    assert checked >= 6 or "posterior_predictive(" not in "".join(stated)
    assert name != "index.md" or len(plt.get_fignums()) == 1
