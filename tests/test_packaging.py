"""The wheel holds the whole zoo, imports run one way, and no file names somebody's machine."""

import ast
import configparser
import json
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from offline import ONLINE

from capsule_zoo import inference

ROOT = Path(__file__).parent.parent

# What each package may import of the zoo; `capsule_zoo` itself is the front door and imports all.
ALLOWED = {
    "data": {"data"},
    "models": {"models", "data"},
    "guides": {"guides", "models", "data"},
    "inference": {"inference", "guides", "models", "data"},
    "examples": set(),
    "results": set(),
    "weights": set(),
    "experiments": {
        *("data", "models", "guides", "inference", "experiments", "examples"),
        *("figures", "registry", "records", "nearest", "settings", "runs", "zoo", "discovery"),
    },
}
FOR_ALL = {"_version"}  # of the front door
TOO_LARGE = {"capsule_zoo/weights/generative-capsnet-mnist.safetensors"}  # for a wheel
MEGABYTES = 40  # of a wheel, at most; weights are 37 of them


def package_folders() -> dict[str, Path]:
    """Return import name and folder of every package; setup.cfg says where the upper ones lie."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    lines = config["options"]["package_dir"].strip().splitlines()
    folders = {
        name: ROOT / folder
        for name, folder in (re.split(r"\s*=\s*", line.strip()) for line in lines)
    }
    for name in sorted(config["options"]["packages"].split()):  # a package before those inside it
        above, _, leaf = name.rpartition(".")
        folders.setdefault(name, folders.get(above, ROOT) / leaf)
    assert all((folder / "__init__.py").is_file() for folder in folders.values())
    return folders


def tracked_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout, so there is no list of tracked files")
    return [ROOT / name for name in listed.stdout.split("\0") if (ROOT / name).is_file()]


def imported_names(file: Path) -> set[str]:
    """Return dotted names of everything that a file imports, inside functions too."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} imports relatively; write `from capsule_zoo...`"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Build a wheel from a copy, so that no build output of earlier days can leak into it."""
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for folder in {folder.relative_to(ROOT).parts[0] for folder in package_folders().values()}:
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("setup.cfg", "pyproject.toml", "LICENSE", "README.md"):
        if (ROOT / file).exists():
            shutil.copy(ROOT / file, copy)
    build = ["build", "--wheel", "--no-isolation", "--outdir", out, copy]
    built = subprocess.run([sys.executable, "-m", *build], capture_output=True, text=True, cwd=out)
    assert built.returncode == 0, built.stdout[-2000:] + built.stderr[-2000:]
    return next(out.glob("*.whl"))


@pytest.mark.long
def test_the_wheel_holds_every_module_and_data_file(wheel):
    folders = package_folders()
    held = set(zipfile.ZipFile(wheel).namelist())
    missing = []
    for name, top in folders.items():
        for suffix in ("py", "typed", "safetensors", "json", "csv", "html", "css", "js"):
            for file in top.rglob(f"*.{suffix}"):
                inside = Path(*name.split("."), file.relative_to(top)).as_posix()
                if name == "capsule_zoo.experiments" and file.parent != top:
                    assert inside not in held  # the papers' experiments are in a checkout alone
                elif inside not in held | TOO_LARGE:
                    missing.append(inside)
    assert not missing, f"setup.cfg leaves these out of the wheel: {missing}"
    assert not held & TOO_LARGE
    assert wheel.stat().st_size < MEGABYTES * 1e6
    strays = {n for n in held if not n.startswith("capsule_zoo/") and ".dist-info/" not in n}
    assert not strays, f"the wheel would install these beside capsule_zoo: {strays}"


@pytest.mark.long
def test_everything_imports_from_the_wheel(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = f"""
import importlib, importlib.resources, pkgutil, sys, warnings
warnings.simplefilter("ignore")
sys.path.insert(0, {str(tmp_path / "site")!r})
import capsule_zoo
for module in pkgutil.walk_packages(capsule_zoo.__path__, "capsule_zoo."):
    if not module.name.endswith("__main__"):
        assert {str(tmp_path)!r} in importlib.import_module(module.name).__file__, module.name
try:
    capsule_zoo.load("generative-capsnet-mnist")
except ValueError as error:
    assert "install from a checkout" in str(error), error
else:
    raise AssertionError("the wheel was to leave these weights out")
assert importlib.resources.files("capsule_zoo.weights").is_dir()
try:
    capsule_zoo.experiments.find_experiment("part-whole/guides")
except ValueError as error:
    assert "unknown experiment" in str(error) and "lie in a checkout" in str(error), error
else:
    raise AssertionError("the wheel was to leave the experiments out")
for command in ("published shape-codes", "show shape-codes"):
    try:
        capsule_zoo.cli.main(command.split())
    except SystemExit as ended:
        assert not ended.code, command
