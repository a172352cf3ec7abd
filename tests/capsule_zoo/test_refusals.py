"""A refused command changes nothing: every file is, byte for byte, what it was before."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from terminal import PATIENCE, run, small_words

from capsule_zoo import registry
from capsule_zoo.inference.training.checkpoint import load_checkpoint
from capsule_zoo.inference.training.trainer import Trainer
from capsule_zoo.registry import load, read_recipe, small_settings
from capsule_zoo.runs import folder as runs
from capsule_zoo.runs import measurements
from tools.publish import publish

ROOT = Path(__file__).parents[2]
SMALL = small_words("vae")


def digest(folder: Path) -> dict[str, str]:
    """Return every file below a folder, hidden files too, with the hash of its bytes."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Return a folder with a run of two steps, broken copies of it, a picture and weights."""
    place = tmp_path_factory.mktemp("refusals")
    config = {"settings": small_settings("vae"), "limits": {"steps": 2}, "seed": 1}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(runs, "draw", lambda *_: None)
        runs.train("vae", place / "run", config, progress=False)
    shutil.copytree(place / "run", place / "damaged")
    (place / "damaged" / "metrics.json").write_text("steps: 2")
    shutil.copytree(place / "run", place / "begun")
    (place / "begun" / "checkpoint.safetensors").unlink()
    shutil.copytree(place / "run", place / "killed")
    (place / "killed" / "model.safetensors").unlink()
    (place / "pictures").mkdir()
    (place / "pictures" / "cat.png").write_bytes(b"mine")
    publish(str(place / "run"), "taken", [], into=place / "weights")
    return place


