"""Compiled and eager cores agree, and every contestant runs."""

import pytest

pytestmark = [  # of the compiler, about what it does itself
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a .functools.lru_cache"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


@pytest.fixture
def benchmark(load_benchmark, monkeypatch):
    compiled = load_benchmark("compiled")
    small = dict(IMAGES=2, PARTS=3, CHILDREN=5, CLASSES=2, BACKEND="aot_eager")
    for name, value in small.items():
        monkeypatch.setattr(compiled, name, value)
    return compiled


def test_both_agree_and_all_contestants_run(benchmark):
    benchmark.check()
    contestants = benchmark.make()
    both = ("eager", "compiled")
    assert set(contestants) == {*both, *(f"{how}_{n}" for how in both for n in benchmark.cores())}
    for run in contestants.values():
        run()


def test_another_core_disagrees(benchmark, monkeypatch):
    monkeypatch.setattr(
        benchmark.torch, "compile", lambda core, backend: lambda *inputs: 2 * core(*inputs)
    )
    with pytest.raises(AssertionError):
        benchmark.check()
