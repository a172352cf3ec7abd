"""Experiments on scenes and the command that segments, in miniature."""

import json

import pandas as pd
import pytest
import torch
from PIL import Image

from capsule_zoo.cli import main
from capsule_zoo.data import load_dataset
from capsule_zoo.experiments import Options, find_experiment
from capsule_zoo.experiments.scenes.air import TutorialAir, warped
from capsule_zoo.experiments.scenes.segmentation import BRIGHTER, windows_of
from capsule_zoo.registry import load, small_sizes
from capsule_zoo.runs import folder as runs
from capsule_zoo.runs.objects import segment_run

SIZES = {key: small_sizes("scenes")[key] for key in ("window", "thing_sizes", "glimpse", "hidden")}


def test_counts_of_every_seed(tmp_path, mnist_root, monkeypatch):
    monkeypatch.setattr("capsule_zoo.experiments.scenes.counts.DATA", "multi-mnist:train=40,test=6")
    monkeypatch.setattr("capsule_zoo.experiments.scenes.counts.MORE", (3,))
    chosen = dict(seeds=2, length=0.005, every=2, draws=2, tested=6, bounds=2, more=2, sizes=SIZES)
    options = Options(data_root=mnist_root, progress=False, processes=1, runs=tmp_path)
    result = find_experiment("scenes/counts")(options, **chosen)
    right = result.metrics["count_accuracy"]
    assert {"elbo", "iwae_100"} <= result.metrics.keys() and "3_digits" in right
    assert right["5_minutes_worst"][0] <= right["5_minutes"][0]
    assert result.figures[""].axes[0].get_xlabel() == "minutes of training"


def test_air_of_the_tutorial():
    air = TutorialAir(20)
    left = torch.cat([air.more.new_ones(1), air.more.cumprod(0)])
    law = left - torch.cat([left[1:], left.new_zeros(1)])
    torch.testing.assert_close(law[1:] / law[:-1], torch.full((3,), 0.01))
    pictures, shift = torch.rand(2, 9, 9), torch.tensor([[0.1, -0.2], [0.0, 0.3]])
    scale = torch.tensor([3.0, 2.0])
    there = warped(pictures, scale, shift, 90)
    back = warped(there, 1 / scale, -shift / scale[:, None], 9)
    assert (back - pictures)[:, 2:-2, 2:-2].abs().mean() < 0.05
    before = [p.clone() for p in air.parameters()]
    air.svi().step(torch.rand(4, 1, 20, 20))
    assert all((p != q).any() for p, q in zip(air.parameters(), before, strict=True))


def test_segmentation(tmp_path, mnist_root, monkeypatch):
    module = "capsule_zoo.experiments.scenes.segmentation"
    small = {n: f"{n}:train=30,test=4" for n in ("multi-mnist", "multi-sprites", "tetrominoes")}
    monkeypatch.setattr(f"{module}.DATA", small["multi-mnist"])
    read = lambda name, root: load_dataset(small.get(name, name), root)  # noqa: E731
    monkeypatch.setattr(f"{module}.load_dataset", read)
    options = Options(data_root=mnist_root, progress=False, processes=1, runs=tmp_path)
    chosen = dict(seeds=2, length=0.005, draws=1, tested=4, named=40, sizes=SIZES)
    result = find_experiment("scenes/segmentation")(options, **chosen)
    sets = {name.replace("-", "_") for name in small}
    assert result.metrics["ari"].keys() == {*sets, "tetrominoes_best"}
    assert result.metrics["ari_worst"].keys() == sets == set(result.figures)
    assert result.metrics["iou_worst"][0] <= result.metrics["iou"][0]
    assert {"count_accuracy", "classes_found"} <= result.metrics.keys()


def test_a_window_shows_a_digit_as_mnist_does():
    """A digit of MNIST is 20 pixels long, and its center of mass lies at the middle of pixel 14."""
    row = torch.arange(20.0)
    digit = torch.zeros(2, 1, 28, 28)
    digit[:, 0, 4:24, 9:20] = 0.8 * (1 + (row - 9.5) / 66.5)[:, None]  # its variance is 33.25
    mass, place = digit[0, 0], torch.arange(28.0)
    assert (mass.sum(1) @ place / mass.sum()).item() == pytest.approx(14, abs=1e-5)
    dirty = digit.clone()
    dirty[:, 0, 14, 2] = 0.9  # a crumb of another digit
    owners = torch.where(dirty[:, 0] > 0, 2, 0)
    found = windows_of(dirty, owners, torch.tensor([1, 0]))
    torch.testing.assert_close(found[0], (BRIGHTER * digit[0]).clamp(0, 1), atol=1e-4, rtol=0)
    assert found[1].abs().max() == 0  # which the other slot holds


