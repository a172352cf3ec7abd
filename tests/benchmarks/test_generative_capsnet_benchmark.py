"""The benchmark's two splats agree, and every contestant takes a step."""

import pytest


@pytest.fixture
def benchmark(load_benchmark, monkeypatch):
    generative_capsnet = load_benchmark("generative_capsnet")
    monkeypatch.setattr(generative_capsnet, "BATCH", 2)
    return generative_capsnet


def test_both_splats_agree_and_all_contestants_run(benchmark):
    benchmark.check()
    contestants = benchmark.make()
    assert set(contestants) == {*benchmark.ENTRIES, "splat", "splat_direct"}
    for run in contestants.values():
        run()


def test_the_autoencoder_is_of_equal_size(benchmark):
    """Its number of parameters is within a tenth of the continuous capsules' number."""
    sizes = {}
    for name in ("continuous", "autoencoder"):
        kind, options = benchmark.ENTRIES[name]
        entry = benchmark.create(
            kind, image_shape=(1, benchmark.CANVAS, benchmark.CANVAS), **options
        )
        sizes[name] = entry.model.num_parameters
    assert sizes["autoencoder"] == pytest.approx(sizes["continuous"], rel=0.1)
