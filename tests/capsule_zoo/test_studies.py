"""Studies: runs share the time, are run folders, and go on after a kill."""

import json
import os
import pickle
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyro
import pytest
import torch
from miniature import few_digits

from capsule_zoo import experiments
from capsule_zoo.data.transforms import Shift
from capsule_zoo.experiments import Options, Result, experiment, find_experiment, reproduce
from capsule_zoo.experiments.study import Job, Study, save_outcome, side_by_side
from capsule_zoo.experiments.training import create_untrained, train
from capsule_zoo.inference import IncompatibleGuide, Inputs, NonFiniteLoss, Pace
from capsule_zoo.records import read_record
from capsule_zoo.registry import create, load, read_recipe
from capsule_zoo.runs import folder as runs
from capsule_zoo.runs.folder import note, read_metrics
from capsule_zoo.runs.recipe import Recipe

pytestmark = pytest.mark.usefixtures("scratch")
QUIET = Options(progress=False, processes=1)
OTHERS = dict(channels=3, guide=dict(hidden=4))
SIZES = dict(image_shape=(1, 12, 12), latent=2, **OTHERS)


def where(job):
    number, parent = job
    return number, os.getpid() != parent, torch.get_num_threads()


@pytest.mark.long
def test_jobs_keep_their_order_on_one_thread_of_other_processes():
    results = side_by_side(where, [(number, os.getpid()) for number in (7, 8)])
    assert results == [(7, True, 1), (8, True, 1)]


def test_errors_of_runs_reach_other_processes():
    lost = pickle.loads(pickle.dumps(NonFiniteLoss(7, "image", None)))
    assert "not finite at step 7" in str(lost) and "'image'" in str(lost) and lost.site == "image"
    error = IncompatibleGuide.of(where, QUIET, ["the reason"], suggest=False)
    sent = pickle.loads(pickle.dumps(error))
    assert str(sent) == "Options does not fit where: the reason" and sent.problems == ["the reason"]


ENDLESS = """
import os, pathlib, sys, time
from capsule_zoo.experiments.study import side_by_side

def task(folder):
    for _ in range(12_000):  # twenty minutes
        pathlib.Path(folder, str(os.getpid())).touch()
        time.sleep(0.1)

if __name__ == "__main__":
    side_by_side(task, [sys.argv[1]] * 2, processes=2)
"""


@pytest.mark.long
def test_runs_end_with_a_study_that_is_killed(tmp_path):
    """Otherwise they would write the files of the study that goes on."""
    script, notes = tmp_path / "endless.py", tmp_path / "notes"
    script.write_text(ENDLESS)
    notes.mkdir()
    study = subprocess.Popen([sys.executable, script, notes])
    wait_until(lambda: len(silences(notes)) == 2 and max(silences(notes)) < 3)
    study.kill()
    study.wait()
    wait_until(lambda: min(silences(notes)) > 3)


def silences(notes: Path) -> list[float]:
    """Return the seconds since each run last touched its note."""
    return [time.time() - note.stat().st_mtime for note in notes.iterdir()]


def wait_until(true: Callable[[], bool], seconds: float = 600.0) -> None:
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until
        time.sleep(0.1)


def test_runs_share_the_time_seed_by_seed():
    jobs = Study({"a": 1, "b": 2}, seeds=2).jobs(replace(QUIET, minutes=16, seed=5, runs=Path("r")))
    assert [(job.name, job.options.seed, job.options.minutes) for job in jobs] == [
        *(("a", 5, 4), ("b", 5, 4)),
        *(("a", 6, 4), ("b", 6, 4)),
    ]
    assert len({job.options.runs for job in jobs}) == 4


def count(job: Job[Path]) -> dict:
    """Note that a run was made, and fail for the seed that is written down."""
    notes = job.variant
    with (notes / "runs.txt").open("a") as file:
        file.write(f"{job.options.seed}\n")
    if (notes / f"fail-{job.options.seed}").exists():
        raise InterruptedError
    return {"drawn": torch.rand(()).item(), "pair": (1, 2)}


