"""Published weights: found by name, equal to the run's, with a card made from records."""

import json
import shlex
from functools import partial
from pathlib import Path

import pytest
import torch

from capsule_zoo import registry
from capsule_zoo.experiments import Options, command_of
from capsule_zoo.records import write_record
from capsule_zoo.registry import load, small_settings
from capsule_zoo.runs import folder as runs
from tools.publish import FIELDS, _command, is_of, publish


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return a run of two steps in a separate folder, with empty weights next to it."""
    monkeypatch.setattr(registry, "WEIGHTS", tmp_path / "weights")
    monkeypatch.chdir(tmp_path)
    sizes = {**small_settings("part-whole"), "image_shape": (1, 28, 28)}
    config = {"data": "digits", "limits": {"steps": 2}, "settings": sizes}
    runs.train("part-whole", tmp_path / "run", config, progress=False)
    return str(tmp_path / "run")


def test_weights_are_found_by_name_and_equal_the_run(run, tmp_path):
    path = publish(run, "mine", [])
    states = [load(source).guide.state_dict() for source in (run, "mine")]
    assert all(torch.equal(v, states[1][k]) for k, v in states[0].items())
    card = json.loads(path.read_text())
    assert card["training"]["command"].startswith("capsule-zoo train part-whole --data digits")
    assert card["training"]["command"].endswith("--steps 2") and card["training"]["steps"] == 2
    assert card["records"] == {} and str(tmp_path) not in path.read_text()
    assert set(FIELDS) <= card.keys() and len(card["checks"]) == 3
    assert card["split"] == {"train": 1197, "validation": 200, "test": 400}
    assert card["headline"]["on"] == "digits/test" and card["headline"]["n"] == 400


def test_the_command_on_a_card_has_every_setting_that_is_not_a_default(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "WEIGHTS", tmp_path / "weights")
    monkeypatch.chdir(tmp_path)
    sizes = {**small_settings("capsule-network"), "classes": 10, "image_shape": (1, 28, 28)}
    settings = dict(transform="shift=1", lr=0.01, batch_size=8, guide="uniform")
    config = {"data": "digits", "limits": {"steps": 2}, "settings": sizes, **settings}
    runs.train("capsule-network", tmp_path / "run", config, progress=False)
    card = json.loads(publish(str(tmp_path / "run"), "mine", []).read_text())
    assert card["training"]["command"] == (
        "capsule-zoo train capsule-network --data digits --seed 0 --guide uniform "
        "--set 'hidden=[12, 12]' --set guide.channels=4 "
        "--batch-size 8 --lr 0.01 --transform shift=1 --steps 2"
    )


def test_weights_are_replaced_only_by_overwriting(run):
    publish(run, "mine", [])
    with pytest.raises(ValueError, match="replace these weights by --overwrite"):
        publish(run, "mine", [])


def test_the_command_on_a_card_can_be_given_to_a_shell():
    made = {"entry": "vae", "settings": {}, "guide": "convolutional", "data": "folder:/my pictures"}
    made |= {"seed": 0, "lr": 0.00123456789, "limits": {"steps": 2_000_001, "minutes": 3.0}}
    assert shlex.split(_command(made, Path("run")))[1:] == [
        *("train", "vae", "--data", "folder:/my pictures", "--seed", "0"),
        *("--lr", "0.00123456789", "--steps", "2000001", "--minutes", "3"),
    ]
    command = command_of("shape-codes/guides", Options(run="my run"), {})
    assert shlex.split(command)[-2:] == ["--run", "my run"]
    assert is_of({"command": command}, "another", "my run")


def test_records_are_put_on_the_card_later(run):
    command = "capsule-zoo reproduce part-whole/toy --run mine"
    note = partial(write_record, command=command, seed=0, data="d", seconds=1.0)
    publish(run, "mine", [])
    before = load("mine").model.state_dict()
    metric = {"value": 0.5, "se": 0.1, "n": 25}
    note("part-whole/toy", {"accuracy": metric})
    publish("mine", "mine", ["part-whole/toy"], overwrite=True)
    card = json.loads((registry.WEIGHTS / "mine.json").read_text())
    assert card["records"]["part-whole/toy"]["metrics"] == {"accuracy": metric}
    assert card["training"]["steps"] == 2
    note("part-whole/toy", {"accuracy": {**metric, "value": 0.75}})
    publish("mine", "mine", [], overwrite=True)  # the records on the card are read again
    card = json.loads((registry.WEIGHTS / "mine.json").read_text())
    assert card["records"]["part-whole/toy"]["metrics"]["accuracy"]["value"] == 0.75
    assert all(torch.equal(v, before[k]) for k, v in load("mine").model.state_dict().items())


@pytest.mark.parametrize(
    ("name", "records", "message"),
    [
        ("../evil", [], "lower case with hyphens"),
        ("/elsewhere/evil", [], "lower case with hyphens"),
        ("Bad Name", [], "lower case with hyphens"),
        ("bad\n", [], "lower case with hyphens"),
        ("mine", ["part-whole/never"], "no record"),
    ],
)
def test_bad_names_and_records_are_refused(run, name, records, message):
    with pytest.raises(ValueError, match=message):
        publish(run, name, records)
    assert not registry.WEIGHTS.exists()
