"""Experiments in miniature: few real digits, one process, and the contents of a short run."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from watermarks import watermarked

from capsule_zoo import registry
from capsule_zoo.data import Dataset, Views, load_dataset
from capsule_zoo.experiments import Options, reproduce
from capsule_zoo.experiments.capsule_rbm import likelihood as capsule_rbm
from capsule_zoo.records import figures_of, read_record


def few_digits(train: int, test: int, size: int | None = None) -> Dataset:
    """Return the first of scikit-learn's digits, `size` pixels wide, with marks of their splits."""
    full = load_dataset("digits", size=size)
    dataset = Dataset(full.name, full.train[:train], full.validation[:8], full.test[:test])
    return watermarked(dataset)


def change_defaults(patch: pytest.MonkeyPatch, name: str, **arguments: Any) -> None:
    """Let an entry have other defaults of its model's arguments."""
    made = registry.find_registration(name)
    smaller = replace(made, model=partial(made.model, **arguments))
    patch.setitem(registry._registered, name, smaller)


def few_views(number: int = 48) -> Views:
    """Return noise images with every factor: two azimuths, two elevations."""
    index = torch.arange(number)
    elevation, azimuth = 2 + index % 2, 2 + index // 2 % 2  # 2 is familiar, 3 is not
    factors = [index % 5, index // 5 % 5, elevation, azimuth, index % 6]
    pixels = torch.randint(256, (number, 1, 17, 17), dtype=torch.uint8)
    return Views(pixels, *factors, name="noise")


def compare_small_machines(patch: pytest.MonkeyPatch) -> None:
    """Let experiments compare small energy models."""
    fewer = {"capsules": dict(capsules=5, units=4), "rbm": dict(hidden=20)}
    patch.setattr(capsule_rbm, "FASHION", fewer)


def names_in_record(
    name: str, options: Options, folder: Path, **settings: object
) -> tuple[set[str], set[str]]:
    """Return names of the metrics and figures that an experiment leaves; one may have none, ""."""
    reproduce(name, options, folder=folder, **settings)
    stem = name.rpartition("/")[2]
    figures = {path.stem.removeprefix(stem).lstrip("_") for path in figures_of(name, folder)}
    return set(read_record(name, folder)["metrics"]), figures
