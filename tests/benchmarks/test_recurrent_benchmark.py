"""DRAW by hand is the zoo's DRAW to the last digits, and every contestant takes its step."""

import pytest


@pytest.fixture
def benchmark(load_benchmark, monkeypatch):
    recurrent_capsules = load_benchmark("recurrent_capsules")
    monkeypatch.setattr(recurrent_capsules, "keep_memory", lambda: True)  # of the whole process
    monkeypatch.setattr(recurrent_capsules, "BATCH", 2)
    for _, sizes in recurrent_capsules.VARIANTS.values():
        monkeypatch.setitem(sizes, "steps", 3)
        monkeypatch.setitem(sizes, "units", 8)
    return recurrent_capsules


def test_draw_by_hand_is_the_zoos_and_all_contestants_run(benchmark):
    benchmark.check()
    contestants = benchmark.make()
    assert {"zoo", "draw", "plain_torch"} <= contestants.keys()
    for step in contestants.values():
        step()
