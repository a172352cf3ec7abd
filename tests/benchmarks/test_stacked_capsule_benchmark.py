"""Both densities of the pixels give the same loss and gradients, and every contestant runs."""

import pytest


@pytest.fixture
def benchmark(load_benchmark, monkeypatch):
    stacked_capsule_step = load_benchmark("stacked_capsule_step")
    monkeypatch.setattr(stacked_capsule_step, "BATCH", 2)
    return stacked_capsule_step


def test_both_agree_and_all_contestants_run(benchmark):
    benchmark.check()
    contestants = benchmark.make()
    assert {"zoo", "stacked_layers"} < set(contestants)
    for run in contestants.values():
        run()


def test_another_deviation_of_pixels_is_seen(benchmark, monkeypatch):
    prepare = benchmark.prepare

    def differing(*arguments):
        entry, stacked, images = prepare(*arguments)
        stacked.sigma_image *= 1.01
        return entry, stacked, images

    monkeypatch.setattr(benchmark, "prepare", differing)
    with pytest.raises(AssertionError):
        benchmark.check()
