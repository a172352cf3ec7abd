"""A loop over scenes parses as the zoo's guides do, and every contestant runs."""

import numpy as np
import pytest


@pytest.fixture
def benchmark(load_benchmark, monkeypatch):
    constellations = load_benchmark("constellations")
    monkeypatch.setattr(constellations, "SCENES", 6)
    return constellations


def test_all_agree_and_all_contestants_run(benchmark):
    benchmark.check()
    contestants = benchmark.make()
    assert set(contestants) == {"ransac", "exact", "loop"}
    for run in contestants.values():
        run()


def test_a_loop_with_another_template_disagrees(benchmark, monkeypatch):
    other = ((-1.0, 0.0), (0.0, -0.1), (1.0, 0.0), (0.0, 0.1))
    monkeypatch.setattr(benchmark, "TEMPLATES", (other, benchmark.TEMPLATES[1], other))
    with pytest.raises(AssertionError, match="loop parses"):
        benchmark.check()


def test_the_cheapest_cover_is_the_best_of_all(benchmark):
    tables = [
        {frozenset({0, 1}): 1.0, frozenset({2, 3}): 2.0},
        {frozenset({0, 1}): 0.5, frozenset({2, 3}): 5.0, frozenset({1, 2}): 0.0},
    ]
    assert benchmark.cheapest(tables) == (2.5, (frozenset({2, 3}), frozenset({0, 1})))
    assert benchmark.cheapest([{frozenset({0}): 1.0}] * 2)[0] == np.inf
