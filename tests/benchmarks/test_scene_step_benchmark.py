"""The loss of scenes in plain torch is the zoo's, and every contestant runs."""

import pytest


@pytest.fixture
def benchmark(load_benchmark, monkeypatch):
    scene_step = load_benchmark("scene_step")
    monkeypatch.setattr(scene_step, "BATCH", 2)
    return scene_step


def test_both_agree_and_all_contestants_run(benchmark):
    benchmark.check()
    for run in benchmark.make().values():
        assert run() is None


def test_another_prior_of_sizes_is_seen(benchmark, monkeypatch):
    class Differing(benchmark.ByHand):
        def __call__(self, images):
            self.model.size_spread *= 1.01
            return super().__call__(images)

    monkeypatch.setattr(benchmark, "ByHand", Differing)
    with pytest.raises(AssertionError):
        benchmark.check()
