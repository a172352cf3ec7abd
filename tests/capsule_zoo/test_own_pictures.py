"""A folder of the user's own pictures, from the command line."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from terminal import run, small_words

from capsule_zoo.data import load_dataset
from capsule_zoo.registry import create, find_registration, load, save_entry, small_settings
from capsule_zoo.runs.folder import _begin, open_pictures, open_run, resume_recipe
from capsule_zoo.runs.recipe import Recipe


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
    train = ["train", "part-whole", "--data", f"folder:{pictures}", "--steps", "2"]
    train += [*small("part-whole"), "--batch-size", "4"]
    assert run(*train, "--out", tmp_path / "none") == 2
    message = " ".join(capsys.readouterr().err.split())
    assert "--size" in message and "Traceback" not in message
    assert not (tmp_path / "none" / "model.safetensors").exists()
    assert run(*train, "--size", "10x12", "--out", tmp_path / "run") == 0
    assert load(tmp_path / "run").model.image_shape == (1, 10, 12)
    assert json.loads((tmp_path / "run" / "config.json").read_text())["size"] == "10x12"
    assert run("evaluate", tmp_path / "run", "--particles", "2") == 0


def small(name: str) -> list[str]:
    """Return an entry's small sizes as words; pictures have a shape and classes of their own."""
    return small_words(name, "classes", "image_shape")


@pytest.mark.parametrize(
    ("entry", "size"), [("shape-codes", "kinds"), ("stacked-capsule-autoencoder", "objects")]
)
def test_fewer_pictures_than_clusters_are_refused_before_training(
    entry, size, pictures, tmp_path, capsys
):
    train = ["train", entry, "--data", pictures, "--size", "12", *small(entry)]
    assert run(*train, "--set", f"{size}=64", "--steps", "4", "--out", tmp_path / "run") == 2
    message = " ".join(capsys.readouterr().err.split())
    assert "has 9 training pictures" in message and f"--set {size}=N" in message
    assert "stage 1" not in message


def test_no_run_is_written_where_it_would_be_a_class(pictures, monkeypatch, capsys):
    monkeypatch.chdir(pictures)
    train = ["train", "vae", "--data", ".", "--size", "12", "--steps", "1", *small("vae")]
    assert run(*train) == 2
    assert "vae-pictures-0 lies among the pictures of" in capsys.readouterr().err
    assert not (pictures / "runs").exists()
    for side in ("train", "test"):
        shutil.copytree(pictures, pictures.parent / "both" / side)
    monkeypatch.chdir(pictures.parent / "both")
    assert run(*train) == 0  # beside folders train and test nothing is read
    assert run("evaluate", "runs/vae-both-0", "--images", "2", "--particles", "2") == 0


def test_a_single_test_image_is_drawn_as_a_pair_with_itself():
    entry = create("shape-codes", **small_settings("shape-codes"))
    figure = entry.figures["morphs"](entry, torch.rand(1, *entry.model.image_shape))
    assert len(figure.axes[0].get_yticks()) == 1


def test_a_run_goes_on_with_pictures_that_were_moved(pictures, tmp_path):
    entry, config = create("vae", **small_settings("vae")), {"data": f"folder:{tmp_path / 'copy'}"}
    save_entry(entry, tmp_path / "run", data=f"folder:{pictures}")
    with pytest.raises(ValueError, match="leave data="):
        resume_recipe(tmp_path / "run", "vae", config)
    shutil.move(pictures, tmp_path / "copy")
    assert resume_recipe(tmp_path / "run", "vae", config).data == config["data"]
    with pytest.raises(ValueError, match="leave seed="):
        resume_recipe(tmp_path / "run", "vae", config | {"seed": 1})


def test_a_folder_says_how_many_classes_there_are_from_anywhere(pictures, tmp_path, monkeypatch):
    classes = 12
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
    assert run("evaluate", tmp_path / "run") == 0


def test_classes_are_told_apart_by_their_names(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for place in ("three/a", "three/b", "three/c", "two/b", "two/c"):
        (tmp_path / place).mkdir(parents=True)
        for n in range(6):
            picture = Image.new("L", (8, 8), 100 * "abc".index(place[-1]) + n)
            picture.putpixel((0, 0), 255)
            picture.save(tmp_path / place / f"{n}.png")
    train = ["train", "cnn", "--data", "three", "--out", "run", "--steps", "1", "--quiet"]
    assert run(*train, *small("cnn")) == 0
    monkeypatch.setattr(
        type(load("run").model),
        "predict",
        lambda model, x: (255 / 100 * x[:, 0, 1, 1]).round().long(),
    )
    for data in ("three", "two"):
        assert run("evaluate", "run", "--data", data, "--json") == 0
        assert json.loads(capsys.readouterr().out.splitlines()[-1])["error_rate"] == 0
    with pytest.warns(UserWarning, match="by number, because one has no names: 0 for a, 1 for b"):
        assert run("evaluate", "run", "--data", "digits") == 2
    assert "labels must lie in 0 to 2, but these span 0 to 9" in capsys.readouterr().err


def test_gray_pictures_are_measured_by_a_model_of_color_and_train_it_further(pictures, tmp_path):
    """A run whose gray pictures once counted as RGB, and scenes in color, read gray pictures."""
    gray = load_dataset(pictures, size=8)
    options = ["--data", pictures, "--size", "8", "--out", tmp_path / "run", "--steps"]
    color = ["--set", "image_shape=[3, 8, 8]"]
    assert run("train", "vae", *small("vae"), *options, 2, *color) == 0
    for data in (open_run(str(tmp_path / "run"))[1], open_run(str(tmp_path / "run"), "digits")[1]):
        assert data.image_shape == (3, 8, 8) and data.train.images.is_contiguous()
    images = open_run(str(tmp_path / "run"))[1].test.images
    assert torch.equal(images, gray.test.images.expand(-1, 3, -1, -1))
    assert run("train", "vae", *options, 3, "--resume") == 0
    where = (str(tmp_path / "run"), str(pictures), None, True)
    assert open_pictures(*where, False, tmp_path / "out")[1].images.shape == (12, 3, 8, 8)
    assert len(gray.train.with_channels(1).images) == len(gray.train.with_channels(3).images) == 9
    with pytest.raises(ValueError, match=r"make the images gray by images\.mean\(1"):
        create("vae", image_shape=(1, 8, 8)).model.space.check(images)


@pytest.mark.parametrize("entry", ["part-whole", "shape-codes", "stacked-capsule-autoencoder"])
def test_training_says_where_color_does_not_work(entry, pictures, tmp_path):
    Image.new("RGB", (8, 8), (255, 0, 0)).save(pictures / "red.png")
    settings = {"data": str(pictures), "size": "8", "limits": {"steps": 1}}
    with pytest.warns(UserWarning, match=f"are in color, of which {entry} draws blurs: make the"):
        _begin(Recipe(entry, **settings), find_registration(entry), None)
    _begin(Recipe("vae", **settings), find_registration("vae"), None)