def test_a_study_that_was_interrupted_repeats_only_what_had_not_ended(tmp_path):
    study = Study({"one": tmp_path}, seeds=3)
    options = replace(QUIET, runs=tmp_path / "saved")
    (tmp_path / "fail-1").touch()
    with pytest.raises(InterruptedError):
        study.run(count, options)
    (tmp_path / "fail-1").unlink()
    results = study.run(count, options)
    assert (tmp_path / "runs.txt").read_text().split() == ["0", "1", "1", "2"]
    assert list(map(len, results.values())) == [3]
    assert study.run(count, options) == results  # all of them read
    assert results["one"][0]["pair"] == [1, 2]  # as JSON gives it, whether it is read or new


def test_a_study_in_this_process_leaves_random_numbers_alone(tmp_path):
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    Study({"one": tmp_path}).run(count, QUIET)
    assert torch.equal(torch.rand(2), expected)


def trained_pair(options: Options, steps: tuple[int, ...]) -> list:
    """A first pair trained in pieces, and what is drawn after it."""
    pyro.set_rng_seed(1)
    data = few_digits(24, 8, size=12)
    entry = create("vae", **SIZES)
    settings = dict(pace=Pace("constant"), batch_size=8)
    for end in steps:
        run = train(entry, data, options, name="first", steps=end, **settings)
    second = create("vae", **SIZES)
    drawn = torch.rand(3)
    return [*entry.model.state_dict().values(), *second.model.state_dict().values(), drawn], run


def test_a_run_goes_on_where_it_stopped_to_the_bit(tmp_path):
    """Parameters, what is drawn afterwards, and history: stopped on the way, ended, or neither."""
    expected, whole = trained_pair(QUIET, (5,))
    saving = replace(QUIET, runs=tmp_path)
    trained_pair(saving, (3,))
    for _ in range(2):  # from step 3, and from the end
        tensors, run = trained_pair(saving, (5,))
        assert all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True))
        assert run.steps == whole.steps == 5
        assert run.history["loss"].tolist() == whole.history["loss"].tolist()


def test_a_run_continues_another(tmp_path):
    data = few_digits(24, 8, size=12)
    settings = dict(pace=Pace("constant"), batch_size=8)
    entries = [create("vae", **SIZES) for _ in range(2)]
    entries[1].model.load_state_dict(entries[0].model.state_dict())
    entries[1].guide.load_state_dict(entries[0].guide.state_dict())
    options = replace(QUIET, runs=tmp_path)
    train(entries[0], data, options, name="whole", steps=4, **settings)
    train(entries[1], data, options, name="half", steps=2, **settings)
    train(entries[1], data, options, name="rest", after="half", steps=4, **settings)
    states = [entry.model.state_dict() for entry in entries]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    one, other = (Recipe.read(read_recipe(tmp_path / name)) for name in ("half", "rest"))
    assert one.differences(other) == {"limits": ({"steps": 2}, {"steps": 4})}
    with pytest.raises(ValueError, match=r"give options\.runs"):
        train(entries[1], data, QUIET, name="rest", after="half", steps=4, **settings)


def register_toy(calls: list[str]) -> None:
    @experiment("test/toy", data="none", minutes=10)
    def toy(options: Options, *, images: int = 3, fraction: float = 0.5, name: str = "a") -> Result:
        """Train nothing, but save a file.

        Args:
            images: number of images.
        """
        calls.append("again" if (options.runs / "file").exists() else "new")
        (options.runs / "file").write_text("half a run")
        if name == "broken":
            raise InterruptedError
        return Result({"images": (float(images), None, 1), "budget": (options.budget, None, 1)})


def test_settings_are_checked_recorded_and_named_in_the_command(tmp_path):
    register_toy([])
    reproduce("test/toy", replace(QUIET, minutes=4), folder=tmp_path, images=7)
    record = read_record("test/toy", tmp_path)
    assert record["settings"] == {"images": 7, "fraction": 0.5, "name": "a"}
    options = "test/toy --minutes 4 --set images=7"
    assert record["command"] == f"capsule-zoo --import {__name__} reproduce {options}"
    values = {name: metric["value"] for name, metric in record["metrics"].items()}
    assert values == {"images": 7, "budget": 4}
    definition = find_experiment("test/toy")
    assert definition.settings["images"].description == "number of images."
    for wrong, message in (
        ({"image": 3}, "unknown setting of test/toy 'image'; did you mean 'images'?"),
        ({"images": "many"}, "images of test/toy must be a whole number, not 'many'"),
        ({"images": 0}, "images of test/toy must be positive, not 0"),
        ({"fraction": -0.1}, "fraction of test/toy must be positive, not -0.1"),
    ):
        with pytest.raises(ValueError, match=message):
            reproduce("test/toy", QUIET, folder=tmp_path / "new", **wrong)
    assert not (tmp_path / "new").exists()
    reproduce("test/toy", QUIET, folder=tmp_path / "none", fraction=0)
    assert read_record("test/toy", tmp_path / "none")["settings"]["fraction"] == 0