print(*sorted(name for name in sys.modules if name.startswith("capsule_zoo")))
"""
    run = [sys.executable, "-I", "-c", code]
    done = subprocess.run(run, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert set(package_folders()) <= set(done.stdout.split())
    assert done.stdout.count(": ours ") >= 2 and "shape-codes:" in done.stdout


def test_imports_run_one_way():
    wrong = []
    for package, allowed in ALLOWED.items():
        for file in (ROOT / package).rglob("*.py"):
            for name in imported_names(file):
                top, _, rest = name.partition(".")
                if top == "capsule_zoo" and rest.split(".")[0] not in allowed | FOR_ALL:
                    wrong.append(f"{file.relative_to(ROOT)} imports {name}")
                elif top in {*ALLOWED, "tests"}:
                    wrong.append(f"{file.relative_to(ROOT)} imports {name} without capsule_zoo.")
    assert not wrong, "\n".join(wrong)


def code_of_pages() -> Iterator[tuple[str, str]]:
    """Yield the file and the text of every piece of Python that a reader is shown."""
    for file in sorted((ROOT / "notebooks").glob("*.ipynb")):
        cells = json.loads(file.read_text())["cells"]
        code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        yield file.name, "\n".join(code)
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    for file in pages:
        for block in re.findall(r"```python\n(.*?)```", file.read_text(), re.DOTALL):
            yield file.relative_to(ROOT).as_posix(), block


def test_readers_import_from_the_faces_of_folders():
    """Whatever a page shows is imported from a folder, or from a module that `inference` names."""
    named = re.findall(r"^    (\w+)  ", inference.__doc__ or "", re.MULTILINE)
    assert len(named) == 10
    modules = {f"capsule_zoo.inference.{name}" for name in named} | {"capsule_zoo.runs.objects"}
    deep = [
        f"{name}: {module}"
        for name, code in code_of_pages()
        for module in re.findall(r"(?:from|import) (capsule_zoo(?:\.\w+){2,})", code)
        if module not in modules
    ]
    assert not deep, "\n".join(deep)


def test_only_the_command_line_knows_itself_and_typer():
    command_line = ROOT / "capsule_zoo" / "cli"
    for folder in set(package_folders().values()) - {command_line}:
        for file in set(folder.glob("*.py")) - {ROOT / "capsule_zoo" / "__main__.py"}:
            names = imported_names(file)
            assert not any(name.startswith(("capsule_zoo.cli", "typer")) for name in names), file


def test_every_package_has_import_rules():
    assert set(ALLOWED) == {
        name.split(".")[1]
        for name, folder in package_folders().items()
        if folder.parent == ROOT and name != "capsule_zoo"
    }


def test_no_file_names_paths_of_a_machine():
    places = "|".join(["work", "root", "tmp", "home"])
    path = re.compile(rf"(?<![\w.])/(?:{places})/")
    matches = []
    for file in tracked_files():
        try:
            text = file.read_text()
        except UnicodeDecodeError:
            continue  # a picture or weights
        lines = enumerate(text.splitlines(), 1)
        matches += [
            f"{file.relative_to(ROOT)}:{n}: {line}" for n, line in lines if path.search(line)
        ]
    assert not matches, "\n".join(matches)


@pytest.mark.slow
def test_the_demo_leaves_a_clone_as_it_was(tmp_path):
    """The README's two commands, one after the other: pages and records agree after the demo."""
    tracked_files()
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    (demo,) = re.findall(r"^\t\$\(BIN\)/capsule-zoo (.+)$", (clone / "Makefile").read_text(), re.M)
    pages = ["tests/capsule_zoo/test_readme.py", "tests/capsule_zoo/test_records.py"]
    for command in (["capsule_zoo", *demo.split()], ["pytest", "-q", *pages]):
        subprocess.run([sys.executable, "-m", *command], cwd=clone, check=True)
    status = ["git", "status", "--porcelain"]
    assert not subprocess.run(status, cwd=clone, capture_output=True, text=True).stdout
    assert [*clone.glob("runs/demo/shape-codes/*.json")]


@pytest.mark.slow
def test_the_wheel_installed_alone_saves_and_loads_an_evaluation(wheel, tmp_path):
    """With the newest versions of its requirements, and nothing that only the tests need."""
    alone = tmp_path / "alone"
    subprocess.run([sys.executable, "-m", "venv", alone], check=True)
    subprocess.run([alone / "bin" / "pip", "install", "-q", wheel], check=True, env=ONLINE)
    code = """
import arviz, torch
from capsule_zoo import create
from capsule_zoo.inference import evaluate, summarize
entry = create("vae", image_shape=(1, 8, 8), latent=2)
found = evaluate(entry.model, entry.guide, torch.rand(3, 1, 8, 8), num_particles=2)
found.to_netcdf("evaluation.nc")
read = arviz.from_netcdf("evaluation.nc")
assert summarize(read)["elbo"] == summarize(found)["elbo"]
"""
    done = subprocess.run(
        [alone / "bin" / "python", "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-2000:]
