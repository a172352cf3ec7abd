"""The experiments on transformed images run in miniature; turning helps where it should."""

import json

import pytest
import torch
from miniature import few_digits
from torch.nn import functional as F

from capsule_zoo import registry
from capsule_zoo.cli import main
from capsule_zoo.data import Split
from capsule_zoo.experiments import Options, reproduce
from capsule_zoo.experiments.part_whole import transformations as part_whole_transformations
from capsule_zoo.experiments.part_whole.transformations import count_choosing_parts, turn_to_best
from capsule_zoo.records import flatten, read_record
from capsule_zoo.registry import create, load, small_settings
from capsule_zoo.runs import folder
from tools.publish import publish

SMALL = {key: value for key, value in small_settings("part-whole").items() if key != "image_shape"}


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Use few digits for every data set, small models, and one process for everything."""
    few = few_digits(60, 12)

    def read(name, root=None, size=None):
        return few.transformed(lambda x: F.pad(x, (6,) * 4)) if name == "affnist" else few

    monkeypatch.setattr(part_whole_transformations, "load_dataset", read)
    monkeypatch.setattr(folder, "load_dataset", read)  # the data of a card
    monkeypatch.setattr(registry, "WEIGHTS", tmp_path / "weights")
    monkeypatch.chdir(tmp_path)


def test_generalize_is_kept_published_and_measured_again(small, tmp_path):
    command = ["reproduce", "part-whole/generalise", "--minutes", "0.005", "--keep", "kept"]
    command += ["--out", "results"]
    command += ["--set", "turns=4", "--set", "degrees=[0, 90]", "--set", "refining=2"]
    command += ["--set", f"sizes={json.dumps(SMALL)}"]
    with pytest.raises(SystemExit) as done:
        main(command)
    assert done.value.code in (0, None)
    publish("kept", "mine", ["part-whole/generalise"])
    record = read_record("part-whole/generalise", tmp_path / "results")
    kinds = ("upright", "affnist", "rotated")
    endings = ("", "_turned", "_few", "_turned_few", "_refined", "_turned_refined")
    wanted = {f"{kind}_presence_pose{ending}" for kind in kinds for ending in endings}
    wanted |= {f"{kind}_{features}" for kind in kinds for features in ("presence", "chosen")}
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
    assert entry.model.image_shape == (1, 40, 40) and entry.guide.read_parts.coordinates
    options, settings = (
        Options(run="mine", progress=False),
        dict(turns=4, degrees=(0, 90), refining=2),
    )
    again, _ = reproduce("part-whole/generalise", options, folder="new", **settings)
    values = {name: metric["value"] for name, metric in flatten(again.metrics)[0].items()}
    assert values == {name: record["metrics"][name]["value"] for name in wanted}


def test_turning_undoes_quarter_turns_up_to_where_the_model_wants_them():
    """Turned images come out the same however they were held."""
    torch.manual_seed(0)
    entry = create("part-whole", **{**small_settings("part-whole"), "epsilon": 1e-30})
    entry.model.double()
    entry.guide.double()
    images = torch.rand(9, 1, 12, 12, dtype=torch.float64)
    found = []
    for held in (images, images.rot90(1, (2, 3))):
        torch.manual_seed(1)
        found.append(turn_to_best(entry.guide, Split(held), 16).images)
    torch.testing.assert_close(found[1], found[0])


def test_parts_are_shared_out_among_the_objects_that_they_may_choose():
    torch.manual_seed(0)
    entry = create("part-whole", **small_settings("part-whole"))
    images = torch.rand(3, 1, 12, 12)
    torch.manual_seed(0)
    shares = count_choosing_parts(entry.guide, images)
    parts = entry.model.levels[-1].size
    assert shares.shape == (3, entry.model.levels[0].size)
    assert (shares >= 0).all() and (shares.sum(1) <= parts).all()
    entry.model.epsilon = 1e9  # every part is the dummy's
    for selection in entry.model.selections:
        selection.epsilon = 1e9
    assert count_choosing_parts(entry.guide, images).sum() < 1e-3
