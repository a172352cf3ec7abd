"""The experiments on transformed images run in miniature; turning helps where it should."""

import json
import os
from dataclasses import replace

import pytest
import torch
from miniature import few_digits, in_turn
from torch.nn import functional as F

from capsule_zoo import registry
from capsule_zoo.cli import main
from capsule_zoo.data import load_dataset
from capsule_zoo.experiments import Options, part_whole_transformations, reproduce
from capsule_zoo.experiments.part_whole_transformations import (
    VARIANTS,
    Variant,
    held_best,
    rotated,
    side_by_side,
)
from capsule_zoo.records import read_record
from capsule_zoo.registry import create, load, save, small_sizes

SMALL = {key: value for key, value in small_sizes("part-whole").items() if key != "image_shape"}


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Use few digits for every data set, small models, and one process for everything."""
    few = few_digits(60, 12)

    def read(name, root=None):
        return few.transformed(lambda x: F.pad(x, (6,) * 4)) if name == "affnist" else few

    def shrunk(sizes):
        return {**SMALL, **sizes, "guide_sizes": {**sizes["guide_sizes"], **SMALL["guide_sizes"]}}

    module = part_whole_transformations
    monkeypatch.setattr(module, "load_dataset", read)
    monkeypatch.setattr(module, "TURNS", 4)
    monkeypatch.setattr(module, "CURVE", (0, 90))
    monkeypatch.setattr(module, "LARGE", shrunk(module.LARGE))
    variants = {
        name: replace(variant, sizes=shrunk({"guide_sizes": {}, **variant.sizes}))
        for name, variant in VARIANTS.items()
    }
    monkeypatch.setattr(module, "VARIANTS", variants)
    monkeypatch.setattr(module, "side_by_side", in_turn)
    monkeypatch.setattr(registry, "WEIGHTS", tmp_path / "weights")
    monkeypatch.chdir(tmp_path)


def test_generalise_is_kept_published_and_measured_again(small, tmp_path):
    command = ["reproduce", "part-whole/generalise", "--minutes", "0.005", "--keep", "kept"]
    for words in (command, ["publish", "kept", "mine", "--record", "part-whole/generalise"]):
        with pytest.raises(SystemExit) as done:
            main(words)
        assert done.value.code in (0, None)
    record = read_record("part-whole/generalise", tmp_path / "results")
    kinds = ("upright", "affnist", "rotated")
    wanted = {f"{kind}_presence_pose{turned}" for kind in kinds for turned in ("", "_turned")}
    wanted |= {f"rotation_{d}{turned}" for d in (0, 90) for turned in ("", "_turned")}
    assert set(record["metrics"]) == wanted | {"steps"} and record["data"] == "affnist"
    assert all(record["metrics"][name]["n"] == 12 for name in wanted)
    pictures = {path.stem for path in (tmp_path / "results" / "part-whole").glob("*.png")}
    assert pictures == {f"generalise_{n}" for n in ("rotations", "parses", "templates", "samples")}
    card = json.loads((tmp_path / "weights" / "mine.json").read_text())
    assert (
        card["training"]["command"] == "capsule-zoo reproduce part-whole/generalise --minutes 0.005"
    )
    assert card["records"]["part-whole/generalise"]["metrics"] == record["metrics"]
    entry = load("mine")
    assert entry.model.image_shape == (1, 40, 40) and entry.guide.reader.coordinates
    again, _ = reproduce("part-whole/generalise", Options(run="mine", progress=False), folder="new")
    values = {name: value for name, (value, _, _) in again.metrics.items()}
    assert values == {name: record["metrics"][name]["value"] for name in wanted}


def test_augment_trains_every_range_and_both_ways_out(small, tmp_path):
    options = Options(minutes=0.03, progress=False)
    result, path = reproduce("part-whole/augment", options, folder=tmp_path)
    metrics = read_record("part-whole/augment", tmp_path)["metrics"]
    for name, variant in VARIANTS.items():
        assert metrics[f"steps_{name}"]["value"] >= 1
        assert metrics[f"probe_presence_pose_{name}"]["n"] == 12
        assert (f"rotated_presence_pose_{name}" in metrics) == (variant.degrees > 0)
    assert {f"{k}_presence_pose_0_turned" for k in ("probe", "rotated")} <= set(metrics)
    assert result.entry.guide.reader.turns == 4 and result.entry.model.rotations == 24
    pictures = {file.stem for file in path.parent.glob("*.png")}
    assert pictures == {"augment", "augment_canonical"}


def test_time_is_shared_by_the_cost_of_a_step(small, monkeypatch):
    """Every variant therefore takes about the same number of steps."""
    jobs = []

    def noted(task, todo):
        jobs.extend(todo)
        for job in todo:
            entry = create("part-whole", image_shape=(1, 28, 28), **job.variant.sizes)
            save(entry, job.folder, data="digits")
        return [3] * len(todo)

    monkeypatch.setattr(part_whole_transformations, "side_by_side", noted)
    variants = {"0": Variant(0, SMALL), "dear": Variant(180, SMALL, cost=3)}
    monkeypatch.setattr(part_whole_transformations, "VARIANTS", variants)
    entries, steps = part_whole_transformations.train_variants(Options(minutes=8, progress=False))
    assert [job.minutes for job in jobs] == [6, 2]  # the longest goes first
    assert list(entries) == ["0", "dear"] and steps["dear"] == 3


def where(job):
    number, parent = job
    return number, os.getpid() != parent, torch.get_num_threads()


def test_jobs_keep_their_order_on_one_thread_of_other_processes():
    found = side_by_side(where, [(number, os.getpid()) for number in (7, 8)])
    assert found == [(7, True, 1), (8, True, 1)]


def test_rotated_splits_are_the_same_every_time():
    split = load_dataset("digits").test[:5]
    assert torch.equal(rotated(split, 90).images, rotated(split, 90).images)
    assert torch.equal(rotated(split, 0).images.round(decimals=4), split.images.round(decimals=4))


def test_turning_undoes_quarter_turns_up_to_where_the_model_wants_them():
    """Turned images come out the same however they were held."""
    torch.manual_seed(0)
    entry = create("part-whole", **{**small_sizes("part-whole"), "epsilon": 1e-30})
    entry.model.double()
    entry.guide.double()
    images = torch.rand(9, 1, 12, 12, dtype=torch.float64)
    found = []
    for held in (images, images.rot90(1, (2, 3))):
        torch.manual_seed(1)
        found.append(held_best(entry.guide, held))
    torch.testing.assert_close(found[1], found[0])
