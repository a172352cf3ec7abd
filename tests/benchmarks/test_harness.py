"""The harness takes turns, takes medians and sees memory; durations are never tested."""

import json
import sys

import numpy as np
import pytest
import torch


@pytest.fixture
def harness(load_benchmark):
    return load_benchmark("harness")


def light_and_heavy():
    return {"light": lambda: torch.ones(1), "heavy": lambda: torch.ones(2**25).sum()}  # 128 MiB


def test_contestants_take_turns_and_may_time_themselves(harness):
    order: list[str] = []

    def contestant(name: str, seconds: float):
        return lambda: order.append(name) or seconds

    taken = harness.interleave({"a": contestant("a", 2.0), "b": contestant("b", 3.0)}, 4, warmup=1)
    assert "".join(order) == "abbaabbaab"
    np.testing.assert_array_equal(taken["a"], [2.0] * 4)
    np.testing.assert_array_equal(taken["b"], [3.0] * 4)


def test_the_median_forgets_one_slow_round(harness):
    slow, quick = np.array([1.0, 1.1, 0.9, 50.0, 1.0]), np.ones(5)
    assert harness.median(slow)[0] == 1.0
    assert harness.median(slow)[1] < 0.1
    assert harness.median(quick) == (1.0, 0.0, 5)


@pytest.mark.long
def test_peak_memory_is_that_of_the_contestant(harness):
    heavy = harness.peak_memory(light_and_heavy, "heavy")
    assert 100 < heavy < 300
    assert harness.peak_memory(light_and_heavy, "light") < 60


def test_the_record_holds_ratios_to_the_peer(harness, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(harness, "peak_memory", lambda make, name: {"ours": 2.0, "peer": 5.0}[name])
    monkeypatch.setattr(sys, "argv", ["toy", "--repeats", "3", "--out", str(tmp_path)])
    contestants = {"ours": lambda: 1.0, "peer": lambda: 4.0, "stage": lambda: 0.5}
    toy = harness.Benchmark("toy", lambda: contestants, lambda: None, "ours", ("peer",), "none")
    harness.main(toy)
    record = json.loads((tmp_path / "benchmarks" / "toy.json").read_text())
    metrics = record["metrics"]
    assert record["summary"] == __doc__.partition("\n")[0]  # the contestants are made here
    assert record["tables"][""]["ratio"] == {"peer": "ratio_peer"}
    assert list(record["tables"][""]["seconds"]) == ["ours", "peer", "stage"]
    assert metrics["ratio_peer"] == {"value": 4.0, "se": 0.0, "n": 3}
    assert metrics["memory_ratio_peer"]["value"] == 2.5
    assert metrics["seconds_stage"]["value"] == 0.5
    assert "ratio_peer" in capsys.readouterr().out