def test_the_same_command_goes_on_and_another_is_refused(tmp_path):
    calls: list[str] = []
    register_toy(calls)
    for _ in range(2):
        with pytest.raises(InterruptedError):
            reproduce("test/toy", QUIET, folder=tmp_path, name="broken")
    with pytest.raises(ValueError, match="holds unfinished runs of test/toy with seed=0; go on"):
        reproduce("test/toy", replace(QUIET, seed=1), folder=tmp_path, name="broken")
    with pytest.raises(ValueError, match="holds unfinished runs of test/toy with settings="):
        reproduce("test/toy", QUIET, folder=tmp_path)
    assert calls == ["new", "again"]
    shutil.rmtree(tmp_path / "test" / "toy")
    for _ in range(2):  # what ended leaves nothing to go on with
        reproduce("test/toy", QUIET, folder=tmp_path)
    assert calls[2:] == ["new", "new"]
    assert [path.name for path in (tmp_path / "test").iterdir()] == ["toy.json"]


def test_a_folder_of_something_else_stays(tmp_path):
    register_toy([])
    (tmp_path / "test" / "toy").mkdir(parents=True)
    (tmp_path / "test" / "toy" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="is in use; choose another folder for the record"):
        reproduce("test/toy", QUIET, folder=tmp_path)
    assert (tmp_path / "test" / "toy" / "notes.txt").read_text() == "mine"


def test_time_of_earlier_runs_counts(tmp_path):
    register_toy([])
    with pytest.raises(InterruptedError):
        reproduce("test/toy", QUIET, folder=tmp_path, name="broken")
    place = tmp_path / "test" / "toy"
    for name, seconds in (("a", 50.0), ("b/c", 100.0)):
        (place / name).mkdir(parents=True)
        (place / name / "history.csv").write_text(f"step,seconds\n1,2.5\n2,{seconds}\n")
    settings = {"images": 3, "fraction": 0.5, "name": "broken"}
    assert experiments._begin(place, "test/toy", QUIET, settings, "") == 150
    assert save_outcome(count, Job("b", tmp_path, replace(QUIET, runs=place / "b")))["pair"] == [
        1,
        2,
    ]
    ended = read_metrics(place / "b")["seconds"]  # in place of those that it was trained for
    note(place / "b" / "c", "seconds", 100.0)  # a part of the run, which has ended too
    assert experiments._begin(place, "test/toy", QUIET, settings, "") == 50 + ended < 100


def train_vae(job: Job[int]) -> float:
    entry = create_untrained(
        "vae", few_digits(24, 8, size=12), job.options, latent=job.variant, **OTHERS
    )
    settings = dict(lr=0.002, inputs=Inputs(Shift(1)), batch_size=8)
    run = train(entry, few_digits(24, 8, size=12), job.options, steps=2, **settings)
    return float(run.history["loss"].iloc[-1])


def test_a_study_is_a_folder_of_run_folders(tmp_path):
    """Each loads, says how it was made, differs from others as it should, and has its outcome."""
    study, options = Study({"two": 2, "three": 3}), replace(QUIET, runs=tmp_path, seed=3)
    results = study.run(train_vae, options)
    folders = study.folders(options)
    recipes = {name: Recipe.read(read_recipe(folder)) for name, folder in folders.items()}
    assert recipes["two"].differences(recipes["three"]) == {"latent": (2, 3)}
    assert recipes["two"].transform == "shift=1" and recipes["two"].limits == {"steps": 2}
    assert recipes["two"].seed == 3 and load(folders["three"]).model.latent == 3
    metrics = json.loads((folders["two"] / "metrics.json").read_text())
    assert metrics["steps"] == 2 and metrics["outcome"] == results["two"][0]
    with pytest.raises(ValueError, match="an experiment trained this run of vae, in its own way"):
        runs.train("vae", folders["two"], {}, resume=True, progress=False)
