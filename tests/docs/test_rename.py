"""Checkpoints of an earlier version are renamed, and keep every number."""

from pathlib import Path

import pytest
import torch

from capsule_zoo.inference.training.checkpoint import load_checkpoint, save_checkpoint
from capsule_zoo.registry import create, small_sizes

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
    "entry, half, group, old_names",
    [
        ("recurrent-capsules", "model", "eye.", {"eye", "hand"}),
        ("part-whole", "guide", "transformers.", {"encoder", "pool", "transformers", "balance"}),
        ("part-whole", "guide", "infer_parents.", {"infer_parents"}),
        ("shape-codes", "guide", "direct.", {"body", "center", "spread", "direct"}),
    ],
)
def test_old_parameters_load_under_their_new_names(
    entry, half, group, old_names, tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(str(DOCS))
    from rename_parameters import NAMES, main

    state = getattr(create(entry, **small_sizes(entry)), half).state_dict()
    back = {new: old for old, new in NAMES[group].items()}
    old = {}
    for name, value in state.items():
        start = next((new for new in back if name.startswith(new)), "")
        old[back.get(start, "") + name.removeprefix(start)] = value
    assert {name.partition(".")[0] for name in old} >= old_names
    file = tmp_path / "run.safetensors"
    save_checkpoint(file, {half: old, "steps": 3, "betas": [0.9, 0.99]})
    for _ in range(2):  # the second time nothing is left to rename
        main([str(file)])
        found = load_checkpoint(file)
        assert found["steps"] == 3 and found[half].keys() == state.keys()
        assert all(torch.equal(value, state[name]) for name, value in found[half].items())
