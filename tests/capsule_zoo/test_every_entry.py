"""Every entry goes through every command at a small size, and every command's output is correct."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure
from terminal import PATIENCE, Terminal, small_words
from variants import list_models, small_settings

from capsule_zoo.data import points
from capsule_zoo.data.datasets import load_tests
from capsule_zoo.inference.training.checkpoint import load_checkpoint
from capsule_zoo.models.networks.classifier import Classifier
from capsule_zoo.registry import create, find_registration, load
from capsule_zoo.runs import folder as runs
from capsule_zoo.runs.measurements import guides_of
from tools.publish import publish

ROOT = Path(__file__).parents[2]
OPTIONS = ("--images", "6", "--particles", "2")
FEW_SCENES = {"scenes": ("--data", "multi-digits:train=300,test=60")}  # drawn anew by every command


def words_of(name: str) -> list[str]:
    """Return an entry's small sizes and data as words of a command line; digits have 10 classes."""
    classes = {"classes": 10} if "classes" in small_settings(name) else {}
    return [*small_words(name, **classes), *FEW_SCENES.get(name, ())]


@pytest.fixture
def terminal(capsys, monkeypatch, tmp_path, few_climbs) -> Terminal:
    """Return a terminal in an empty folder, with few scenes; figures have few pixels."""
    monkeypatch.chdir(tmp_path)
    for split, number in (("TRAINING", 300), ("TESTING", 60), ("VALIDATION", 30)):
        monkeypatch.setattr(points, split, number)
    savefig = Figure.savefig

    def coarse(self: Figure, *args: object, dpi: int, **options: object) -> None:
        savefig(self, *args, dpi=20, **options)

    monkeypatch.setattr(Figure, "savefig", coarse)
    return Terminal(capsys)


def steps_of(folder: Path) -> tuple[int, int]:
    """Return the number of steps and the images per step that a checkpoint records."""
    tree = load_checkpoint(folder / "checkpoint.safetensors")
    return len(tree["progress"]["history"]), tree["config"]["batch_size"]


def test_the_data_of_every_entry_need_no_file(tmp_path, monkeypatch):
    monkeypatch.setenv("CAPSULE_ZOO_DATA", str(tmp_path))
    for data in {find_registration(name.partition(":")[0]).data for name in list_models()}:
        assert len(load_tests(data).test) >= 400


@pytest.mark.long
@pytest.mark.parametrize("name", list_models())
def test_every_entry_goes_through_every_command(name, terminal, monkeypatch):
    sizes, run = words_of(name), Path("run")
    name = name.partition(":")[0]
    with monkeypatch.context() as patched:
        wanted: list[str] = []
        patched.setattr(runs, "draw", lambda entry, figure, *_: wanted.append(figure))
        terminal.run("train", name, *sizes, "--steps", 1, "--quiet", "--out", run)
        batch_size = load(run).training.get("batch_size", 128)
        stages = load(run).stages(load(run)) if load(run).stages else ()
        batches = stages[-1].batches if stages else 1
        assert steps_of(run) == (1, batches * batch_size)
        assert json.loads((run / "config.json").read_text())["batch_size"] == batch_size
        output = terminal.run("train", name, "--resume", "--steps", 2, "--out", run)
        last = 1 if stages else 2  # of two steps the last stage has a fraction, at least one
        assert (
            steps_of(run) == (last, batches * batch_size)
            and f"written to {run}; now try: capsule-zoo " in output
        )
        options = ["--batch-size", 50, "--minutes", 9, "--steps", 1, "--quiet", "--out", "given"]
        assert "9 minutes" in terminal.run("train", name, *sizes, *options)
        assert steps_of(Path("given")) == (1, batches * 50)
    entry = load(run)
    assert wanted == 3 * list(entry.figures)
    check_measurements(name, entry, output, terminal)
    check_pictures(entry, terminal)
    publish(str(run), name, [], into=Path("weights"))
    card = json.loads(Path(f"weights/{name}.json").read_text())
    assert card["entry"] == name and card["training"]["steps"] == max(2, len(stages))
    assert (Path("weights") / f"{name}.safetensors").is_file()


