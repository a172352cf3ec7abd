"""Checkpoints are restored exactly; a broken one is refused, and the old one kept."""

import errno
import json
import os
import pickle

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from capsule_zoo.inference import CheckpointError
from capsule_zoo.inference.training.checkpoint import (
    check_same_modules,
    load_checkpoint,
    save_checkpoint,
)


def test_a_tree_comes_back_as_it_was(tmp_path):
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(2))], lr=0.1)
    optimizer.param_groups[0]["params"][0].grad = torch.ones(2)
    optimizer.step()
    tree = {
        "optimizer": optimizer.state_dict(),
        "numbers": [1, 0.1, float("inf"), None, True, "text"],
        "empty": {},
        "rng": torch.get_rng_state(),
        "scalar": torch.tensor(3.0, dtype=torch.float64),
    }
    save_checkpoint(tmp_path / "deep" / "c.safetensors", tree)
    back = load_checkpoint(tmp_path / "deep" / "c.safetensors")
    assert back["numbers"] == tree["numbers"] and back["empty"] == {}
    assert torch.equal(back["rng"], tree["rng"]) and torch.equal(back["scalar"], tree["scalar"])
    assert back["optimizer"]["state"].keys() == {0}
    assert torch.equal(
        back["optimizer"]["state"][0]["exp_avg"], tree["optimizer"]["state"][0]["exp_avg"]
    )
    optimizer.load_state_dict(back["optimizer"])


def test_shared_and_strided_tensors_are_stored(tmp_path):
    table = torch.arange(6.0).reshape(2, 3)
    save_checkpoint(tmp_path / "c", {"table": table, "same": table, "turned": table.T})
    back = load_checkpoint(tmp_path / "c")
    assert torch.equal(back["turned"], table.T) and torch.equal(back["same"], table)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_a_truncated_file_is_refused(tmp_path, keep):
    path = tmp_path / "c"
    save_checkpoint(path, {"weights": torch.randn(50)})
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="cannot be read as a safetensors checkpoint"):
        load_checkpoint(path)


class Bomb:
    """An object whose unpickling makes a folder."""

    def __init__(self, folder):
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)


@pytest.mark.parametrize("write", [pickle.dump, torch.save])
def test_a_pickle_is_refused_and_does_not_run(tmp_path, write):
    path, trace = tmp_path / "c.safetensors", tmp_path / "ran"
    with path.open("wb") as file:
        write(Bomb(trace), file)
    with pytest.raises(CheckpointError, match=r"Pickled files .* are never opened"):
        load_checkpoint(path)
    assert not trace.exists()


def test_other_safetensors_and_missing_files_are_refused(tmp_path):
    save_file({"weights": torch.zeros(2)}, tmp_path / "plain.safetensors")
    with pytest.raises(CheckpointError, match="no checkpoint of this version"):
        load_checkpoint(tmp_path / "plain.safetensors")
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        load_checkpoint(tmp_path / "nowhere")


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_checkpoint(tmp_path, monkeypatch, step):
    path = tmp_path / "c"
    save_checkpoint(path, {"weights": torch.zeros(3)})

    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, step, full)
    with pytest.raises(CheckpointError, match=r"No space left on device.*intact"):
        save_checkpoint(path, {"weights": torch.ones(3)})
    monkeypatch.undo()
    assert torch.equal(load_checkpoint(path)["weights"], torch.zeros(3))
    assert os.listdir(tmp_path) == ["c"]  # no litter


def test_what_is_no_number_is_not_stored(tmp_path):
    with pytest.raises(CheckpointError, match="/a/0: object is no tensor or number"):
        save_checkpoint(tmp_path / "c", {"a": [object()]})
    assert not (tmp_path / "c").exists()


def test_every_difference_between_modules_is_listed():
    module = nn.Linear(2, 3)
    tree = {"classes": {"model": "Linear"}, "model": module.state_dict()}
    check_same_modules({"model": module}, tree)
    other = {"weight": torch.zeros(3, 5), "scale": torch.zeros(1)}
    with pytest.raises(CheckpointError) as caught:
        check_same_modules({"model": module}, {"classes": {"model": "Conv2d"}, "model": other})
    lines = str(caught.value).splitlines()[1:]
    assert lines == [
        "  - it holds a Conv2d, not a Linear",
        "  - it lacks bias (3,)",
        "  - it has an extra scale (1,)",
        "  - weight has shape (3, 5), not (3, 2)",
    ]


def test_files_of_earlier_versions_are_read_and_new_ones_are_the_same_bytes(tmp_path):
    """Several keys beside the tensors would have an order of their own in every process."""
    tree = {"a": torch.ones(2)}
    save_checkpoint(tmp_path / "new", tree)
    with safe_open(tmp_path / "new", "pt") as file:
        assert list(file.metadata()) == ["tree"]
        tree_only = json.loads(file.metadata()["tree"])
    format_ = tree_only.pop("format")
    header = {"format": format_, "tree": json.dumps(tree_only)}
    save_file({"/a": tree["a"]}, tmp_path / "old", header)
    assert all(load_checkpoint(tmp_path / name)["a"].equal(tree["a"]) for name in ("new", "old"))
