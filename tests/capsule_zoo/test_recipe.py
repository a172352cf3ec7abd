"""A recipe is data: it is written, read and compared, and it makes the same run again."""

import json

import pytest

from capsule_zoo import Recipe, load
from capsule_zoo.inference import ImportanceWeightedELBO
from capsule_zoo.registry import read_recipe, small_settings
from capsule_zoo.runs.folder import train
from capsule_zoo.runs.recipe import make_objective

SIZES = {**small_settings("vae"), "image_shape": (1, 6, 5)}


def test_what_a_run_writes_is_its_recipe_and_makes_it_again(tmp_path):
    arguments = dict(
        settings=SIZES, limits={"steps": 2}, objective="ImportanceWeightedELBO", transform="shift=1"
    )
    train("vae", tmp_path / "one", arguments, progress=False)
    recipe = Recipe.read(read_recipe(tmp_path / "one"))
    assert Recipe.read(json.loads(json.dumps(recipe.config()))) == recipe
    assert recipe.objective == "ImportanceWeightedELBO" and recipe.transform == "shift=1"
    again = {name: value for name, value in vars(recipe).items() if name != "entry"}
    train(recipe.entry, tmp_path / "two", again, progress=False)
    assert Recipe.read(read_recipe(tmp_path / "two")) == recipe
    states = [load(tmp_path / name).guide.state_dict() for name in ("one", "two")]
    assert all(value.equal(states[1][name]) for name, value in states[0].items())


def test_recipes_say_in_what_they_differ():
    one = Recipe("vae", {"latent": 2}, seed=1, limits={"steps": 3})
    other = Recipe("vae", {"latent": 3, "hidden": 4}, seed=1, limits={"epochs": 1})
    expected = {"latent": (2, 3), "hidden": (None, 4), "limits": ({"steps": 3}, {"epochs": 1})}
    assert one.differences(other) == expected and not one.differences(one)


def test_an_objective_is_named_or_refused():
    assert isinstance(make_objective("ImportanceWeightedELBO"), ImportanceWeightedELBO)
    with pytest.raises(ValueError, match="unknown objective 'TraceELBO'; did you mean 'Trace_ELBO"):
        make_objective("TraceELBO")
    with pytest.raises(ValueError, match="unknown objective 'Objective'"):
        make_objective("Objective")


@pytest.mark.filterwarnings("ignore:Failed to verify mean field")
@pytest.mark.parametrize(
    ("entry", "objective", "message"),
    [
        ("vae", "SpreadLoss", "model must be MatrixCapsules for SpreadLoss"),
        ("vae", "SummedPresences", "guide must propose objects of Scenes"),
        ("capsule-helmholtz", "TraceMeanField_ELBO", "does not serve capsule-helmholtz"),
        ("capsule-helmholtz", "TraceTailAdaptive_ELBO", "does not serve capsule-helmholtz"),
    ],
)
def test_an_objective_that_does_not_fit_is_refused(entry, objective, message, tmp_path):
    config = dict(objective=objective, settings=small_settings(entry), limits={"steps": 1})
    with pytest.raises(ValueError, match=message):
        train(entry, tmp_path / "run", config, progress=False)
