"""Entries at their small settings, images for them, and what a refused call must say."""

from collections.abc import Callable

import pyro
import pytest
import torch
from torch import Tensor
from variants import create, small_settings

from capsule_zoo.registry import Entry


def small_entry(name: str, guide: str | None = None, seed: int = 0, **settings: object) -> Entry:
    """Return an entry at its small settings with one of its guides, from a seed."""
    pyro.set_rng_seed(seed)
    entry = create(name, **{**small_settings(name), **settings})
    return entry.use_guide(guide or entry.default_guide)


def images_for(entry: Entry, number: int = 3) -> Tensor:
    """Return random images in the form that the model of an entry takes."""
    return entry.model.space.example(number, torch.float32, torch.Generator().manual_seed(1))


def on(name: str, call: Callable, *arguments: object, **settings: object) -> object:
    """Return what a verb makes of a small entry, of three images and of further arguments."""
    entry = small_entry(name)
    return call(entry.model, entry.guide, images_for(entry), *arguments, **settings)


def check_refused(call: Callable, message: str, error: type[Exception] = ValueError) -> None:
    """Check that a call raises an error of one line that matches a message."""
    with pytest.raises(error, match=message) as caught:
        call()
    text = str(caught.value).partition("Trace Shapes")[0]  # Pyro adds shapes to errors of a trace
    assert "\n" not in text.strip()