@pytest.fixture
def place(trained, tmp_path, monkeypatch) -> Path:
    """Copy these into the working folder of the command; training draws no figures."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "WEIGHTS", tmp_path / "weights")
    monkeypatch.setattr(runs, "draw", lambda *_: None)
    return tmp_path


def train(*arguments: object) -> list[str]:
    return ["train", "vae", "--steps", "3", "--quiet", *map(str, arguments)]


RESUME = ["--out", "run", "--resume"]
OVERWRITE = ["--out", "run", "--overwrite", *SMALL]
DIGITS = "shape-codes/digits"
FRESH = ["--out", "new", *SMALL]
CONSTELLATIONS = ["train", "constellations", "--steps", "1", "--out", "new"]
COMMANDS = {
    "resume, other data": (train(*RESUME, "--data", "toys3d"), 'data="digits"'),
    "resume, other sizes": (train(*RESUME, "--set", "latent=3"), "latent=2"),
    "resume, other guide": (train(*RESUME, "--guide", "other"), 'guide="convolutional"'),
    "resume, no such size": (train(*RESUME, "--set", "latnt=16"), "did you mean 'latent'?"),
    "resume, other entry": (["train", "draw", *RESUME], "holds a run of 'vae'"),
    "resume, lr": (train(*RESUME, "--lr", -1), "lr must be positive"),
    "resume, nothing there": (train("--out", "new", "--resume"), "new holds no run; leave"),
    "resume, not a run": (train("--out", "pictures", "--resume"), "holds no run"),
    "resume, no checkpoint": (train("--out", "begun", "--resume"), "no checkpoint to go on from"),
    "resume and overwrite": (train(*RESUME, "--overwrite"), "one of"),
    "overwrite, lr": (train(*OVERWRITE, "--lr", -1), "lr must be positive"),
    "overwrite, size": (train(*OVERWRITE, "--set", "latent=0"), "latent"),
    "overwrite, size beyond memory": (
        train(*OVERWRITE, "--set", f"latent={10**30}"),
        "these settings",
    ),
    "overwrite, image shape": (train(*OVERWRITE, "--set", "image_shape=5"), "image_shape must be"),
    "overwrite, data": (train(*OVERWRITE, "--data", "digit"), "did you mean 'digits'"),
    "overwrite, steps": ([*train(*OVERWRITE), "--steps", "0"], "steps must be positive"),
    "overwrite, not finite": (train(*OVERWRITE, "--lr", 1e30), "not finite"),
    "overwrite, no time": (train(*OVERWRITE, "--minutes", 1e-9), "before its first step"),
    "overwrite, not a run": (train("--out", "pictures", "--overwrite"), "else than a run"),
    "overwrite, a file": (train("--out", "pictures/cat.png", "--overwrite"), "else than a run"),
    "in use": (train("--out", "run", *SMALL), "go on with its run by --resume"),
    "fresh, batches": (train(*FRESH, "--batch-size", 0), "batch_size must be at least 1"),
    "fresh, cuda": (train(*FRESH, "--device", "cuda:99"), "device must be one of cpu"),
    "fresh, guide": (train(*FRESH, "--guide", "exact"), "unknown guide 'exact'"),
    "fresh, transform": (train(*FRESH, "--transform", "turn=3"), "unknown transform 'turn'"),
    "fresh, no whole pixels": (train(*FRESH, "--transform", "shift=2.7"), "whole number"),
    "fresh, in a file": (train("--out", "pictures/cat.png/new", *SMALL), "cannot be written"),
    "fresh, seed": (train(*FRESH, "--seed", 10**23), "seed must be"),
    "fresh, ground": (
        ["train", "scenes", "--data", "multi-digits:train=9", *FRESH[:2], "--set", "ground=colour"],
        "unknown ground 'colour'; did you mean 'color'",
    ),
    "evaluate, not ended": (["evaluate", "killed"], "go on with it by capsule-zoo train vae --res"),
    "evaluate, damaged": (["evaluate", "damaged"], "damaged/metrics.json cannot be read"),
    "compare, damaged": (["compare", "damaged"], "damaged/metrics.json cannot be read"),
    "compare, no guide": (["compare", "run", "--guides", " "], "no guide is given; vae has"),
    "compare, bad guide": (
        ["compare", "run", "--guides", "convolutional,no"],
        "unknown guide 'no'",
    ),
    "train, slots": (
        ["train", "shape-codes", "--set", "slots=2", "--guide", "routing"],
        "no guide of shape-codes reads several objects, but slots=2",
    ),
    "reproduce, minutes": (["reproduce", DIGITS, "--minutes", "0"], "minutes must be"),
    "reproduce, in a file": (["reproduce", DIGITS, "--out", "run/config.json"], "cannot be writt"),
    "segment, in a file": (["segment", "run", "--out", "pictures/cat.png"], "cannot be written"),
    "evaluate, no name of data": (["evaluate", "run", "--data", ""], "unknown data set ''"),
    "list, nothing": (["list", "nothing"], "no entry matches 'nothing'"),
    "list, no weights": (["list", "--weights", "nothing"], "no trained weights match 'nothing'"),
    "show, entry": (["show", "part-hole"], "did you mean 'part-whole'"),
    "reproduce, name": (["reproduce", "shape-codes/digit"], "did you mean 'shape-codes/digits'"),
    "reproduce, setting": (
        ["reproduce", "scenes/counts", "--set", "lenght=2"],
        "unknown setting of scenes/counts 'lenght'; did you mean 'length'?",
    ),
    "method": (["evaluate", "run", "--method", "aneal"], "unknown method 'aneal'; did you mean"),
    "method, particles": (
        ["evaluate", "run", "--method", "error-rate", "--particles", "5"],
        "is an option of --method bound, and",
    ),
    "method, chains": (
        ["evaluate", "run", "--chains", "5"],
        "log-partition or anneal, and this measures --method bound; leave out",
    ),
    "points for a run of images": (
        ["evaluate", "run", "--data", "constellations"],
        "reads images, and constellations holds scenes of points",
    ),
    "segment, no scenes": (["segment", "run"], "finds no objects"),
    "constellations, explore": (["explore", "constellations"], "no view"),
    "explore, data": (["explore", "part-whole", "--data", "digit"], "did you mean 'digits'"),
    "constellations, sigma": (
        [*CONSTELLATIONS, "--set", "learned=true", "--set", "sigma=0.0"],
        "above 0",
    ),
    "constellations, size": ([*CONSTELLATIONS, "--size", "28"], "no pixels"),
    "constellations, digits": ([*CONSTELLATIONS, "--data", "digits"], "points must"),
    "constellations, vae": (train(*FRESH[:2], "--data", "constellations"), "no pixels"),
    "data root": (train(*FRESH, "--data", "mnist", "--data-root", "nowhere"), "no folder nowhere"),
    "no KEY=VALUE": (train(*FRESH, "--set", "latent"), "KEY=VALUE"),
    "no such setting": (train(*FRESH, "--set", "legs=4"), "legs"),
    "transform, name": (train(*FRESH, "--transform", "rotat=3"), "did you mean 'rotate'"),
    "transform, number": (train(*FRESH, "--transform", "rotate"), "rotate=20"),
    "log": (train(*FRESH, "--log", "wandb"), "log must be one of 'tensorboard'"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_refused_command_changes_nothing(name, place, capsys):
    command, message = COMMANDS[name]
    before = digest(place)
    assert run(*command) == 2
    output = capsys.readouterr().err
    assert output.startswith("capsule-zoo: ") and message in output, output
    assert "Traceback" not in output and output.strip().count("\n") == 0
    assert digest(place) == before and not (place / "new").exists()
    assert "last good checkpoint" not in output


def test_the_last_good_checkpoint_is_named_where_there_is_one(place, capsys):
    before = digest(place)
    assert run(*train(*RESUME, "--lr", 1e30, "--steps", 9)) == 2
    assert "the last good checkpoint is run/checkpoint.safetensors" in capsys.readouterr().err
    assert digest(place) == before


def test_a_run_that_goes_on_may_change_its_limits_and_rate(place):
    before = read_recipe("run")
    same = ["--data", "digits", "--set", "latent=2", "--seed", "1", "--batch-size", "128"]
    assert run(*train(*RESUME, *same, "--lr", 0.01)) == 0
    assert read_recipe("run") == {**before, "lr": 0.01, "limits": {"steps": 3}}


def test_overwriting_keeps_the_old_run_until_the_first_checkpoint(place, monkeypatch):
    """The old run is whole at every step; its leftovers go when the new run has a checkpoint."""
    assert run("evaluate", "run", "--images", "2") == 0
    (place / "run" / "notes.txt").write_text("mine")
    (place / "run" / "compare.png").write_bytes(b"a comparison of the old run")
    before, digests, step = digest(place / "run"), [], Trainer._step

    def watched(self: Trainer, *arguments: object) -> None:
        digests.append(digest(place / "run"))
        step(self, *arguments)

    monkeypatch.setattr(Trainer, "_step", watched)
    assert run(*train(*OVERWRITE, "--set", "latent=4", "--seed", 5)) == 0
    assert digests == [before] * 3
    assert load("run").model.latent == 4 and read_recipe("run")["seed"] == 5
    assert (place / "run" / "notes.txt").read_text() == "mine"
    assert not (place / "run" / "compare.png").exists()
    assert "bound" not in json.loads((place / "run" / "metrics.json").read_text())


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("killed", [False, True], ids=["ended well", "killed"])
def test_training_that_ctrl_c_ended_goes_on_to_the_same_numbers(killed, monkeypatch, capsys):
    """The status is 130, and --resume continues from the folder, even if it holds nothing else."""
    assert run(*train("--out", "whole", *SMALL, "--seed", 7)) == 0
    command, step = train("--out", "new", *SMALL, "--seed", 7), Trainer._step
    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "_step", _interrupted_in_step_two(step))
        if killed:
            patched.setattr(runs.RunFolder, "finish", lambda *_: sys.exit(9))
        assert run(*command) == (9 if killed else 130)
    files = {path.name for path in Path("new").iterdir()}
    if killed:
        assert files == {"config.json", "checkpoint.safetensors", "history.csv"}
    else:
        assert "model.safetensors" in files and "interrupted" in capsys.readouterr().out
    assert run(*train("--out", "new", "--resume")) == 0
    for role in ("model", "guide"):
        whole, resumed = (
            load_checkpoint(f"{name}/{role}.safetensors") for name in ("whole", "new")
        )
        assert all(value.equal(resumed[key]) for key, value in whole.items())


def _interrupted_in_step_two(step: Callable) -> Callable:
    def interrupted(self: Trainer, *arguments: object) -> None:
        if self.progress.step == 1:
            signal.raise_signal(signal.SIGINT)
        step(self, *arguments)

    return interrupted


def test_quiet_prints_the_result_alone(place, capsys):
    assert run(*train(*FRESH)) == 0
    quiet = capsys.readouterr()
    assert quiet.err == "" and quiet.out.splitlines()[0].startswith("best_loss")
    assert "written to" not in quiet.out
    assert run("train", "vae", "--steps", "3", "--out", "loud", *SMALL) == 0
    loud = capsys.readouterr()
    assert "3 of 3" in loud.err and "then it draws samples, reconstructions" in loud.err
    assert "written to loud" in loud.out


LATE = """
import os, sys, time
from capsule_zoo.cli import main

