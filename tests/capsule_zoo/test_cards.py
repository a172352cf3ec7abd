"""Trained weights: each has a card, loads by name, and still agrees with its card."""

import functools
import json
import os
import re
from dataclasses import replace
from math import hypot
from pathlib import Path

import pytest
import torch

from capsule_zoo.data import Dataset, MissingData, Split
from capsule_zoo.data.datasets import load_tests
from capsule_zoo.data.scenes import SCENES
from capsule_zoo.models import ImageSpace
from capsule_zoo.records import read_record
from capsule_zoo.registry import WEIGHTS, create, load, read_recipe, small_settings
from capsule_zoo.runs import cards
from capsule_zoo.runs.cards import Headline, every, examine, headline
from tools.publish import FIELDS, is_of

NAMES = sorted(path.stem for path in WEIGHTS.glob("*.json"))
MEGABYTES = 64
RESULTS = Path(__file__).resolve().parents[2] / "results"
# Records that the README shows and of which no weights are shipped; their pages say so.
NOT_KEPT = {
    "constellations/parse",  # nothing is trained
    "generative-capsnet/shift-at-length",
    "scenes/counts",  # five seeds, of which none is shipped
    "zoo/gaps",  # a VAE that the experiment trains, as README says
    "capsule-network/equal-network-at-length",  # trained for equal minutes, as README says
    "matrix-capsules/equal-network",
}
SUBSET = 1000  # images: a fifth off the headline is then more than five standard errors
OFFLINE = ("digits", "toys3d", "constellations", *SCENES.keys() - {"multi-mnist"})  # need no file


def needs_files(data: str) -> bool:
    """Return whether a data set is read from files."""
    return data.partition(":")[0] not in OFFLINE


MEASURED = [
    pytest.param(name, marks=[pytest.mark.data] * needs_files(read_recipe(name)["data"]))
    for name in NAMES
]


@functools.cache
def data_for(name: str, size: tuple[int, ...] | None) -> Dataset:
    """Return the data set of a card; skip the test if its files are not available."""
    if needs_files(name) and not os.environ.get("CAPSULE_ZOO_DATA"):
        pytest.skip(f"CAPSULE_ZOO_DATA is not set, so there is no {name} to test with")
    try:
        return load_tests(name, size=size)
    except MissingData as missing:
        pytest.skip(str(missing))


