"""Experiments on scenes and the command that segments, in miniature."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from sklearn.metrics import adjusted_rand_score
from terminal import run
from watermarks import watch, watermarked

from capsule_zoo.data import Split, load_dataset
from capsule_zoo.data.scenes import Objects
from capsule_zoo.experiments import Job, Options, find_experiment, list_experiments
from capsule_zoo.experiments.scenes import counts, segmentation, whole_pictures
from capsule_zoo.experiments.scenes.counts import LARGE, PLACES, ways
from capsule_zoo.experiments.scenes.segmentation import BRIGHTER, best_of_pieces, windows_of
from capsule_zoo.inference.whole_pictures import PictureObjects
from capsule_zoo.registry import create, find_registration, load, small_settings
from capsule_zoo.runs import folder as runs
from capsule_zoo.runs import objects
from capsule_zoo.runs.folder import open_pictures, open_run
from capsule_zoo.runs.objects import segment_run
from capsule_zoo.zoo.scenes.entry import pair_with_canvas

SIZES = {key: small_settings("scenes")[key] for key in ("window", "thing_settings", "guide")}


@pytest.fixture
def marked(monkeypatch):
    """Mark the splits of scenes, and let what trains on or counts the wrong ones fail."""
    list_experiments()
    watch(monkeypatch)
    read = counts.load_dataset
    marks = lambda *arguments, **options: watermarked(read(*arguments, **options))  # noqa: E731
    monkeypatch.setattr(counts, "load_dataset", marks)


def test_counts_of_every_seed(tmp_path, mnist_root, monkeypatch, marked):
    monkeypatch.setattr("capsule_zoo.experiments.scenes.counts.DATA", "multi-mnist:train=40,test=6")
    monkeypatch.setattr("capsule_zoo.experiments.scenes.counts.MORE", (3,))
    fewer = dict(
        DRAWS=1, TEST_SCENES=6, BOUND_SCENES=2, MORE_SCENES=2, SIZES={"counts": "learned", **SIZES}
    )
    for name, value in fewer.items():
        monkeypatch.setattr(counts, name, value)
    options = Options(data_root=mnist_root, progress=False, processes=1, runs=tmp_path)
    result = find_experiment("scenes/counts")(options, seeds=2, length=0.002, every=2)
    right = result.metrics["count_accuracy"]
    assert {"elbo", "iwae_100"} <= result.metrics.keys() and "3_digits" in right
    assert right["5_minutes_worst"][0] <= right["5_minutes"][0]


def test_what_is_measured_last_counts_and_not_what_is_best(monkeypatch):
    """Counts fall from check to check here; the third lies beyond five minutes."""
    seconds, fractions = (100.0, 290.0, 310.0, 700.0), iter((0.9, 0.8, 0.7, 0.6, 0.5))

    def pretended(entry, data, options, minutes, checks):
        for step, passed in enumerate(seconds):
            checks.callbacks[0](SimpleNamespace(seconds=passed, step=step))

    dataset = SimpleNamespace(test=Split(torch.rand(2, 1, 12, 10)))
    monkeypatch.setattr(counts, "load_dataset", lambda *_: dataset)
    monkeypatch.setattr(
        counts, "create_untrained", lambda *_, **__: create("scenes", **small_settings("scenes"))
    )
    monkeypatch.setattr(counts, "train", pretended)
    monkeypatch.setattr(counts, "accuracy", lambda *_, **__: (next(fractions), 0.01, 2))
    monkeypatch.setattr(counts, "MORE", ())
    monkeypatch.setattr(counts, "BOUND_SCENES", 2)
    job = Job("scenes", 12.0, Options(progress=False))
    metrics = counts.one_seed(job)["numbers"]
    assert metrics["count_accuracy_5_minutes"][0] == 0.8
    assert metrics["count_accuracy_30_minutes"][0] == 0.6 and metrics["steps"][0] == 3
    seconds = (301.0,)
    metrics = counts.one_seed(job)["numbers"]
    assert "count_accuracy_5_minutes" not in metrics  # nothing was measured by then
    assert metrics["count_accuracy_30_minutes"][0] == 0.5


def test_what_counts_at_drawn_places_shares_the_parameters_that_are_trained():
    entry = create("scenes", **small_settings("scenes"))
    reader = ways(entry)["drawn_places"]
    wide = pair_with_canvas(reader, *LARGE)
    assert entry.guide.temperature == 0 < PLACES == reader.guide.temperature
    assert wide.guide.temperature == PLACES and wide.guide.model is wide.model
    addresses = [p.data_ptr() for p in entry.guide.parameters()]
    assert addresses == [p.data_ptr() for p in reader.guide.parameters()]


def test_ways_of_reading(tmp_path, mnist_root, monkeypatch, marked):
    monkeypatch.setattr("capsule_zoo.experiments.scenes.counts.MORE", (3,))
    for name, value in dict(TEST_SCENES=4, MORE_SCENES=2, DRAWS=1).items():
        monkeypatch.setattr(counts, name, value)
    options = Options(data_root=mnist_root, progress=False)
    result = find_experiment("scenes/reading")(options)
    for name in ("count_accuracy_3_digits", "count_accuracy_one_draw", "count_calibration"):
        assert result.metrics[name].keys() == {"peeling", "two_sweeps", "drawn_places"}
    pixels = result.metrics["true pixels above"].numbers
    assert pixels["ari_with_ground"].keys() == {"ink_50", "ink_30", "ink_10"}
    assert result.figures.keys() >= {"by_number", "reliability"}


def test_confidence_and_calibration_are_of_the_most_likely_number(monkeypatch):
    """Three of four counts are right, and the wrong one is as sure as the others."""
    chances = torch.tensor([[0.9, 0.1, 0], [0.1, 0.9, 0], [0, 0.1, 0.9], [0.9, 0, 0.1]])
    read = SimpleNamespace(count_probabilities=chances, counts=chances.argmax(1))
    truth = Objects(
        torch.zeros(4, 1, 1),
        torch.tensor([[-1, -1], [1, -1], [1, 2], [1, 2]]),
        torch.zeros(4, 2, 4),
    )
    scenes = Split(torch.zeros(4, 1, 1, 1), objects=truth)
    monkeypatch.setattr(counts, "load", lambda _: create("scenes", **small_settings("scenes")))
    monkeypatch.setattr(counts, "load_dataset", lambda *_: SimpleNamespace(test=scenes))
    monkeypatch.setattr(counts, "find_objects", lambda *_, **__: read)
    monkeypatch.setattr(counts, "drawn_counts", lambda *_: torch.tensor([0, 1, 2, 0]))
    monkeypatch.setattr(counts, "pixel_agreement", lambda *_: {"ari": {"ink_50": (1.0, None, 1)}})
    monkeypatch.setattr(counts, "figures_of", lambda *_: {})
    monkeypatch.setattr(counts, "MORE", ())
    results = find_experiment("scenes/reading")(Options(progress=False)).metrics
    for name in ("peeling", "two_sweeps", "drawn_places"):
        assert results["count_accuracy"][name][::2] == (0.75, 4)
        assert results["count_accuracy_one_draw"][name][::2] == (0.75, 4)
        assert results["count_confidence"][name][0] == pytest.approx(0.9)
        assert results["count_calibration"][name][0] == pytest.approx(0.15)


def test_pixels_agree_with_true_masks_of_three_sizes(mnist_root, monkeypatch):
    """Owners by the image itself are right at every size; with a border at .4, pale pixels go."""
    read = lambda ink: load_dataset(f"multi-mnist:train=20,ink={ink}", mnist_root).test[:40]  # noqa: E731
    scenes, pale = read(0.1), read(0.4).objects
    prediction = SimpleNamespace(numbers=pale.numbers.long(), owners=scenes.objects.numbers.long())
    rows = counts.pixel_agreement(prediction, Options(data_root=mnist_root))
    assert {n: number[0] for n, number in rows["ari_objects_alone"].items()} == pytest.approx(
        dict.fromkeys(("ink_50", "ink_30", "ink_10"), 1), abs=0.01
    )
    of_pixels = {n: number[0] for n, number in rows["ari_with_ground"].items()}
    lost = {n: number[0] for n, number in rows["given_to_ground"].items()}
    assert of_pixels["ink_50"] == pytest.approx(1, abs=1e-6) and lost["ink_50"] == 0
    for ink in (0.3, 0.1):
        true = read(ink).objects
        fraction = 1 - (pale.numbers > 0).sum() / (true.numbers > 0).sum()
        assert lost[f"ink_{100 * ink:.0f}"] == pytest.approx(fraction.item())
    assert 1 > of_pixels["ink_30"] > of_pixels["ink_10"]
    number = (scenes.objects.counts == 2).sum().item()
    assert all(rows["ari_with_ground"][name][2] == number for name in of_pixels)


def test_ways_of_reading_by_number():
    true, right = torch.tensor([0.0, 2, 2, 3]), torch.tensor([1.0, 1, 0, 1])
    fractions = counts.accuracy_by_number({"peeling": torch.stack([true, torch.ones(4), right])})[
        "peeling"
    ]
    assert {number: (fraction, n) for number, (fraction, _, n) in fractions.items()} == {
        "0": (1, 1), "2": (0.5, 2), "3": (1, 1)
    }  # fmt: skip


def test_wrong_counts_by_their_doubt():
    doubt, wrong = torch.tensor([1e-12, 0.02, 0.04, 2e-12]), torch.tensor([0.0, 1, 0, 0])
    bins = counts.bin_by_doubt(doubt, wrong)
    assert {place: (fraction, n) for place, (fraction, _, n) in bins.items()} == {
        "1e-09": (0, 2), "0.03": (0.5, 2)
    }  # fmt: skip
    assert all(error > 0 for _, error, _ in bins.values())


def test_segmentation_scores_the_pixels_that_are_given_to_objects_or_ground(monkeypatch):
    """The record's ARI is of `numbers`, for which the ground is an answer, not of `owners`."""
    numbers = torch.tensor([[[1, 1, 1, 2, 2, 2]]])
    truth = Objects(numbers, torch.tensor([[3, 4]]), torch.zeros(1, 2, 4))
    scenes = Split(torch.zeros(1, 1, 1, 6), objects=truth)
    answer = torch.tensor([[[1, 1, 0, 0, 2, 2]]])  # two pixels for the ground
    prediction = SimpleNamespace(numbers=answer, owners=numbers, counts=torch.tensor([2]))
    monkeypatch.setattr(segmentation, "find_objects", lambda *_, **__: prediction)
    entry = create("scenes", **small_settings("scenes"))
    _, row = segmentation.measure_objects(entry, scenes)
    expected = adjusted_rand_score(numbers.flatten(), answer.flatten())
    assert row["ari"][0] == pytest.approx(expected) and expected < 1
    assert row["count_accuracy"][0] == 1


