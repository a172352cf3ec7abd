"""The page on adding a model is correct: its example is one file, and needs no other edit."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
COPIED = (
    "capsule_zoo",
    "tools",
    "models",
    "guides",
    "inference",
    "data",
    "weights",
    "docs",
    "results",
)
# Tests of the whole zoo, in addition to tests with the example's name.
OF_ALL = ("asked_for_once", "has_a_check")

EVERYWHERE = """
import sys
from pathlib import Path

import capsule_zoo
from capsule_zoo.cli import main

assert Path(capsule_zoo.__file__).is_relative_to(Path.cwd())
for command in ("list", "train blob --steps 2", "evaluate RUN --images 8 --particles 2"):
    try:
        main(command.replace("RUN", "runs/blob-digits-0").split())
    except SystemExit as ended:
        assert not ended.code, command
sys.path.insert(0, "docs")
import pages

print(pages.fill(pages.others()["blob"]), pages.fill(Path("docs/index.md").read_text()))
"""


@pytest.fixture(scope="module")
def house(tmp_path_factory) -> Path:
    """Return an unchanged copy of the zoo, with the example in its place."""
    text, copy = (ROOT / "docs" / "adding_a_model.md").read_text(), tmp_path_factory.mktemp("house")
    left = shutil.ignore_patterns("__pycache__", "notebooks", "others")
    for folder in (*COPIED, "tests"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=left)
    shutil.copy(ROOT / "setup.cfg", copy)
    ((place, example),) = re.findall(r"`(\S+/blob\.py)`:\n\n```python\n(.*?)```", text, re.DOTALL)
    (copy / place).write_text(example)
    return copy


def run(house: Path, *arguments: str) -> str:
    """Return the output of a Python program that is run in the copy."""
    done = subprocess.run([sys.executable, *arguments], cwd=house, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.long
def test_the_example_passes_the_tests_of_every_model(house):
    expression = f"({' or '.join(['blob', *OF_ALL])}) and not diagram"  # these need graphviz
    tests = [house / "tests/test_contract.py", *(house / "tests").glob("[cd]*/test_*.py")]
    of_every_model = [str(file) for file in tests if "list_models()" in file.read_text()]
    marks = ["-m", "not slow"]
    arguments = ["-v", "-p", "no:cacheprovider", *marks, *of_every_model, "-k", expression]
    printed = run(house, "-m", "pytest", *arguments)
    verdicts = re.findall(r"::.+ ([A-Z]+) +\[ *\d+%\]$", printed, re.MULTILINE)
    assert len(verdicts) > 20 + len(OF_ALL) and set(verdicts) == {"PASSED"}


@pytest.mark.long
def test_the_example_is_listed_trained_evaluated_and_shown(house):
    printed = run(house, "-c", EVERYWHERE)
    assert re.search(r"^blob +A spot of light", printed, re.MULTILINE)
    assert re.search(r"^elbo +-?\d", printed, re.MULTILINE)
    assert "autoclass:: capsule_zoo.zoo.blob.BlobReader" in printed
    assert "\nothers/blob\n" in printed
