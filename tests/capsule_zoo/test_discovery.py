"""Discovery describes the zoo in full, in words and in JSON, and agrees with `create`."""

import json
import re
import subprocess
import sys

import pytest
import torch
from terminal import run

import capsule_zoo
from capsule_zoo import describe, list_weights, registry
from capsule_zoo.registry import create, list_models, load, read_recipe, small_settings
from capsule_zoo.settings import flat, nested

NAMES = list_models()
TITLES = ("Guides:", "Latent sites:", "Training:", "- data: `digits`", "Trained weights:",
          "Published numbers:", "References:", "Settings, with their values:")  # fmt: skip


@pytest.fixture(params=NAMES)
def entry(request):
    return create(request.param, **small_settings(request.param))


def test_a_description_holds_what_the_entry_consists_of(entry):
    found, model = describe(entry), entry.model
    known = flat(nested(entry.settings, registry.registered(entry.name).arguments, ""))
    given = {name: value for name, value in known.items() if name in found.settings}
    assert given and all(found.settings[name].default == value for name, value in given.items())
    assert [guide.name for guide in found.guides] == list(entry.guides)
    assert [guide.name for guide in found.guides if guide.default] == [entry.default_guide]
    assert found.sites == model.sites and set(found.figures) == set(entry.figures)
    discrete = [s.name for s in model.discretized().sites if s.discrete]
    assert {*found.relaxed, *(s.name for s in model.sites if s.discrete)} >= set(discrete)
    learned = [sum(p.numel() for p in part.parameters()) for part in (model, entry.guide)]
    assert list(found.parameters.values()) == learned
    assert found.objective.startswith(type(entry.objective).__name__)
    assert found.training.keys() == entry.training.keys()
    assert found.references and found.summary == registry.summary(entry.name)


def test_everything_is_told_in_words_of_its_own(entry):
    """Not by a path of a module, not by the class of a guide alone, nor by another docstring."""
    found = describe(entry)
    told = [guide.what for guide in found.guides]
    assert len(set(told)) == len(told) and all(told)
    assert "`" not in found.summary and "see" not in found.summary.split()
    described = {name: setting.description for name, setting in found.settings.items()}
    referring = [n for n, words in described.items() if words.startswith(("argument", "as for"))]
    assert all(described.values()) and referring == []
    told += [*described.values(), found.summary, found.text]
    unclear = r"(of|as|the same)\b|\w+\.?$|.*(the same, | the same for|top of this file|; see `)"
    assert [words for words in told if re.match(unclear, words)] == []


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
    found = describe("part-whole-affnist")
    assert found.settings["image_shape"].default == (1, 40, 40)
    assert found.settings["guide.reader.centered"].default is True
    assert describe("part-whole").settings["guide.reader.centered"].default is False


def test_the_description_of_weights_ends_in_their_card():
    for name in list_weights():
        found, card = describe(name), read_recipe(name)
        assert found.card == card == found.as_dict()["card"]
        *_, last = str(found).partition(f"how {name} was made\n")
        told = [card["training"]["command"], f"seed      {card['seed']}\n", *card["checks"]]
        told += [record["command"] for record in card["records"].values()]
        assert [words for words in told if words not in last] == []
    assert describe("part-whole").card == {} and "was made" not in str(describe("part-whole"))


def test_weights_are_listed_as_their_cards_say():
    found = list_weights()
    assert list(found) == sorted(path.stem for path in registry.WEIGHTS.glob("*.safetensors"))
    for name, weights in found.items():
        card = read_recipe(name)
        assert (weights.entry, weights.data) == (card["entry"], card["data"])
        assert weights.headline == card["headline"]
        assert weights.bytes == (registry.WEIGHTS / f"{name}.safetensors").stat().st_size
        assert weights in describe(weights.entry).weights
    assert list(list_weights("part*")) == [n for n in found if n.startswith("part")]


def test_list_shows_weights_and_says_that_it_can(capsys):
    assert run("list") == 0
    assert "capsule-zoo list --weights" in capsys.readouterr().out
    assert run("list", "--weights", "--json") == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(json.loads(last)) == list(list_weights())


def test_show_prints_the_description_and_json(capsys):
    assert run("show", "cnn", "--json") == 0
    *lines, last = capsys.readouterr().out.splitlines()
    found, shown = describe("cnn"), "\n".join(lines)
    places = [shown.index(f"\n{title}") for title in TITLES]
    assert places == sorted(places) and "Mazzia" in shown
    names = shown[places[-1] :]
    assert all(f"{name}={each.default!r}" in names for name, each in found.settings.items())
    assert json.loads(last) == found.as_dict() and found.data == "digits"
    assert run("show", "cnn", "--settings") == 0
    shown = capsys.readouterr().out
    assert all(each.description in shown for each in found.settings.values())
    assert shown.endswith(f"{found.settings_list}\n")


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