def test_segment_writes_masks_tables_and_pictures(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    sizes = {**small_sizes("scenes"), "image_shape": (3, 35, 35)}
    given = {"data": "tetrominoes:train=20,test=3", "limits": {"steps": 2}, "sizes": sizes}
    runs.train("scenes", tmp_path / "run", given, progress=False)
    assert load("run").model.image_shape == (3, 35, 35)
    with pytest.raises(SystemExit) as ended:
        main(["segment", "run", "--draws", "1", "--temperature", "0.1", "--json"])
    assert ended.value.code == 0
    found = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert found["images"] == 3 and 0 <= found["all_slots_filled"] <= 3
    folder = tmp_path / "run" / "objects"
    assert (
        len(list((folder / "masks").iterdir())) == 3 == len(list((folder / "pictures").iterdir()))
    )
    full = pd.read_csv(folder / "counts.csv")["count"] == load("run").model.slots
    assert full.sum() == found["all_slots_filled"]
    assert len((folder / "objects.csv").read_text().splitlines()) == 1 + found["objects"]
    larger = ["--data", "multi-sprites:train=20,test=2", "--slots", "3", "--out", "larger"]
    with pytest.raises(SystemExit) as ended:
        main(["segment", "run", "--draws", "1", *larger])
    assert ended.value.code == 0
    with Image.open(tmp_path / "larger" / "masks" / "1.png") as mask:
        assert mask.size == (64, 64)
    assert pd.read_csv(tmp_path / "larger" / "counts.csv")["count"].between(0, 3).all()


def test_segment_reads_all_pictures_of_a_folder_and_names_their_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = {**small_sizes("scenes"), "image_shape": (1, 35, 35)}
    (tmp_path / "own").mkdir()
    for number in range(6):
        gray = Image.new("L", (35, 35), 40 * number)
        gray.save(tmp_path / "own" / f"picture-{number}.png")
    given = {"data": "folder:own", "limits": {"steps": 1}, "sizes": sizes}
    runs.train("scenes", tmp_path / "run", given, progress=False)
    for options, number in ((["--out", "all"], 6), (["--held-out", "--out", "few"], 1)):
        with pytest.raises(SystemExit) as ended:
            main(["segment", "run", "--draws", "1", *options])
        counts = pd.read_csv(tmp_path / options[-1] / "counts.csv")
        assert ended.value.code == 0 and len(counts) == number
        if number == 6:
            assert counts["file"].tolist() == [f"picture-{n}.png" for n in range(6)]
            assert "file" in pd.read_csv(tmp_path / "all" / "objects.csv")
    segment_run(load("run"), load_dataset("folder:own").test, tmp_path / "all", draws=1)
    assert [f.name for f in (tmp_path / "all" / "masks").iterdir()] == ["0.png"]
    with pytest.raises(SystemExit):
        main(["segment", "run", "--draws", "1", "--out", "all"])
    for number in (0, 5):  # the corner of a picture is in no object, or in none that covers it
        with Image.open(tmp_path / f"all/pictures/{number}.png") as shown:
            assert (max(shown.getpixel((0, 0))) > 50) == (number == 5)


def test_the_run_of_an_object_model_is_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = {**small_sizes("vae"), "image_shape": (1, 8, 8)}
    given = {"data": "digits", "limits": {"steps": 1}, "sizes": sizes}
    runs.train("vae", "runs/digits", given, progress=False)
    sizes = {**small_sizes("scenes"), "image_shape": (3, 35, 35), "thing": "runs/digits"}
    del sizes["thing_sizes"]
    given = {"data": "tetrominoes:train=4,test=2", "limits": {"steps": 1}, "sizes": sizes}
    runs.train("scenes", "runs/scenes", given, progress=False)
    runs.train("scenes", "runs/scenes", {**given, "limits": {"steps": 2}}, resume=True)
    monkeypatch.chdir(tmp_path / "runs")
    assert load("scenes").model.thing.image_shape == (1, 8, 8)


def test_segment_needs_scenes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    given = {"data": "digits", "limits": {"steps": 1}, "sizes": small_sizes("vae")}
    sizes = {**given["sizes"], "image_shape": (1, 28, 28)}
    runs.train("vae", tmp_path / "run", {**given, "sizes": sizes}, progress=False)
    with pytest.raises(SystemExit):
        main(["segment", "run"])
    assert "finds no objects" in capsys.readouterr().err
