"""Images that say which split they are from, and a watch over what reads them.

Two pixels in the corner tell the splits apart. `watch` wraps what trains and what measures. A
training may read training images only, and its checks validation images only. No bound, error rate
or squared error may be of a training image. Images that were moved, so that their corner lies
elsewhere, are not watched.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import wraps
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from capsule_zoo.data import Dataset, Split
from capsule_zoo.experiments.common.energy import reconstruction_error
from capsule_zoo.experiments.common.findings import squared_error
from capsule_zoo.experiments.recurrent_capsules.headline import class_error
from capsule_zoo.inference import compare, evaluate, fit, pretrain
from capsule_zoo.inference.evaluation.classification import error_rate, predictions

MARKS = {"train": (1.0, 0.0), "validation": (0.0, 1.0), "test": (1.0, 1.0)}
SHOWS_BOTH = "capsule_zoo.experiments.capsule_rbm.headline"  # shows curves of both
BY_LAYERS = "capsule_zoo.inference.energy.pretrain"  # fits the upper layers to what is no image
SPLITS = {mark: split for split, mark in MARKS.items()}
MEASURES: dict[Callable, str] = {  # and the argument that holds the images
    evaluate: "images",
    compare: "images",
    error_rate: "split",
    predictions: "images",
    squared_error: "images",
    reconstruction_error: "images",
    class_error: "split",
}


class Leak(AssertionError):
    """Images were read that should not have been."""


def watermarked(data: Dataset) -> Dataset:
    """Return the data set with the mark of its split in every image."""
    return replace(data, **{name: _marked(getattr(data, name), name) for name in MARKS})


def _marked(split: Split, name: str) -> Split:
    images = split.images.clone()
    images[..., 0, :2] = torch.tensor(MARKS[name])
    return replace(split, images=images)


def splits_of(images: Any) -> set[str]:
    """Return the splits whose marks are in the corners of images (N, C, H, W)."""
    if isinstance(images, Split):
        images = images.images
    if isinstance(images, np.ndarray):
        images = torch.from_numpy(images)
    if not isinstance(images, Tensor) or images.ndim != 4 or not len(images):
        return set()
    flat = images.detach().double().flatten(1)
    low, high = flat.amin(1), flat.amax(1)
    corner = images[:, 0, 0, :2].double()  # marks are the least and the greatest value of an image
    scaled = (corner - low[:, None]) / (high - low)[:, None]
    found = {tuple(row) for row in scaled.tolist()}
    return {SPLITS[mark] for mark in found if mark in SPLITS}


def watch(patch: pytest.MonkeyPatch) -> None:
    """Let `fit` and everything in `MEASURES` raise `Leak` for images of a wrong split."""
    _replace_everywhere(patch, fit, _watched_fit)
    for measure, argument in MEASURES.items():
        _replace_everywhere(patch, measure, _watched(measure, argument, "validation", "test"))
    _replace_everywhere(patch, pretrain, _watched(pretrain, "images", "train"))


@wraps(fit)
def _watched_fit(model: Any, guide: Any, data: Any, **settings: Any) -> Any:
    if settings.get("freeze") == "model":  # inference for given images, which may be test images
        return fit(model, guide, data, **settings)
    trained = data.train if isinstance(data, Dataset) else data
    _allow("training", splits_of(trained), {"train"})
    held = settings.get("validation") or (data.validation if isinstance(data, Dataset) else None)
    if held is not None:
        _allow("the checks of a training", splits_of(held), {"validation"})
    return fit(model, guide, data, **settings)


def _watched(function: Callable, argument: str, *allowed: str) -> Callable:
    signature = inspect.signature(function)

    @wraps(function)
    def watched(*args: Any, **kwargs: Any) -> Any:
        images = signature.bind(*args, **kwargs).arguments[argument]
        _allow(function.__name__, splits_of(images), set(allowed))
        return function(*args, **kwargs)

    return watched


def _allow(reader: str, read: Iterable[str], allowed: set[str]) -> None:
    if wrong := set(read) - allowed:
        raise Leak(f"{reader} read images of {sorted(wrong)}, and may read {sorted(allowed)}")


def _replace_everywhere(patch: pytest.MonkeyPatch, old: Callable, new: Callable) -> None:
    """Replace a function under its names in the package.

    A function of the library keeps its name where it is defined, because it may call itself there.
    """
    own = () if old.__module__.startswith("capsule_zoo.experiments.") else (old.__module__,)
    unwatched = (*own, SHOWS_BOTH, BY_LAYERS)
    for name, module in list(sys.modules.items()):
        if not name.startswith("capsule_zoo") or name in unwatched:
            continue
        for attribute, value in list(vars(module).items()):
            if value is old:
                patch.setattr(module, attribute, new)
