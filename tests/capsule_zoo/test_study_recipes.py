"""Run folders of studies hold recipes, which are read, compared and trained again."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from capsule_zoo import Recipe, load
from capsule_zoo.data import Binarize, load_dataset
from capsule_zoo.data.transforms import Rotate, Shift
from capsule_zoo.experiments import Options
from capsule_zoo.experiments.study import Job, Study
from capsule_zoo.experiments.training import begun, train
from capsule_zoo.inference import Checks, Inputs, Pace
from capsule_zoo.registry import read_recipe
from capsule_zoo.runs import folder as runs

QUIET = Options(progress=False, processes=1, seed=3)
SIZES = dict(channels=3, hidden=4)


def digits():
    return load_dataset("digits", size=12)


def learn(job: Job[int]) -> int:
    entry = begun("vae", digits(), job.options, latent=job.variant, **SIZES)
    how = dict(lr=0.002, inputs=Inputs(Shift(1)), batch_size=8)
    return train(entry, digits(), job.options, steps=3, **how).steps


def again(recipe: Recipe, folder) -> None:
    """Train a recipe by the function of `capsule-zoo train`."""
    given = {name: value for name, value in vars(recipe).items() if name != "entry"}
    runs.train(recipe.entry, folder, given, progress=False)


def same_weights(*folders) -> bool:
    one, other = (load(folder) for folder in folders)
    states = [{**e.model.state_dict(), **e.guide.state_dict()} for e in (one, other)]
    return all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_the_recipe_of_a_study_is_compared_and_trained_again_to_the_bit(tmp_path):
    study = Study({"two": 2, "three": 3})
    options = replace(QUIET, runs=tmp_path / "study")
    study.run(learn, options)
    folders = study.folders(options)
    recipes = {name: Recipe.read(read_recipe(each)) for name, each in folders.items()}
    assert recipes["two"].differences(recipes["three"]) == {"size latent": (2, 3)}
    assert recipes["two"].transform == "shift=1" and recipes["two"].limits == {"steps": 3}
    assert not recipes["two"].besides
    again(recipes["two"], tmp_path / "again")
    assert Recipe.read(read_recipe(tmp_path / "again")) == recipes["two"]
    assert same_weights(folders["two"], tmp_path / "again")


def test_a_run_that_continues_another_has_the_recipe_of_both(tmp_path):
    options, how = replace(QUIET, runs=tmp_path), dict(pace=Pace("constant"), batch_size=8)
    entry = begun("vae", digits(), options, latent=2, **SIZES)
    train(entry, digits(), options, name="half", steps=2, **how)
    train(entry, digits(), options, name="rest", after="half", steps=4, **how)
    one, other = (Recipe.read(read_recipe(tmp_path / name)) for name in ("half", "rest"))
    assert one.differences(other) == {"limits": ({"steps": 2}, {"steps": 4})}
    assert one.besides.keys() == {"pace"}


def moved(entry, images):
    with torch.no_grad():
        next(entry.guide.parameters()).add_(1)


@pytest.mark.parametrize(
    ("data", "settings", "besides"),
    [
        (digits, {}, set()),
        (lambda: digits().transformed(lambda x: 1 - x), {}, {"data"}),
        (lambda: digits().binarized(), {}, {"data"}),
        (lambda: digits().train, {}, {"data"}),
        (digits, dict(inputs=Inputs(Binarize())), {"inputs"}),
        (digits, dict(inputs=Inputs(Rotate(5))), set()),
        (digits, dict(checks=Checks(clock="processor")), {"checks"}),
        (digits, dict(freeze="model", pace=Pace("constant")), {"freeze", "pace"}),
        (digits, dict(optimizer=partial(torch.optim.SGD, momentum=0.5)), {"optimizer"}),
        (digits, dict(start=moved), {"entry"}),
    ],
)
def test_what_a_recipe_does_not_say_is_said_in_words(data, settings, besides, tmp_path):
    options = replace(QUIET, runs=tmp_path)
    entry = begun("vae", digits(), options, latent=2, **SIZES)
    train(entry, data(), options, name="run", steps=1, **settings)
    recipe = Recipe.read(read_recipe(tmp_path / "run"))
    assert recipe.besides.keys() == besides and recipe.data == "digits"
    assert all(" at 0x" not in words for words in recipe.besides.values())
    if besides:
        with pytest.raises(
            ValueError, match=f"recipe does not say the {', '.join(recipe.besides)}"
        ):
            again(recipe, tmp_path / "again")
        assert not (tmp_path / "again").exists()