def test_segmentation(tmp_path, mnist_root, monkeypatch, marked):
    module = "capsule_zoo.experiments.scenes.segmentation"
    small = {n: f"{n}:train=30,test=4" for n in ("multi-mnist", "multi-sprites", "tetrominoes")}
    monkeypatch.setattr(f"{module}.DATA", small["multi-mnist"])

    def read(name, root):
        kind = name.partition(":")[0]
        scenes = load_dataset(small.get(name, name), root)
        return watermarked(scenes) if kind in small else scenes

    monkeypatch.setattr(f"{module}.load_dataset", read)
    options = Options(data_root=mnist_root, progress=False, processes=1, runs=tmp_path)
    for constant, value in dict(FINDING=dict(draws=1), SIZES=SIZES).items():
        monkeypatch.setattr(segmentation, constant, dict.fromkeys(small, value))
    monkeypatch.setattr(segmentation, "TEST_SCENES", 2)
    monkeypatch.setattr(segmentation, "LENGTH", 0.001)
    result = find_experiment("scenes/segmentation")(options, seeds=2)
    sets = {name.replace("-", "_") for name in small}
    assert result.metrics["ari"].keys() == {*sets, "tetrominoes_best"}
    assert result.metrics["ari_worst"].keys() == sets == set(result.figures)