def check_measurements(name: str, entry, output: str, terminal: Terminal) -> None:
    """Check that `evaluate` measures an entry by what suits it, and refuses other methods."""
    if isinstance(entry.model, Classifier):
        metrics = terminal.json("evaluate", "run")
        assert metrics["num_images"] == 400 and 0 < metrics["error_rate_se"] < 0.5
        assert terminal.json("evaluate", "run", "--method", "error-rate") == metrics
        wrong = {"bound", "anneal", "log-partition"}
        assert "error_rate  " in terminal.run("evaluate", "run", "--images", 50)
    elif not entry.model.normalized:
        metrics = terminal.json("evaluate", "run", "--chains", 20, "--temperatures", 100)
        low, high = metrics["log_likelihood_raise"], metrics["log_likelihood_ais"]
        slack = 4 * (metrics["log_likelihood_raise_se"] + metrics["log_likelihood_ais_se"])
        assert low < high + slack and metrics["log_likelihood_ais_lies"] == "above"
        assert metrics["data"] == "digits/test binarized(0)" and metrics["num_images"] == 400
        wrong = {"bound", "anneal", "error-rate"}
    else:
        metrics = terminal.json("evaluate", "run", *OPTIONS)
        value = metrics["elbo"] if metrics["is_bound"] else metrics["map_objective"]
        assert value < 0 or value > 0
        table = terminal.json("compare", "run", "--tune-steps", 1, "--quiet", *OPTIONS)
        assert set(guides_of(entry)) <= set(table) and len(guides_of(entry)) >= 3
        assert any(row["is_bound"] for row in table.values())
        assert all(row["fit_seconds"] >= 0 for row in table.values())
        assert not any(row["is_bound"] for row in table.values() if row["elbo"] is None)
        wrong = {"error-rate", "log-partition"}
        if hasattr(entry.guide, "predict"):
            rate = terminal.json("evaluate", "run", "--method", "error-rate")["error_rate"]
            assert 0 <= rate <= 1
            told = "--method error-rate" in terminal.run("evaluate", "run", *OPTIONS)
            assert told != metrics["is_bound"]
            wrong = {"log-partition"}
    assert "now try: capsule-zoo evaluate run\n" in output
    refused = [("evaluate", "run", "--method", method) for method in sorted(wrong)]
    for command in [*refused, *([("compare", "run")] if "bound" in wrong else [])]:
        told = terminal.refused(*command)
        assert name in told and "see: capsule-zoo evaluate RUN" in told


def check_pictures(entry, terminal: Terminal) -> None:
    draws_images = not isinstance(entry.model, Classifier)
    for figure in {*entry.figures, *(["samples"] if draws_images else [])}:
        assert f"drawn in run/{figure}.png" in terminal.run("figure", figure, "run")
        assert Path(f"run/{figure}.png").read_bytes().startswith(b"\x89PNG")
    assert "figure" in terminal.refused("figure", "nothing", "run")


TOGETHER = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]


@pytest.mark.long
@pytest.mark.parametrize("launcher", [[], TOGETHER], ids=["alone", "torchrun"])
def test_an_entry_trains_from_a_shell(tmp_path, launcher):
    """The command runs as a user types it, in one process or two, and reports once."""
    if launcher and not torch.distributed.is_available():
        pytest.skip("torch has no distributed package")
    arguments = ["train", "vae", *small_words("vae"), "--steps", "3", "--out", "run", "--quiet"]
    done = subprocess.run(
        [sys.executable, "-m", *launcher, "capsule_zoo", *arguments],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("reached 3 steps") == 1
    assert launcher or done.stderr == ""
    assert steps_of(tmp_path / "run") == (3, create("vae").training["batch_size"])
