"""Every command does what its help says, and every mistake is one clear line and status 2."""

import json
import subprocess
import sys
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import pytest
from terminal import run, small_words

from capsule_zoo import cli
from capsule_zoo.cli.options import print_metrics
from capsule_zoo.data import load_dataset
from capsule_zoo.experiments import Options, Result, experiment
from capsule_zoo.inference import error_rate
from capsule_zoo.registry import create, load, save, small_settings

TRAIN = ["train", "part-whole", *small_words("part-whole"), "--batch-size", "32"]


def last_json(capsys) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def get_refusal(capsys, *arguments: str) -> str:
    """Return the message of a refused command."""
    assert run(*arguments) == 2
    message = capsys.readouterr().err
    assert "Traceback" not in message
    return message


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "trained"
    assert run(*TRAIN, "--steps", "3", "--seed", "1", "--out", folder) == 0
    return folder


def test_help_and_lists_import_neither_models_nor_plots():
    code = (
        "import sys; from capsule_zoo.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "assert not {'torch', 'matplotlib', 'arviz'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "reproduce" in done.stdout


@pytest.mark.parametrize(
    "command",
    [c.name or c.callback.__name__.replace("_", "-") for c in cli.app.registered_commands],
)
def test_every_command_has_help_with_an_example(capsys, command):
    assert run(command, "--help") == 0
    assert f"\n    capsule-zoo {command}" in capsys.readouterr().out


def test_train_writes_a_run_folder_that_loads(trained, capsys):
    names = {path.name for path in trained.iterdir()}
    tensors = {f"{name}.safetensors" for name in ("model", "guide", "checkpoint")}
    assert names >= {"config.json", "history.csv", "metrics.json"} | tensors
    entry = load(trained)
    assert {f"{name}.png" for name in entry.figures} <= names
    config = json.loads((trained / "config.json").read_text())
    assert (config["data"], config["seed"], config["batch_size"]) == ("digits", 1, 32)
    assert len(pd.read_csv(trained / "history.csv")) == 3


def test_evaluate_prints_and_keeps_its_metrics(trained, capsys):
    command = ["evaluate", trained, "--images", "6", "--particles", "4", "--json"]
    assert run(*command) == 0
    metrics = last_json(capsys)
    assert run(*command, "--method", "bound") == 0
    metrics["seconds_per_image"] = (again := last_json(capsys))["seconds_per_image"]
    assert again == metrics
    assert metrics["is_bound"] is False and metrics["elbo"] is None
    assert metrics["num_images"] == 6 and metrics["num_particles"] == 4
    record = json.loads((trained / "metrics.json").read_text())
    assert record["bound"] == metrics
    assert record["steps"] == 3


def test_a_number_of_one_image_is_printed_without_an_error(capsys):
    print_metrics({"elbo": -1.5, "elbo_se": float("nan"), "iwae": -1.25, "iwae_se": 0.1})
    assert capsys.readouterr().out == "elbo  -1.5\niwae  -1.25 (s.e. 0.1)\n"


def test_compare_widens_points_and_tunes_the_others(trained, capsys):
    before = {p.name: p.read_bytes() for p in trained.glob("*.safetensors")}
    command = ["compare", trained, "--guides", "delta,normal", "--tune-steps", "2"]
    assert run(*command, "--images", "6", "--particles", "4", "--json") == 0
    table = last_json(capsys)
    assert list(table) == ["delta", "delta, widened", "normal"]
    assert [row["is_bound"] for row in table.values()] == [False, True, True]
    assert table["delta"]["elbo"] is None and table["normal"]["elbo"] is not None
    assert (trained / "compare.png").is_file()
    assert len(pd.read_csv(trained / "compare.csv")) == 3
    assert {p.name: p.read_bytes() for p in trained.glob("*.safetensors")} == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("evaluate", "qqqq"), "the nearest of "),
        (("segment", "constellations-learned"), "capsule_zoo.runs.objects.parse_file"),
    ],
)
def test_trained_weights_are_named_or_read_by_another_function(arguments, message, capsys):
    assert message in get_refusal(capsys, *arguments)


