"""Benchmarks are scripts next to each other, not a package: tests import them by name."""

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def load_benchmark(monkeypatch) -> Iterator[Callable[[str], ModuleType]]:
    """Return a function that imports a script of `benchmarks/` by name, freshly for every test."""
    loaded: list[str] = []

    def load(name: str) -> ModuleType:
        loaded.append(name)
        return import_module(name)

    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield load
    for name in loaded:
        sys.modules.pop(name, None)
