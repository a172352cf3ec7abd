"""The textbook's capsule network computes our loss and gradients, and every contestant runs."""

import pytest


@pytest.fixture
def benchmark(load_benchmark, monkeypatch):
    capsule_network = load_benchmark("capsule_network")
    monkeypatch.setattr(capsule_network, "BATCH", {"paper": 1, "small": 2})
    return capsule_network


def test_both_agree_and_all_contestants_run(benchmark):
    benchmark.check()
    contestants = benchmark.make()
    assert set(contestants) == {"paper", "textbook", "small", "cnn"}
    for run in contestants.values():
        run()


def test_without_routing_the_textbook_disagrees(benchmark, monkeypatch):
    monkeypatch.setattr(benchmark, "ITERATIONS", 1)
    with pytest.raises(AssertionError):
        benchmark.check()


def test_the_convolutional_network_is_of_the_small_guides_size(benchmark):
    size = benchmark.create("cnn", **benchmark.CNN).model.num_parameters
    assert size == pytest.approx(benchmark.network("small").guide.num_parameters, rel=0.05)
