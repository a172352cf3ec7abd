"""Faults on purpose: kills, odd inputs, no room; and each fault would be seen."""

import random

import faults
import pytest
import torch
from faults import (
    damage,
    exchange,
    first_difference,
    full_disk,
    killed_trainings,
    odd_inputs,
    small_training,
)

from capsule_zoo.inference.training import checkpoint
from capsule_zoo.registry import create, small_settings


@pytest.mark.long
@pytest.mark.parametrize("kills, steps", [(2, 60), pytest.param(100, 300, marks=pytest.mark.slow)])
def test_killed_runs_end_where_undisturbed_ones_end(tmp_path, kills, steps):
    counts = killed_trainings(kills, 0, tmp_path, steps)
    assert counts.tried == kills and counts.bad == []


def test_a_run_that_goes_on_with_other_draws_ends_elsewhere(tmp_path):
    """The comparison sees a resumed run that lost one of its generators."""
    whole, broken = tmp_path / "whole.safetensors", tmp_path / "broken.safetensors"
    small_training(whole, 0, steps=14)
    small_training(broken, 0, steps=7)
    tree = checkpoint.load_checkpoint(broken)
    tree["random"]["cpu"][0][:] = torch.Generator().manual_seed(5).get_state()
    checkpoint.save_checkpoint(broken, tree)
    small_training(broken, 0, steps=14)
    difference = first_difference(*(checkpoint.load_checkpoint(path) for path in (whole, broken)))
    assert difference is not None and difference.startswith("/model")


@pytest.mark.long
@pytest.mark.parametrize("number", [80, pytest.param(10_000, marks=pytest.mark.slow)])
def test_odd_inputs_get_clear_answers(tmp_path, number):
    results = odd_inputs(number, 0, tmp_path)
    assert set(results) == {"load", "folder", "evaluate", "command"}
    for counts in results.values():
        assert counts.bad == [] and 0 < counts.refused <= counts.tried == number // 4


@pytest.mark.parametrize(
    "error, bad", [(ValueError("give one"), 0), (ValueError(""), 4), (KeyError("x"), 4)]
)
def test_an_unclear_error_is_counted(tmp_path, monkeypatch, error, bad):
    def fail(*arguments):
        raise error

    monkeypatch.setattr(faults, "damaged_run", fail)
    assert len(odd_inputs(16, 0, tmp_path)["load"].bad) == bad


def test_weights_that_are_not_finite_are_seen(tmp_path):
    entry = create(faults.ENTRY, **small_settings(faults.ENTRY))
    with torch.no_grad():
        next(entry.model.parameters()).fill_(torch.nan)
    with pytest.raises((ValueError, ArithmeticError)):
        for trial in range(20):
            faults.odd_images(random.Random(trial), entry)


@pytest.mark.long
def test_a_checkpoint_that_cannot_be_written_leaves_the_earlier_one(tmp_path):
    counts = full_disk(tmp_path)
    assert counts.tried == 3 and counts.bad == []


def test_a_file_that_may_grow_is_no_full_disk(tmp_path, monkeypatch):
    path = tmp_path / "kept.safetensors"
    with pytest.raises(SystemExit):
        faults._refused(path)


def test_inputs_are_damaged_and_exchanged():
    chance = random.Random(0)
    assert any(damage(b"a" * 100, chance) != b"a" * 100 for _ in range(5))
    variants = set()
    for _ in range(50):
        tree = {"a": [1, 2], "b": {"c": 3}}
        exchange(tree, chance)
        variants.add(str(tree))
    assert len(variants) > 10
