"""Discovery describes the zoo in full, in words and in JSON, and agrees with `create`."""

import json
import subprocess
import sys

import pytest
import torch
from terminal import run

import capsule_zoo
from capsule_zoo import describe, list_weights, registry
from capsule_zoo.registry import create, list_models, load, read_recipe, save_entry, small_settings
from capsule_zoo.settings import flat, nest_settings

NAMES = list_models()


@pytest.fixture(params=NAMES)
def entry(request):
    return create(request.param, **small_settings(request.param))


def test_a_description_holds_what_the_entry_consists_of(entry):
    overview, model = describe(entry), entry.model
    flat_settings = flat(
        nest_settings(entry.settings, registry.find_registration(entry.name).arguments, "")
    )
    subset = {name: value for name, value in flat_settings.items() if name in overview.settings}
    assert subset and all(
        overview.settings[name].default == value for name, value in subset.items()
    )
    assert [guide.name for guide in overview.guides] == list(entry.guides)
    assert [guide.name for guide in overview.guides if guide.default] == [entry.default_guide]
    assert overview.sites == model.sites and set(overview.figures) == set(entry.figures)
    discrete = [s.name for s in model.discretize().sites if s.discrete]
    assert {*overview.relaxed, *(s.name for s in model.sites if s.discrete)} >= set(discrete)
    learned = [sum(p.numel() for p in part.parameters()) for part in (model, entry.guide)]
    assert list(overview.parameters.values()) == learned
    assert overview.objective.startswith(type(entry.objective).__name__)
    assert overview.training.keys() == entry.training.keys()
    assert overview.references and overview.summary == registry.summary(entry.name)


def test_names_weights_folders_and_entries_are_described_alike(tmp_path):
    torch.manual_seed(3)
    state = torch.get_rng_state()
    by_name, by_weights = describe("matrix-capsules"), describe("matrix-capsules-mnist")
    assert torch.equal(torch.get_rng_state(), state)
    assert by_name.settings == by_weights.settings and by_weights.source == "matrix-capsules-mnist"
    assert by_weights.parameters == describe(load("matrix-capsules-mnist")).parameters
    small = create("vae", **small_settings("vae"))
    registry.save_entry(small, tmp_path / "run")
    assert describe(tmp_path / "run").settings == describe(small).settings
    with pytest.raises(ValueError, match="did you mean 'matrix-capsules'"):
        describe("matrix-capsule")


def test_settings_of_weights_are_those_they_were_trained_with():
    description = describe("part-whole-affnist")
    assert description.settings["image_shape"].default == (1, 40, 40)
    assert description.settings["guide.reader.centered"].default is True
    assert describe("part-whole").settings["guide.reader.centered"].default is False


def test_weights_are_listed_as_their_cards_say():
    listing = list_weights()
    assert list(listing) == sorted(path.stem for path in registry.WEIGHTS.glob("*.safetensors"))
    for name, weights in listing.items():
        card = read_recipe(name)
        assert (weights.entry, weights.data) == (card["entry"], card["data"])
        assert weights.headline == card["headline"]
        assert weights.bytes == (registry.WEIGHTS / f"{name}.safetensors").stat().st_size
        assert weights in describe(weights.entry).weights
    assert list(list_weights("part*")) == [n for n in listing if n.startswith("part")]


def test_show_prints_the_description_and_json(capsys):
    assert run("show", "cnn", "--json") == 0
    *lines, last = capsys.readouterr().out.splitlines()
    overview, output = describe("cnn"), "\n".join(lines)
    assert all(
        f"{name}={setting.default!r}" in output for name, setting in overview.settings.items()
    )
    assert json.loads(last) == overview.as_dict() and overview.data == "digits"
    assert run("show", "cnn", "--settings") == 0
    output = capsys.readouterr().out
    assert all(setting.description in output for setting in overview.settings.values())
    assert output.endswith(f"{overview.settings_list}\n")


def test_the_version_is_told(capsys):
    assert run("--version") == 0
    assert capsys.readouterr().out == f"capsule-zoo {capsule_zoo.__version__}\n"


def test_all_exports_are_there_and_none_is_imported_before_it_is_used():
    code = (
        "import sys, capsule_zoo\n"
        "assert set(capsule_zoo.__all__) <= set(dir(capsule_zoo))\n"
        "assert 'torch' not in sys.modules\n"
        "for name in capsule_zoo.__all__: getattr(capsule_zoo, name)\n"
        "capsule_zoo.list_models()\n"
        "slow = {'pandas', 'scipy', 'sklearn', 'arviz', 'matplotlib'}  # `list` is to be fast\n"
        "assert not slow & set(sys.modules), slow & set(sys.modules)\n"
        "from capsule_zoo import *\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with pytest.raises(AttributeError, match="it offers"):
        capsule_zoo.nothing  # noqa: B018


def test_settings_that_are_mappings_are_those_of_the_run(tmp_path):
    settings = small_settings("scenes")
    save_entry(create("scenes", **settings), tmp_path)
    assert describe(tmp_path).settings["thing_settings"].default == settings["thing_settings"]
