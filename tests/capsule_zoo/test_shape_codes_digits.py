"""The short run on scikit-learn's digits, in miniature: all levels, guides, and several seeds."""

import pytest
import torch
from miniature import few_digits, names_in_record

from capsule_zoo.experiments import Options
from capsule_zoo.experiments.shape_codes import digits as shape_codes_digits
from capsule_zoo.records import read_record

SMALL = dict(kinds=2, parts=3, codes=2, guide=dict(channels=4, width=8, hidden=1))
FOUND = {"classes_found", "kinds_in_use", "probe", "probe_parts", "frechet"}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(shape_codes_digits, "load_dataset", lambda *a, **k: few_digits(60, 12))
    monkeypatch.setattr(shape_codes_digits, "ENTRY", ("shape-codes", SMALL))


def test_seeds_are_summed_up(tmp_path, monkeypatch):
    asked: list[int] = []  # two threads on busy cores wait for each other
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    options = Options(progress=False, processes=1)
    names_in_record("shape-codes/digits-seeds", options, tmp_path, seeds=2, steps=6)
    metrics = read_record("shape-codes/digits-seeds", tmp_path)["metrics"]
    assert {1, 2} <= set(asked)
    for name in FOUND:
        for threads in ("one", "two"):
            low, middle, high, mean = (
                metrics[f"{name}_{end}_{threads}"]
                for end in ("lowest", "median", "highest", "mean")
            )
            assert low["value"] <= middle["value"] <= high["value"] and mean["n"] == 2
            assert middle["value"] == pytest.approx((low["value"] + high["value"]) / 2)