def test_reproduce_writes_a_record(scratch, tmp_path, capsys):
    @experiment("test/toy", data="none")
    def toy(options: Options) -> Result:
        """What a toy shows."""
        table = pd.DataFrame({"seed": [options.seed]})
        return Result({"share": (0.5, 0.1, 25)}, {"plot": plt.figure()}, table)

    assert run("reproduce", "test/toy", "--seed", "7", "--out", tmp_path, "--json") == 0
    assert last_json(capsys) == {"share": {"value": 0.5, "se": 0.1, "n": 25}}
    record = json.loads((tmp_path / "test" / "toy.json").read_text())
    command = f"capsule-zoo --import {__name__} reproduce test/toy --seed 7"
    assert record["command"] == command
    assert (record["seed"], record["data"]) == (7, "none")
    assert (tmp_path / "test" / "toy_plot.png").is_file()
    assert run("reproduce") == 0
    lines = capsys.readouterr().out.partition("\n\n")[0].splitlines()
    (column,) = (line.index("What a toy shows.") for line in lines if "test/toy" in line)
    assert all(line[:column].endswith("  ") and line[column] != " " for line in lines)
    assert "did you mean 'test/toy'" in get_refusal(capsys, "reproduce", "test/tiy")
    again = ["reproduce", "test/toy", "--out", tmp_path, "--keep", tmp_path]
    assert "is in use" in get_refusal(capsys, *again)
    with pytest.raises(ValueError, match="registered already"):
        experiment("test/toy")(toy)


@pytest.mark.parametrize("command", [("evaluate",), ("figure", "samples")])
def test_a_path_is_the_folder_of_a_run(command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = get_refusal(capsys, *command, "runs/nothing")
    assert message == (
        "capsule-zoo: no such run folder: runs/nothing; make one by: capsule-zoo train ENTRY\n"
    )
    for name in ("vae-digits-0", "vae-digits-1", "draw-mnist-0", "old"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.json").touch()
    (tmp_path / "runs" / "old" / "config.json").unlink()
    message = get_refusal(capsys, *command, "runs/vae-digit-1")
    assert "no such run folder: runs/vae-digit-1; did you mean runs/vae-digits-1 or" in message
    assert "holds no config.json: runs; did you mean runs/" in get_refusal(capsys, *command, "runs")
    assert "holds no config.json: runs/old; make one" in get_refusal(capsys, *command, "runs/old")


@pytest.mark.parametrize(
    ("name", "units"),
    [("cnn", "nats per image, of log p(label | image)"), ("vae", "nats per image")],
)
def test_a_classifier_ends_training_with_an_error_rate(name, units, capsys, tmp_path):
    command = ["train", name, *small_words(name, "classes"), "--steps", "2"]
    assert run(*command, "--out", tmp_path / "run", "--json") == 0
    metrics = last_json(capsys)
    assert metrics["units"] == units and metrics == json.loads(
        (tmp_path / "run" / "metrics.json").read_text()
    )
    if name == "vae":
        assert "validation_error_rate" not in metrics
        return
    entry = load(tmp_path / "run")
    rate = error_rate(entry.model, entry.guide, load_dataset("digits", size=8).validation)
    assert metrics["validation_error_rate"] == rate.value
    assert metrics["validation_error_rate_se"] == rate.se


def test_a_warning_to_the_user_is_one_line(monkeypatch):
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    assert run("list", "vae") == 0
    line = warnings.formatwarning("be careful", UserWarning, "a.py", 3)
    assert line == "capsule-zoo: warning: be careful\n"


def test_what_another_library_plans_is_no_warning_of_ours(monkeypatch):
    """ArviZ says so once a day, in several lines."""
    from capsule_zoo import registry

    def imported(*_: object) -> list[str]:
        warnings.warn("\nThe library will change.\nSee its page.", FutureWarning, stacklevel=2)
        warnings.warn("be careful", stacklevel=2)
        return ["vae"]

    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    monkeypatch.setattr(registry, "list_models", imported)
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        assert run("list") == 0
    assert {str(record.message) for record in records} == {"be careful"}


def test_errors_of_ours_keep_their_traceback(monkeypatch):
    from capsule_zoo import registry

    def broken(pattern: str) -> list[str]:
        raise RuntimeError("a defect")

    monkeypatch.setattr(registry, "list_models", broken)
    with pytest.raises(RuntimeError, match="a defect"):
        cli.main(["list"])


def test_a_pair_of_a_notebook_is_measured_and_draws_samples(tmp_path, capsys):
    entry = create("part-whole", **small_settings("part-whole"))
    save(entry.model, entry.guide.with_poses("normal"), tmp_path, data="digits", seed=0)
    assert run("evaluate", tmp_path, "--images", 4, "--particles", 2) == 0
    assert run("compare", tmp_path, "--images", 4, "--particles", 2, "--guides", "saved") == 0
    assert run("figure", "samples", tmp_path) == 0 and (tmp_path / "samples.png").is_file()
    capsys.readouterr()
    assert "unknown figure 'parses'" in get_refusal(capsys, "figure", "parses", tmp_path)
    assert "which is no entry of the zoo" in get_refusal(capsys, "show", tmp_path)
