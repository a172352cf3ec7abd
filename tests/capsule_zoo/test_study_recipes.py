"""Run folders of studies hold recipes, which are read and compared."""

from dataclasses import replace

import pytest

from capsule_zoo import Recipe, load
from capsule_zoo.data import load_dataset
from capsule_zoo.data.transforms import Shift
from capsule_zoo.experiments import Options
from capsule_zoo.experiments.study import Job, Study
from capsule_zoo.experiments.training import begun, train
from capsule_zoo.inference import Inputs, Pace
from capsule_zoo.registry import read_recipe
from capsule_zoo.runs import folder as runs

QUIET = Options(progress=False, processes=1, seed=3)
SIZES = dict(channels=3, guide=dict(hidden=4))


def digits():
    return load_dataset("digits", size=12)


def learn(job: Job[int]) -> int:
    entry = begun("vae", digits(), job.options, latent=job.variant, **SIZES)
    how = dict(lr=0.002, inputs=Inputs(Shift(1)), batch_size=8)
    return train(entry, digits(), job.options, steps=3, **how).steps


def test_the_runs_of_a_study_are_compared_and_loaded(tmp_path):
    study = Study({"two": 2, "three": 3})
    options = replace(QUIET, runs=tmp_path / "study")
    study.run(learn, options)
    folders = study.folders(options)
    recipes = {name: Recipe.read(read_recipe(folder)) for name, folder in folders.items()}
    assert recipes["two"].differences(recipes["three"]) == {"latent": (2, 3)}
    assert recipes["two"].transform == "shift=1" and recipes["two"].limits == {"steps": 3}
    assert load(folders["three"]).model.latent == 3
    with pytest.raises(ValueError, match="an experiment trained this run of vae, in its own way"):
        runs.train("vae", folders["two"], {}, resume=True, progress=False)


def test_a_run_that_continues_another_has_the_recipe_of_both(tmp_path):
    options, how = replace(QUIET, runs=tmp_path), dict(pace=Pace("constant"), batch_size=8)
    entry = begun("vae", digits(), options, latent=2, **SIZES)
    train(entry, digits(), options, name="half", steps=2, **how)
    train(entry, digits(), options, name="rest", after="half", steps=4, **how)
    one, other = (Recipe.read(read_recipe(tmp_path / name)) for name in ("half", "rest"))
    assert one.differences(other) == {"limits": ({"steps": 2}, {"steps": 4})}
