"""Other packages add entries, guides, data sets and experiments, and cannot break the zoo."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from capsule_zoo import create, experiments, register, registry
from capsule_zoo.data import datasets, plugins, register_dataset
from capsule_zoo.data.plugins import modules_outside
from capsule_zoo.registry import load, register_guide, save, small_sizes

ROOT = Path(__file__).parents[2]

THIEF = """
from capsule_zoo import register
from capsule_zoo.experiments import experiment
try:
    register("vae")(lambda image_shape=(1, 8, 8): None)
finally:
    experiment("part-whole/digits")(lambda options: None)
"""

START = """
import json, os, sys, warnings
with warnings.catch_warnings():
    warnings.simplefilter("error")
    import capsule_zoo.cli, capsule_zoo.experiments, capsule_zoo.inference, capsule_zoo.registry
assert not (capsule_zoo.registry._registered or capsule_zoo.experiments._experiments)
for line in sys.stdin:
    folder, code, words = json.loads(line)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads, which a fork leaves behind
        child = os.fork()
    if not child:
        os.chdir(folder)
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        sys.argv[1:] = words
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""

FOUND = """
import sys, warnings, capsule_zoo
warnings.filterwarnings({warned})
from capsule_zoo import create, list_models
from capsule_zoo.data import dataset_names, load_dataset
from capsule_zoo.experiments import list_experiments
assert "my_package.capsules" not in sys.modules, "plugins are imported when a name is looked up"
print({first})
assert "my_package.capsules" in sys.modules
assert "small-vae" in list_models() and "vae" in list_models()
assert type(create("vae").make_guide("broad")).__name__ == "Broad"
assert "stripes" in dataset_names() and "small-vae/stripes" in list_experiments()
assert type(create("vae").model).__module__ == "capsule_zoo.models.baselines.vae"
"""


@pytest.fixture(scope="module")
def example() -> str:
    """Return the module that the page on adding a model shows."""
    page = (ROOT / "docs" / "adding_a_model.md").read_text()
    (found,) = re.findall(r"with four decorators:\n\n```python\n(.*?)```", page, re.DOTALL)
    return found


def install(site: Path, package: str, code: str) -> None:
    """Write a package and its metadata into a folder, as an installer does."""
    (site / package.replace("-", "_")).mkdir(parents=True)
    (site / package.replace("-", "_") / "capsules.py").write_text(code)
    metadata = site / f"{package.replace('-', '_')}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    module = f"{package.replace('-', '_')}.capsules"
    (metadata / "entry_points.txt").write_text(f"[capsule_zoo.plugins]\nown = {module}\n")


@pytest.fixture(scope="module")
def python() -> Iterator[Callable[..., subprocess.CompletedProcess]]:
    """Return a function that runs a program in a folder, where it leaves `out` and `err`.

    Packages in the folder are installed. Every program is a process of its own. The import of the
    zoo takes seconds: one process does it, looks up no name of the zoo, and forks for each program.
    """
    if not hasattr(os, "fork"):
        pytest.skip("this system has no fork")
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", START]
    with subprocess.Popen(command, cwd=ROOT, env=environment, **pipes) as process:

        def run(code: str, *words: str, cwd: Path) -> subprocess.CompletedProcess:
            process.stdin.write(json.dumps([str(cwd), code, words]) + "\n")
            process.stdin.flush()
            status = int(process.stdout.readline())
            printed = ((cwd / name).read_text() for name in ("out", "err"))
            return subprocess.CompletedProcess(code, status, *printed)

        yield run