def measured_again(name: str, number: int | None):
    """Return an entry's headline, on this many test images or on all, and its card's headline."""
    entry, card = load(name), read_recipe(name)
    images = isinstance(entry.model.space, ImageSpace)
    size = tuple(entry.model.image_shape[1:]) if images else None
    split = data_for(card["data"], size).test
    if number is not None:  # pictures in color take long
        split = every(split, number // 3 if images and entry.model.image_shape[0] == 3 else number)
    return headline(entry, split), card["headline"]


def test_every_file_of_weights_has_a_card_and_every_card_its_weights():
    assert {path.stem for path in WEIGHTS.glob("*.safetensors")} == set(NAMES)


def test_all_weights_together_are_light():
    sizes = {path.name: path.stat().st_size / 1e6 for path in WEIGHTS.iterdir()}
    assert sum(sizes.values()) < MEGABYTES, sizes


@pytest.mark.parametrize("name", NAMES)
def test_a_card_says_where_its_weights_come_from(name):
    card = json.loads((WEIGHTS / f"{name}.json").read_text())
    assert [field for field in FIELDS if not card.get(field) and card.get(field) != 0] == []
    training = card["training"]
    assert training["command"].startswith("capsule-zoo ") and training["seconds"] > 0
    assert "core" in training["machine"] and {"torch", "capsule-zoo"} <= training["versions"].keys()
    metrics = [m for record in card["records"].values() for m in record["metrics"].values()]
    assert all(m.keys() == {"value", "se", "n"} for m in metrics)
    assert card["headline"]["n"] == card["split"]["test"]


@pytest.mark.parametrize("name", NAMES)
def test_a_card_holds_records_of_its_own_weights_alone(name):
    card = read_recipe(name)
    for experiment, card_record in card["records"].items():
        record = read_record(experiment, RESULTS)
        for made_by in (
            record,
            {**record, "command": card_record["command"]},
        ):  # now, and on the card
            assert is_of(made_by, card["training"]["command"], name), experiment
        old = [n for n, m in card_record["metrics"].items() if m != record["metrics"].get(n)]
        assert not old, f"{experiment}: write the record's metrics into the card, such as {old[0]}"


def test_a_record_of_another_training_is_foreign():
    made = "capsule-zoo train vae --steps 5"
    record = {"command": "capsule-zoo reproduce vae/digits --run mine", "settings": {}}
    assert is_of(record, made, "mine") and not is_of(record, made, "other")
    assert is_of({**record, "settings": {"runs": ["other"]}}, made, "other")
    again = {"command": "capsule-zoo reproduce vae/digits", "settings": {"runs": ["others"]}}
    assert not is_of(again, made, "other") and is_of({**again, "command": made}, made, "other")


def test_every_number_of_shipped_weights_in_the_readme_is_of_the_weights():
    """A record that a card holds is of its weights; all others that the README shows say so."""
    text = (RESULTS.parent / "README.md").read_text()
    experiments = set(re.findall(r"<!-- (?:record|value): (\S+)", text))
    cards_of = {name: read_recipe(name) for name in NAMES}
    for experiment in experiments:
        record = read_record(experiment, RESULTS)
        is_current = any(is_of(record, c["training"]["command"], n) for n, c in cards_of.items())
        assert is_current or experiment in NOT_KEPT, f"{experiment}: measure it by --run, or say so"


@pytest.mark.parametrize("name", NAMES)
def test_weights_load_by_name_and_are_finite(name):
    entry, card = load(name), read_recipe(name)
    assert entry.name == card["entry"] and entry.default_guide == card["guide"]
    for module in (entry.model, entry.guide):
        assert all(torch.isfinite(weights).all() for weights in module.state_dict().values())


@pytest.mark.parametrize("name", MEASURED)
def test_the_headline_holds_on_a_few_images(name):
    measurement, stated = measured_again(name, SUBSET)
    assert SUBSET // 3 <= measurement["n"] <= SUBSET and agrees(measurement, stated), (
        measurement,
        stated,
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", MEASURED)
def test_the_headline_holds_on_all_images(name):
    measurement, stated = measured_again(name, None)
    assert measurement["n"] == stated["n"] and agrees(measurement, stated), (measurement, stated)


def agrees(measurement: Headline, stated: Headline, errors: float = 5.0) -> bool:
    """Return True if two headlines differ by at most `errors` standard errors."""
    if measurement["metric"] != stated["metric"]:
        return False
    error = hypot(measurement["se"], stated["se"])
    return abs(measurement["value"] - stated["value"]) <= errors * error + 1e-6 * abs(
        stated["value"]
    )


def toy_split(shape: tuple[int, int, int], number: int = 8) -> Split:
    images = torch.rand(number, *shape, generator=torch.Generator().manual_seed(1))
    return Split(images, torch.arange(number) % 2, "toy/test")


@pytest.mark.parametrize("name", ["part-whole", "vae", "capsule-rbm", "generative-capsnet"])
def test_a_headline_of_blank_reconstructions_is_the_mean_square_of_the_images(name, monkeypatch):
    entry = create(name, **small_settings(name))
    split = toy_split(entry.model.image_shape)
    assert headline(entry, split) == headline(entry, split)
    monkeypatch.setattr(cards, "reconstruct", lambda *_, **__: 0)
    squares = split.images.square().sum((1, 2, 3))
    measurement = headline(entry, split)
    assert (measurement["metric"], measurement["n"]) == ("squared_error", 8)
    assert measurement["value"] == pytest.approx(squares.mean().item())
    assert measurement["se"] == pytest.approx(squares.std().item() / 8**0.5)


def test_a_classifier_is_known_by_how_often_it_errs():
    entry = create("cnn", **small_settings("cnn"))
    split = toy_split(entry.model.image_shape)
    right = replace(split, labels=entry.model.eval().predict(split.images))
    error = pytest.approx((0.1 * 0.9 / 8) ** 0.5)  # of one in ten, by Laplace's rule
    assert headline(entry, right) == {"metric": "error_rate", "value": 0.0, "se": error, "n": 8}
    wrong = replace(right, labels=1 - right.labels)
    assert headline(entry, wrong)["value"] == 1.0


def test_headlines_agree_within_so_many_standard_errors():
    stated = {"metric": "squared_error", "value": 10.0, "se": 0.3, "n": 100}
    for value, expected in ((12.4, True), (12.6, False), (7.6, True), (7.4, False)):
        assert agrees({**stated, "value": value, "se": 0.4}, stated) is expected
    assert not agrees({**stated, "metric": "error_rate"}, stated)


def test_chosen_images_are_spread_evenly_and_as_many_as_asked():
    split = toy_split((1, 2, 2), 1000)
    assert len(every(split, 300)) == 300 and len(every(split, 2000)) == 1000
    assert torch.equal(every(split, 4).images, split.images[::250])


def test_weights_that_are_not_finite_are_refused():
    entry = create("vae", **small_settings("vae"))
    split = toy_split(entry.model.image_shape)
    data = Dataset("toy", split, split, split)
    assert examine(entry, data)["split"] == {"train": 8, "validation": 8, "test": 8}
    with torch.no_grad():
        next(entry.guide.parameters()).view(-1)[0] = float("nan")
    with pytest.raises(ValueError, match=r"guide weight .* is not finite"):
        examine(entry, data)