def test_touching_pieces_of_one_color_are_ambiguous():
    """A red block of 2x4 cells is cut in four ways; half red and half yellow, in one."""
    cells = torch.zeros(2, 3, 7, 7)
    cells[:, 0, :2, :4] = 1
    cells[1, 1, :2, 2:4] = 1
    best, ambiguous = best_of_pieces(cells.repeat_interleave(5, -1).repeat_interleave(5, -2))
    assert ambiguous[0] == 0.5
    ways = ["00110011", "00001111", "00010111", "01110001"]  # squares, bars, and twice two Ls
    owners = [list(way) for way in ways]
    agreement = max(sum(adjusted_rand_score(a, b) for a in owners) / 4 for b in owners)
    assert best[0] == pytest.approx((1 + agreement) / 2)


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
    windows = windows_of(dirty, owners, torch.tensor([1, 0]))
    torch.testing.assert_close(windows[0], (BRIGHTER * digit[0]).clamp(0, 1), atol=1e-4, rtol=0)
    assert windows[1].abs().max() == 0  # which the other slot holds


def test_segment_writes_masks_tables_and_pictures(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    sizes = {**small_settings("scenes"), "image_shape": (3, 35, 35)}
    config = {"data": "tetrominoes:train=20,test=3", "limits": {"steps": 2}, "settings": sizes}
    runs.train("scenes", tmp_path / "run", config, progress=False)
    assert load("run").model.image_shape == (3, 35, 35)
    assert run("segment", "run", "--draws", 1, "--temperature", 0.1, "--json") == 0
    summary = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert summary["images"] == 3
    folder = tmp_path / "run" / "objects"
    assert (
        len(list((folder / "masks").iterdir())) == 3 == len(list((folder / "pictures").iterdir()))
    )
    assert len((folder / "objects.csv").read_text().splitlines()) == 1 + summary["objects"]
    larger = ["--data", "multi-sprites:train=20,test=2", "--slots", "3", "--out", "larger"]
    assert run("segment", "run", "--draws", 1, *larger) == 0
    with Image.open(tmp_path / "larger" / "masks" / "1.png") as mask:
        assert mask.size == (64, 64)
    assert pd.read_csv(tmp_path / "larger" / "counts.csv")["count"].between(0, 3).all()


def test_segment_reads_all_pictures_of_a_folder_and_names_their_files(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    sizes = {**small_settings("scenes"), "image_shape": (1, 35, 35)}
    (tmp_path / "own").mkdir()
    for number in range(6):
        gray = Image.new("L", (35, 35), 40 * number)
        gray.paste(255, (16, 16, 20, 20))
        gray.save(tmp_path / "own" / f"picture-{number}.png")
    config = {"data": "folder:own", "limits": {"steps": 1}, "settings": sizes}
    runs.train("scenes", tmp_path / "run", config, progress=False)
    for options, number in ((["--out", "all"], 6), (["--held-out", "--out", "few"], 1)):
        assert run("segment", "run", "--draws", 1, *options) == 0
        counts = pd.read_csv(tmp_path / options[-1] / "counts.csv")
        assert len(counts) == number
        assert ("resized to 35x35 pixels" in capsys.readouterr().err) == (number == 6)
        if number == 6:
            assert counts["file"].tolist() == [f"picture-{n}.png" for n in range(6)]
            assert "file" in pd.read_csv(tmp_path / "all" / "objects.csv")
    segment_run(load("run"), load_dataset("folder:own").test, tmp_path / "all", draws=1)
    assert [f.name for f in (tmp_path / "all" / "masks").iterdir()] == ["0.png"]
    assert run("segment", "run", "--draws", 1, "--out", "all") == 0
    for number in (0, 5):  # the corner of a picture is in no object, or in none that covers it
        with Image.open(tmp_path / f"all/pictures/{number}.png") as picture:
            assert (max(picture.getpixel((0, 0))) > 50) == (number == 5)


def squares() -> np.ndarray:
    """Return a picture of twelve bright squares, 10 pixels wide, bytes (90, 120)."""
    pixels = np.full((90, 120), 50, np.uint8)
    for row, column in itertools.product(range(15, 90, 30), range(15, 120, 30)):
        pixels[row - 5 : row + 5, column - 5 : column + 5] = 200
    return pixels


SMALL_TILES = ["--batch-size", "8", "--set", "window=8", "--set", "slots=2", "--set"]
SMALL_TILES += ['thing_settings={"latent":2,"channels":3,"guide":{"hidden":5}}', "--quiet"]


def test_a_run_of_whole_pictures_goes_on_and_is_read_at_its_scale(tmp_path, monkeypatch):
    """Objects keep the width that was guessed, and other pictures the leveling of training."""
    monkeypatch.chdir(tmp_path)
    Image.fromarray(squares()).save("squares.png")
    (tmp_path / "others").mkdir()
    Image.fromarray(255 - squares()[:70]).resize((240, 140)).save("others/other.png")
    train = ["train", "scenes", "--out", "parts"]
    assert run(*train, "--data", "squares.png", *SMALL_TILES, "--steps", 2) == 0
    assert run(*train, "--resume", "--steps", 3, "--quiet") == 0
    expected = load_dataset("tiles:squares.png")
    recipe = runs.resume_recipe(Path("parts"), "scenes", {})
    _, resumed = runs._begin(recipe, find_registration("scenes"), None)
    assert torch.equal(resumed.train.images, expected.train.images)
    entry, data, _ = open_run("parts")
    leveling = entry.model.leveling
    assert leveling.width == pytest.approx(10, abs=3)
    assert torch.equal(data.test.images, expected.test.images)
    for name in ("others/other.png", "folder:others"):
        assert open_run("parts", name)[1].settings["leveling"] == leveling
    with pytest.raises(ValueError, match="parts reads whole pictures, and 'digits' holds none"):
        open_run("parts", "digits")
    with pytest.raises(ValueError, match="lies among the pictures of"):
        runs.refuse_among_pictures(tmp_path / "run", f"tiles:{tmp_path}")
    with pytest.raises(ValueError, match="held_out asks for every fifth of five or more"):
        open_pictures("parts", None, None, True, True, None)


def test_objects_behind_others_have_no_box(tmp_path, monkeypatch):
    numbers = torch.zeros(6, 8, dtype=torch.long)
    numbers[1:3, 2:5] = 2
    visible = PictureObjects(
        torch.tensor([0.0, 0.0, 1.0]),
        torch.ones(2),
        torch.ones(2, 2),
        numbers,
        numbers,
        *[None] * 3,
    )
    pictures = [torch.zeros(1, 6, 8), torch.zeros(1, 6, 8)]
    none = replace(visible, presence=torch.ones(0), centers=torch.ones(0, 2), numbers=0 * numbers)
    results = [replace(part, unexplained=0.0) for part in (visible, none)]
    monkeypatch.setattr(objects, "read_pictures", lambda *_: results)
    entry = SimpleNamespace(model=None, guide=None, name="scenes")
    with pytest.warns(UserWarning, match="1 of 2 objects lie wholly behind others"):
        objects._segment_whole(entry, pictures, tmp_path, ["a.png", "b.png"], {})
    table = pd.read_csv(tmp_path / "objects.csv")
    assert table["left"].isna().tolist() == [True, False]
    assert table.iloc[1][["left", "top", "right", "bottom"]].tolist() == [2, 1, 5, 3]
    monkeypatch.setattr(objects, "read_pictures", lambda *_: results[1:])
    objects._segment_whole(entry, pictures[1:], tmp_path, ["b.png"], {})
    assert [*pd.read_csv(tmp_path / "objects.csv")] == [*table]  # an empty table has its columns


@pytest.mark.filterwarnings("ignore:.*wholly behind others")
@pytest.mark.long
def test_one_picture_is_trained_on_and_segmented_as_a_whole(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    pixels = squares()
    Image.fromarray(pixels).save("squares.png")
    Image.fromarray(pixels[:60]).save("other.png")
    command = ["train", "scenes", "--data", "squares.png", "--size", 10, "--steps", 2]
    assert run(*command, *SMALL_TILES, "--out", "run") == 0
    assert run("segment", "run") == 0
    assert run("segment", "run", "--data", "other.png", "--out", "other", "--json") == 0
    summary = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert load("run").model.leveling.width == 10
    for folder, height, name in (("run/objects", 90, "squares.png"), ("other", 60, "other.png")):
        row = pd.read_csv(Path(folder) / "counts.csv").iloc[0]
        assert row["file"] == name and row["low"] <= row["count"] <= row["high"]
        with Image.open(Path(folder) / "masks/0.png") as mask:
            assert mask.size == (120, height) and mask.mode == "I;16"
            values = np.asarray(mask)
        assert np.array_equal(values, np.load(Path(folder) / "masks/0.npy"))
        with Image.open(Path(folder) / "pictures/0.png") as picture:
            assert picture.size == (120, height)
        objects = (Path(folder) / "objects.csv").read_text().splitlines()
        assert values.max() <= max(0, len(objects) - 1)
    assert summary["count"] == row["count"]
    for command, message in (
        ("segment run --slots 5", "leave --slots out"),
        ("segment run --temperature 0.1", "leave --temperature out"),
        ("segment run --draws 2", "leave --draws out"),
        ("train vae --data squares.png --steps 1", "for the entry scenes"),
        ("segment scenes-mnist --data squares.png", "was not trained on whole pictures"),
    ):
        assert run(*command.split()) and message in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize("name", ["coins", "digits"])
def test_whole_pictures_are_counted_and_scored(name, monkeypatch):
    small = dict(window=6, slots=2, thing_settings=dict(latent=2, channels=3, guide=dict(hidden=5)))
    fewer = dict(
        TILES=160, TRAINING_PICTURES=2, TEST_PICTURES=1, INTERVAL_PICTURES=2, SOURCE="digits"
    )
    for constant, value in fewer.items():
        monkeypatch.setattr(whole_pictures, constant, value)
    monkeypatch.setattr(whole_pictures, "SETTINGS", whole_pictures.SETTINGS | small)
    monkeypatch.setattr(whole_pictures, "DIGITS", whole_pictures.DIGITS | small)
    assert find_experiment("scenes/whole-pictures").settings.keys() == {"seeds"}
    job = Job(name, None, Options(minutes=1e-4, progress=False))
    numbers = whole_pictures.one_picture(job)
    expected = {"count", "error", "precision", "recall", "seconds", "iou"}
    digits = {"digits_error", "digits_ari", "digits_right", "interval_coverage"}
    assert set(numbers) == (expected if name == "coins" else digits | {"interval_expected"})
    assert all(
        number[0] == number[0] for quantity, number in numbers.items() if "ari" not in quantity
    )