@pytest.mark.parametrize(
    "first", ['create("small-vae").name', 'load_dataset("stripes", size=(4, 6)).train.images.shape']
)
def test_what_an_installed_package_adds_is_found_by_name(tmp_path, first, example, python):
    install(tmp_path, "my-package", example)
    done = python(FOUND.format(first=first, warned='"error"'), cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() in ("small-vae", "torch.Size([40, 1, 4, 6])")


def test_packages_that_cannot_be_imported_are_named_once_and_change_nothing(
    tmp_path, example, python
):
    """One of them fails, and one takes names of the zoo before the zoo has used them itself."""
    install(tmp_path, "broken-package", "import no_such_module")
    install(tmp_path, "thief-of-names", THIEF)
    install(tmp_path, "my-package", example)
    first = 'load_dataset("stripes", size=(4, 6)).train.images.shape'
    warned = '"always", category=UserWarning, module="__main__"'
    done = python(FOUND.format(first=first, warned=warned), cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    for package, reason in (
        ("broken-package", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("thief-of-names", "'part-whole/digits' is registered already, by capsule_zoo.experiments"),
    ):
        (told,) = [line for line in done.stderr.splitlines() if f"the package {package!r}" in line]
        assert reason in told and f"repair or uninstall {package!r}" in told


def test_the_command_line_imports_modules_of_the_current_folder(tmp_path, example, python):
    """Every command is a process of its own."""
    (tmp_path / "my_module.py").write_text(example)
    train = "train small-vae --data stripes --size 8 --steps 2 --out run --quiet"
    evaluate = "evaluate run --images 4 --particles 2"
    commands = {
        train: 2,
        f"--import my_module {train}": 0,
        evaluate: 2,
        f"{evaluate} --import my_module": 0,  # behind the command too
        "reproduce small-vae/stripes --import=my_module": 0,
    }
    main = "import sys\nfrom capsule_zoo.cli import main\nmain(sys.argv[1:])"
    done = [python(main, *words.split(), cwd=tmp_path) for words in commands]
    assert [each.returncode for each in done] == [*commands.values()], done
    unknown, _, refused, *_ = [each.stderr for each in done]
    assert "unknown entry 'small-vae'" in unknown
    assert json.loads((tmp_path / "run" / "config.json").read_text())["modules"] == ["my_module"]
    assert "capsule-zoo --import my_module" in refused and len(refused.splitlines()) == 1
    record = json.loads((tmp_path / "runs/reproduced/small-vae" / "stripes.json").read_text())
    assert record["command"] == "capsule-zoo --import my_module reproduce small-vae/stripes"


@pytest.mark.parametrize(
    ("code", "name", "words"),
    [
        (None, "no_such_module", "found no module 'no_such_module'"),
        (None, "my_module.py", r"name of a module.*not 'my_module.py'|found no module"),
        (None, "a/b", "takes the name of a module"),
        ("import missing_part", "lacks_a_part", "lacks_a_part failed .*missing_part"),
        ("1 / 0", "divides", "divides failed .ZeroDivisionError.*python -c 'import divides'"),
    ],
)
def test_a_module_that_cannot_be_imported_is_refused(tmp_path, monkeypatch, code, name, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    if code:
        (tmp_path / f"{name}.py").write_text(code)
    with pytest.raises(ValueError, match=words):
        plugins.import_by_name(name)


def test_installed_modules_come_before_those_of_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    plugins.import_by_name("wave")
    assert sys.path[-1] == os.getcwd()


def test_a_guide_is_added_once_to_an_entry_that_exists(scratch):
    def again(entry):
        return entry.make_guide(entry.default_guide)

    assert register_guide("vae", "again")(again) is again
    assert list(create("vae").guides)[-1] == "again" and create("vae").default_guide != "again"
    for entry, name, words in (
        ("vae", "again", "vae has a guide named 'again' already"),
        ("vae", create("vae").default_guide, "already; choose another name"),
        ("vea", "other", "did you mean 'vae'"),
        ("vae", "Other one", "lower case with hyphens"),
    ):
        with pytest.raises(ValueError, match=words):
            register_guide(entry, name)


def test_weights_with_a_guide_of_another_module_say_which(scratch, tmp_path):
    def again(entry):
        return entry.make_guide(entry.default_guide)

    register_guide("vae", "again")(again)
    entry = create("vae", **small_sizes("vae"))
    save(entry, tmp_path / "own")
    assert "modules" not in json.loads((tmp_path / "own" / "config.json").read_text())
    save(entry.use_guide("again"), tmp_path / "run")
    assert load(tmp_path / "run").default_guide == "again"
    del registry._registered["vae"].guides["again"]
    with pytest.raises(ValueError, match=rf"unknown guide 'again'.*import {__name__}; or capsule-"):
        load(tmp_path / "run")


def test_a_cell_of_a_notebook_may_run_again(scratch):
    def cell():
        """Make one entry, guide, data set and experiment."""

        def made(*arguments):
            return create("vae", **small_sizes("vae"))

        made.__module__ = "__main__"
        register("of-a-cell")(made)
        register_guide("vae", "of-a-cell")(made)
        register_dataset("of-a-cell")(made)
        experiments.experiment("of-a-cell/first")(made)
        return made

    cell()
    last = cell()
    assert registry.factory_of("of-a-cell") is create("vae").guides["of-a-cell"] is last
    assert datasets._READERS["of-a-cell"] is last
    assert experiments._experiments["of-a-cell/first"].function is last
    with pytest.raises(ValueError, match="registered already"):
        register("vae")(last)


def test_a_data_set_is_registered_once(scratch):
    @register_dataset("of-a-test")
    def reader(root, size):
        return datasets.digits(size)

    assert "of-a-test" in datasets.dataset_names()
    assert datasets.load_dataset("of-a-test", size=9).image_shape == (1, 9, 9)
    with pytest.raises(ValueError, match=f"registered already, by {__name__}"):
        register_dataset("of-a-test")(reader)
    with pytest.raises(ValueError, match="registered already"):
        register_dataset("mnist")(reader)
    with pytest.raises(ValueError, match="lower case with hyphens"):
        register_dataset("Of a test")


def test_a_function_with_fixed_arguments_belongs_to_its_own_module():
    assert modules_outside(partial(create, "vae")) == []
    assert modules_outside(partial(partial(json.dumps), indent=2)) == ["json"]
