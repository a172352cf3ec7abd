"""The start of every test: no network, an empty parameter store, a fixed seed, no open figure."""

import math
import os
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

import pyro
import pytest
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from offline import refuse_network

from capsule_zoo import records
from capsule_zoo.data import datasets, progress

refuse_network()
datasets.digits = cache(datasets.digits)  # hundreds of tests read the file, which takes a while


@pytest.hookimpl(tryfirst=True)  # before marks choose
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that read MNIST as `data`."""
    for item in items:
        if "mnist_root" in getattr(item, "fixturenames", ()):
            item.add_marker("data")


@pytest.fixture(autouse=True)
def clean_start() -> Iterator[None]:
    """Clear Pyro's global store, seed every generator, validate, and close figures afterwards.

    The first `torch.compile` of a process turns the validation of distributions off.
    """
    pyro.enable_validation()
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    yield
    plt.close("all")


@pytest.fixture(autouse=True)
def no_lines_because_a_machine_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a log have no line on progress because of a test's time; tests of such lines want it."""
    monkeypatch.setattr(progress, "SECONDS_TO_FIRST_LINE", math.inf)


@pytest.fixture(scope="session")
def mnist_root() -> Path:
    """Return the folder with torchvision's MNIST; skip the test if there is none."""
    root = os.environ.get("CAPSULE_ZOO_DATA")
    if root is None:
        pytest.skip("CAPSULE_ZOO_DATA is not set, so there is no MNIST to test with")
    if not (Path(root) / "MNIST" / "raw").is_dir():
        pytest.skip(f"CAPSULE_ZOO_DATA={root} holds no MNIST/raw")
    return Path(root)


@pytest.fixture
def unpainted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write an empty file for each figure of a record, because drawing takes most of the time."""

    def note_figure(figure: Figure, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        plt.close(figure)

    monkeypatch.setattr(records, "save_figure", note_figure)


@pytest.fixture
def few_climbs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Gauss-Newton distributions start at few draws of the prior, and climb by few steps.

    This takes most of the time of a comparison of guides. `inference/test_gauss_newton.py` tests
    the climbs at their own lengths.
    """
    module = import_module("capsule_zoo.inference.posterior.gauss_newton")
    several = module._several
    monkeypatch.setattr(module, "_several", lambda *arguments: several(*arguments[:-1], climbing=4))
    for name, number in dict(_SCREENED=1, _TEMPERED=4, _ROUNDS=1, _FLIPS=1).items():
        monkeypatch.setattr(module, name, number)