time.sleep(8 * int(os.environ["RANK"]))
main(sys.argv[1:])
"""


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch has no distributed package")
def test_two_processes_write_and_print_once(place):
    """The second process starts late, when the first has checked the folder."""
    (place / "late.py").write_text(LATE)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "late.py"]
    for more in (["--steps", "4"], ["--steps", "6", "--resume"]):
        done = subprocess.run(
            [sys.executable, *launcher, "train", "vae", "--out", "new", *SMALL, *more],
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert done.returncode == 0, done.stderr
        assert "in use" not in done.stderr
        lines = [line.split() for line in done.stdout.splitlines()]
        assert [fields[0] for fields in lines] == [
            *("best_loss", "best_step", "steps", "seconds", "stopped", "units", "written")
        ]
    assert load("new").model.latent == 2 and Path("new/samples.png").is_file()
    checkpoint = load_checkpoint("new/checkpoint.safetensors")
    assert checkpoint["config"]["processes"] == 2 and len(checkpoint["progress"]["history"]) == 6


def test_nothing_is_measured_that_could_not_be_kept(place, capsys, monkeypatch):
    monkeypatch.setattr(measurements, "evaluate_run", lambda *_, **options: pytest.fail("measured"))
    monkeypatch.setattr(measurements, "compare_run", lambda *_, **options: pytest.fail("measured"))
    (place / "runs").write_text("a file")
    for command in ("evaluate", "compare"):
        assert run(command, "taken") == 2
        assert "runs/taken cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", [["evaluate", "run"], ["segment", "run"], ["reproduce", DIGITS]]
)
def test_every_seed_is_in_range(command, place, capsys):
    assert run(*command, "--seed", 10**23) == 2
    assert "--seed" in capsys.readouterr().err
