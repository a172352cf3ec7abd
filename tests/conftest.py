"""What every test starts from: an empty parameter store and a fixed seed."""

from __future__ import annotations

import os
from pathlib import Path

import pyro
import pytest


@pytest.fixture(autouse=True)
def clean_start() -> None:
    """Clear Pyro's global store and seed every generator."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)


@pytest.fixture
def mnist_root() -> Path:
    """The folder that holds torchvision's MNIST; the test is skipped where there is none."""
    root = os.environ.get("CAPSULE_ZOO_DATA")
    if root is None:
        pytest.skip("CAPSULE_ZOO_DATA is not set, so there is no MNIST to test with")
    if not (Path(root) / "MNIST" / "raw").is_dir():
        pytest.skip(f"CAPSULE_ZOO_DATA={root} holds no MNIST/raw")
    return Path(root)
