"""A folder of the user's own pictures, from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from capsule_zoo import cli
from capsule_zoo.registry import load, small_sizes
from capsule_zoo.runs.folder import make_transform

SIZES = [
    word
    for key, value in small_sizes("part-whole").items()
    if key != "image_shape"
    for word in ("--set", f"{key}={json.dumps(value)}")
]


def run(*words: object) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main([str(word) for word in words])
    return ended.value.code


@pytest.fixture
def pictures(tmp_path) -> Path:
    """Write gray pictures without classes, of two sizes."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    for k in range(12):
        shape = (14, 20) if k % 2 else (30, 22)
        Image.linear_gradient("L").rotate(30 * k).resize(shape).save(folder / f"{k}.png")
    return folder


def test_pictures_of_several_sizes_are_trained_on_at_one(pictures, tmp_path, capsys):
    train = ["train", "part-whole", "--data", f"folder:{pictures}", "--steps", "2", *SIZES]
    train += ["--batch-size", "4"]
    assert run(*train, "--out", tmp_path / "none") == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "--size" in said and "Traceback" not in said
    assert not (tmp_path / "none" / "model.safetensors").exists()
    assert run(*train, "--size", "10x12", "--out", tmp_path / "run") == 0
    assert load(tmp_path / "run").model.image_shape == (1, 10, 12)
    assert json.loads((tmp_path / "run" / "config.json").read_text())["size"] == "10x12"
    assert run("evaluate", tmp_path / "run", "--particles", "2") == 0


@pytest.mark.parametrize("number", ["2.7", "inf", "nan", "-1"])
def test_a_shift_is_of_whole_pixels(number):
    with pytest.raises(ValueError, match="whole number"):
        make_transform(f"shift={number}")
    assert make_transform("shift=2.0").pixels == 2


def small(name: str) -> list[str]:
    sizes = {key: value for key, value in small_sizes(name).items() if key != "classes"}
    del sizes["image_shape"]
    return [word for k, v in sizes.items() for word in ("--set", f"{k}={json.dumps(v)}")]


def test_pictures_without_labels_train_no_classifier_and_have_no_error_rate(
    pictures, tmp_path, capsys
):
    train = ["train", "cnn", "--data", pictures, "--size", "8", *small("cnn"), "--steps", "1"]
    assert run(*train, "--out", tmp_path / "run") == 2
    said = capsys.readouterr().err
    assert "has no labels, which a classifier needs" in said and said.count("\n") == 1
    assert run(*train[:3], "digits", *train[4:], "--out", tmp_path / "run") == 0
    assert run("error-rate", tmp_path / "run", "--data", f"folder:{pictures}") == 2
    assert "has no labels" in capsys.readouterr().err


@pytest.mark.parametrize("classes", [3, 12])
def test_a_folder_says_how_many_classes_there_are_from_anywhere(
    classes, pictures, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for k in range(classes):
        (tmp_path / "labelled" / f"{k:02}").mkdir(parents=True)
        for n in range(2):
            picture = Image.linear_gradient("L").rotate(30 * k + n).resize((8, 8))
            picture.save(tmp_path / "labelled" / f"{k:02}" / f"{n}.png")
    train = ["train", "cnn", "--data", "labelled", *small("cnn"), "--steps", "1", "--out", "run"]
    assert run(*train) == 0
    assert load("run").model.num_classes == classes
    monkeypatch.chdir(pictures)
    assert run("error-rate", tmp_path / "run") == 0
