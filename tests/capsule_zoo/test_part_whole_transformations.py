"""The experiments on transformed images run in miniature; turning helps where it should."""

import json

import pytest
import torch
from miniature import few_digits
from torch.nn import functional as F

from capsule_zoo import registry
from capsule_zoo.cli import main
from capsule_zoo.data import load_dataset
from capsule_zoo.experiments import Options, part_whole_transformations, reproduce
from capsule_zoo.experiments.part_whole_transformations import (
    VARIANTS,
    held_best,
    rotated,
)
from capsule_zoo.records import flatten, read_record
from capsule_zoo.registry import create, load, small_sizes

SMALL = {key: value for key, value in small_sizes("part-whole").items() if key != "image_shape"}


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Use few digits for every data set, small models, and one process for everything."""
    few = few_digits(60, 12)

    def read(name, root=None):
        return few.transformed(lambda x: F.pad(x, (6,) * 4)) if name == "affnist" else few

    monkeypatch.setattr(part_whole_transformations, "load_dataset", read)
    monkeypatch.setattr(registry, "WEIGHTS", tmp_path / "weights")
    monkeypatch.chdir(tmp_path)


def test_generalize_is_kept_published_and_measured_again(small, tmp_path):
    command = ["reproduce", "part-whole/generalise", "--minutes", "0.005", "--keep", "kept"]
    command += ["--set", "turns=4", "--set", "degrees=[0, 90]"]
    command += ["--set", f"sizes={json.dumps(SMALL)}"]
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
    made = "capsule-zoo reproduce part-whole/generalise --minutes 0.005 --set turns=4"
    assert card["training"]["command"].startswith(made)
    assert card["records"]["part-whole/generalise"]["metrics"] == record["metrics"]
    entry = load("mine")
    assert entry.model.image_shape == (1, 40, 40) and entry.guide.reader.coordinates
    options, settings = Options(run="mine", progress=False), dict(turns=4, degrees=(0, 90))
    again, _ = reproduce("part-whole/generalise", options, folder="new", **settings)
    values = {name: metric["value"] for name, metric in flatten(again.metrics)[0].items()}
    assert values == {name: record["metrics"][name]["value"] for name in wanted}


def test_augment_trains_every_range_and_both_ways_out(small, tmp_path):
    options = Options(minutes=0.03, progress=False, processes=1)
    result, path = reproduce("part-whole/augment", options, folder=tmp_path, turns=4, sizes=SMALL)
    metrics = read_record("part-whole/augment", tmp_path)["metrics"]
    for name, variant in VARIANTS.items():
        assert metrics[f"steps_{name}"]["value"] >= 1
        assert metrics[f"probe_presence_pose_{name}"]["n"] == 12
        assert (f"rotated_presence_pose_{name}" in metrics) == (variant.degrees > 0)
    assert {f"{k}_presence_pose_0_turned" for k in ("probe", "rotated")} <= set(metrics)
    assert result.entry.guide.reader.turns == 4 and result.entry.model.rotations == 24
    pictures = {file.stem for file in path.parent.glob("*.png")}
    assert pictures == {"augment", "augment_canonical"}


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
        found.append(held_best(entry.guide, held, 16))
    torch.testing.assert_close(found[1], found[0])
