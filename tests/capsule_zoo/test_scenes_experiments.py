"""Experiments on scenes and the command that segments, in miniature."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from PIL import Image
from sklearn.metrics import adjusted_rand_score

from capsule_zoo.cli import main
from capsule_zoo.data import Split, load_dataset
from capsule_zoo.data.scenes import Objects
from capsule_zoo.experiments import Options, find_experiment
from capsule_zoo.experiments.scenes import counts
from capsule_zoo.experiments.scenes.air import TutorialAir, warped
from capsule_zoo.experiments.scenes.counts import LARGE, PLACES, ways
from capsule_zoo.experiments.scenes.guides import FITTED, SWAPPED, of_subsets
from capsule_zoo.experiments.scenes.segmentation import BRIGHTER, best_of_pieces, windows_of
from capsule_zoo.inference import find_objects
from capsule_zoo.inference.log_weight import log_weights
from capsule_zoo.registry import create, load, small_sizes
from capsule_zoo.runs import folder as runs
from capsule_zoo.runs.objects import segment_run
from capsule_zoo.zoo.scenes.entry import on_canvas

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


def test_what_counts_at_drawn_places_shares_the_parameters_that_are_trained():
    entry = create("scenes", **small_sizes("scenes"))
    reader = ways(entry)["drawn_places"]
    wide = on_canvas(reader, *LARGE)
    assert entry.guide.temperature == 0 < PLACES == reader.guide.temperature
    assert wide.guide.temperature == PLACES and wide.guide.model is wide.model
    own = [p.data_ptr() for p in entry.guide.parameters()]
    assert own == [p.data_ptr() for p in reader.guide.parameters()]


def test_ways_of_reading(tmp_path, mnist_root, monkeypatch):
    monkeypatch.setattr("capsule_zoo.experiments.scenes.counts.MORE", (3,))
    options = Options(data_root=mnist_root, progress=False)
    result = find_experiment("scenes/reading")(options, scenes=4, more=2, draws=1)
    ways = ("peeling", "two_sweeps", "drawn_places")
    assert result.metrics["count_accuracy_3_digits"].keys() == set(ways)
    for share, _, tested in result.metrics["count_calibration"].values():
        assert 0 <= share <= 1 and tested == 4
    (axis,) = result.figures["by_number"].axes
    assert {place for line in axis.lines[:1] for place in line.get_xdata()} <= {0, 1, 2, 3}
    kinds = [axis.get_title() for axis in result.figures["reliability"].axes]
    assert kinds == ["0 to 2 digits", "3 to 5 digits"]


def test_ways_of_reading_by_number():
    true, right = torch.tensor([0.0, 2, 2, 3]), torch.tensor([1.0, 1, 0, 1])
    shares = counts.by_number({"peeling": torch.stack([true, torch.ones(4), right])})["peeling"]
    assert {number: (share, n) for number, (share, _, n) in shares.items()} == {
        "0": (1, 1), "2": (0.5, 2), "3": (1, 1)
    }  # fmt: skip


def test_wrong_counts_by_their_doubt():
    doubt, wrong = torch.tensor([1e-12, 0.02, 0.04, 2e-12]), torch.tensor([0.0, 1, 0, 0])
    found = counts.by_doubt(doubt, wrong)
    assert {place: (share, n) for place, (share, _, n) in found.items()} == {
        "1e-09": (0, 2), "0.03": (0.5, 2)
    }  # fmt: skip
    assert all(error > 0 for _, error, _ in found.values())


def test_counts_of_overlapping_digits(tmp_path, mnist_root, monkeypatch):
    data = "multi-mnist:canvas=60,most=3,train=40,test=24"
    module = "capsule_zoo.experiments.scenes.counts"
    monkeypatch.setattr(f"{module}.APART", data)
    monkeypatch.setattr(f"{module}.OVERLAPPING", f"{data},overlap=1")
    options = Options(data_root=mnist_root, progress=False, processes=1, runs=tmp_path)
    chosen = dict(seeds=2, apart=0.005, length=0.005, draws=1, sizes=SIZES)
    result = find_experiment("scenes/overlap")(options, **chosen)
    worst = result.metrics.pop("count_accuracy_worst")
    for seed in (0, 1):
        outcome = runs.read_metrics(tmp_path / f"overlap-{seed}")["outcome"]
        for way, numbers in outcome.items():
            share, _, tested = numbers["count_accuracy"]
            own = [numbers[f"count_accuracy_{number}_digits"] for number in range(4)]
            assert sum(each[2] for each in own) == tested == 24
            assert sum(each[0] * each[2] for each in own) == pytest.approx(24 * share)
            assert worst[way][0] <= share and result.metrics["count_accuracy"][way][2] == 2
    parts = [load(tmp_path / "overlap-0" / name).model for name in ("apart", "")]
    assert any((p != q).any() for p, q in zip(*(m.parameters() for m in parts), strict=True))


def test_counts_beside_air(mnist_root, monkeypatch):
    monkeypatch.setattr(
        "capsule_zoo.experiments.scenes.counts.BESIDE_AIR", "multi-mnist:train=80,test=4"
    )
    monkeypatch.setattr("capsule_zoo.experiments.scenes.counts.MARKS", (60,))
    options = Options(data_root=mnist_root, progress=False, processes=1)
    chosen = dict(ours=0.002, air=0.002, every=2, tested=4)
    result = find_experiment("scenes/beside-air")(options, **chosen)
    assert "count_accuracy_60_minutes" not in result.metrics
    for name in ("updates", "seconds"):
        assert result.metrics[name].keys() == {"scenes", "air"}
    assert [line.get_label() for line in result.figures[""].axes[0].lines[:2]] == ["scenes", "air"]


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


def test_guides_of_one_model(tmp_path, mnist_root, monkeypatch):
    """All guides invert the same model: that of peeling, which no other guide trains."""
    data = "multi-mnist:train=40,test=6"
    monkeypatch.setattr("capsule_zoo.experiments.scenes.guides.DATA", data)
    options = Options(data_root=mnist_root, progress=False, processes=1, runs=tmp_path)
    chosen = dict(length=0.002, tested=4, images=4, particles=2, fitted=2)
    found = find_experiment("scenes/guides")(options, **chosen).metrics
    trained = {"peeling", *(name.replace("-", "_") for name in SWAPPED)}
    assert found["count_accuracy_one_draw"].keys() == found["updates"].keys() == trained
    assert {*trained, *FITTED} == found["count_accuracy"].keys()
    assert {*trained, *FITTED} == found["elbo"].keys() == found["milliseconds"].keys()
    own = load(tmp_path / "peeling-0" / "trained").model.state_dict()
    for name in SWAPPED:
        swapped = load(tmp_path / f"{name}-0" / "trained").model.state_dict()
        assert all(torch.equal(swapped[each], value) for each, value in own.items())


def test_counts_of_a_guide_to_summed_presences_sum_over_all_subsets():
    """The weights of a draw with all subsets add up to its weight with presences summed out."""
    entry = create("scenes", **small_sizes("scenes"))
    images = torch.rand(3, 1, 12, 10)
    pair = replace(entry.summed, guide=entry.fit_guide("free_form", images, steps=2))
    with torch.no_grad():
        torch.manual_seed(1)
        each = of_subsets(pair, images)
        torch.manual_seed(1)
        whole, _, _ = log_weights(pair.model, pair.guide, images)
    assert len(each) == 4
    torch.testing.assert_close(each.logsumexp(0), whole)


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
    found = windows_of(dirty, owners, torch.tensor([1, 0]))
    torch.testing.assert_close(found[0], (BRIGHTER * digit[0]).clamp(0, 1), atol=1e-4, rtol=0)
    assert found[1].abs().max() == 0  # which the other slot holds


def test_colored_digits_on_photographs(tmp_path, mnist_root, monkeypatch):
    photos, module = load_dataset("tetrominoes:train=20,test=5"), "experiments.scenes.segmentation"
    monkeypatch.setattr(f"capsule_zoo.{module}.photographs_of", lambda *_: photos)
    monkeypatch.setattr(f"capsule_zoo.{module}.BLACK", "multi-mnist:train=40,test=6")
    options = Options(data_root=mnist_root, progress=False, runs=tmp_path)
    minutes = dict(digits=0.005, photographs=0.005, length=0.005)
    result = find_experiment("scenes/colour")(options, scenes=20, tested=8, sizes=SIZES, **minutes)
    assert result.metrics["ari"].keys() == {"vae", "picture"} == set(result.figures)
    before = {name: load(tmp_path / name).model for name in ("digits", "photographs", "vae")}
    for learned, kept in (("digits", "thing"), ("photographs", "ground")):
        part, whole = getattr(before["vae"], kept).state_dict(), before[learned]
        own = (whole.thing if kept == "thing" else whole).state_dict()
        assert all(torch.equal(own[name], value) for name, value in part.items())


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
    assert found["images"] == 3
    folder = tmp_path / "run" / "objects"
    assert (
        len(list((folder / "masks").iterdir())) == 3 == len(list((folder / "pictures").iterdir()))
    )
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
        gray.paste(255, (16, 16, 20, 20))
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


def test_the_evidence_of_an_object_that_fills_its_scene_is_that_of_the_guide():
    """Its ink alone is the image; an empty scene is explained by nothing, in one way."""
    entry = create("scenes", **{**small_sizes("scenes"), "slots": 1})
    numbers = torch.tensor([1, 1, 1, 0], dtype=torch.uint8)[:, None, None].expand(4, 12, 10)
    known = Objects(numbers, 9 * numbers[:, :1, 0].long() - 1, torch.zeros(4, 1, 4))
    scenes = Split(torch.rand(4, 1, 12, 10), objects=known)
    estimate = counts.log_evidence_of_truth(entry, scenes, 3)
    found = find_objects(entry.model, entry.guide, scenes.images, draws=3)
    every = found.log_evidence[:, None] + found.count_probabilities.log()
    torch.testing.assert_close(estimate, every.gather(1, known.counts[:, None])[:, 0])


def test_a_wrong_number_that_the_model_prefers_is_told_from_a_search_that_failed(monkeypatch):
    entry = create("scenes", **small_sizes("scenes"))
    told = torch.eye(3)[[1, 2, 0, 0]]
    found = SimpleNamespace(
        counts=told.argmax(1), count_probabilities=told, log_evidence=-3 * torch.ones(4)
    )
    classes = torch.tensor([[1, 2], [1, 2], [3, -1], [3, 4]])  # the second is counted right
    known = Objects(torch.zeros(4, 12, 10, dtype=torch.uint8), classes, torch.zeros(4, 2, 4))
    scenes = Split(torch.zeros(4, 1, 12, 10), objects=known)
    for nats, share in ((-4.0, 1), (-2.0, 0)):
        given = lambda _, few, __, nats=nats: torch.full((len(few),), nats)  # noqa: E731
        monkeypatch.setattr(counts, "log_evidence_of_truth", given)
        assert counts.preferred_wrong(entry, scenes, 2, found)[::2] == (share, 3)
    found.counts = known.counts
    assert counts.preferred_wrong(entry, scenes, 2, found) == (0, None, 1)
