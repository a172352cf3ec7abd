"""Images that say which split they are from, and a watch over what reads them.

Two pixels in the corner tell the splits apart. `watch` wraps what trains and what measures. A
training may read training images only, and its checks validation images only. No bound, error rate
or squared error may be of a training image. Images that were moved, so that their corner lies
elsewhere, are not watched.

What is read of images (part sets, latents, objects, a classifier's features) has no corner. It is
known by its numbers: every row is remembered with the split that it was read of. Probes and
clusters may be fitted to rows of training images only, and samples compared with others only.

A try of a search chooses settings. While it runs, only validation images may be measured.
"""

import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from capsule_zoo.data import Dataset, Split
from capsule_zoo.experiments import Job, study
from capsule_zoo.experiments.common.energy import reconstruction_error
from capsule_zoo.experiments.common.findings import looks, squared_error
from capsule_zoo.experiments.recurrent_capsules.strokes import class_error
from capsule_zoo.experiments.shape_codes.objects import Object, read_objects
from capsule_zoo.inference import classify, compare, evaluate, fit
from capsule_zoo.inference.energy.pretrain import pretrain
from capsule_zoo.inference.evaluation.classification import error_rate
from capsule_zoo.inference.objects import find_objects
from capsule_zoo.inference.probes import (
    cluster_accuracy,
    fit_probe,
    latents,
    linear_probe,
    probe_scores,
)
from capsule_zoo.inference.sample_quality import FeatureClassifier, Reading
from capsule_zoo.zoo.shape_codes.entry import part_sets

MARKS = {"train": (1.0, 0.0), "validation": (0.0, 1.0), "test": (1.0, 1.0)}
SHOWS_BOTH = "capsule_zoo.experiments.capsule_rbm.likelihood"  # shows curves of both
BY_LAYERS = "capsule_zoo.inference.energy.pretrain"  # fits the upper layers to what is no image
SPLITS = {mark: split for split, mark in MARKS.items()}
MEASURES: dict[Callable, str] = {  # and the argument that holds the images
    evaluate: "images",
    compare: "images",
    error_rate: "split",
    classify: "images",
    find_objects: "images",
    squared_error: "images",
    reconstruction_error: "images",
    class_error: "split",
    looks: "real",
}
FITTED: dict[Callable, str] = dict.fromkeys(
    (fit_probe, linear_probe, probe_scores, cluster_accuracy), "train"
)
READERS: dict[Callable, str] = {part_sets: "split", latents: "images", read_objects: "sets"}
_split_of: dict[bytes, set[str]] = {}  # of every row that was read
_barred: set[str] = set()  # splits that may not be read now, though others may


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
    if isinstance(images, Reading):
        images = torch.from_numpy(images.features)
    if not isinstance(images, Tensor) or images.ndim < 2 or not len(images):
        return set()
    if matches := [_split_of[row] for row in _rows(images.detach()) if row in _split_of]:
        # a row that was read of two splits tells nothing
        return set().union(*(splits for splits in matches if len(splits) == 1))
    if images.ndim != 4:
        return set()
    flat = images.detach().double().flatten(1)
    low, high = flat.amin(1), flat.amax(1)
    corner = images[:, 0, 0, :2].double()  # marks are the least and the greatest value of an image
    scaled = (corner - low[:, None]) / (high - low)[:, None]
    marks = {tuple(row) for row in scaled.tolist()}
    return {SPLITS[mark] for mark in marks if mark in SPLITS}


def watch(patch: pytest.MonkeyPatch) -> None:
    """Let `fit` and everything in `MEASURES` raise `Leak` for images of a wrong split."""
    _replace_everywhere(patch, fit, _watched_fit)
    for measure, argument in MEASURES.items():
        _replace_everywhere(patch, measure, _watched(measure, argument, "validation", "test"))
    _replace_everywhere(patch, pretrain, _watched(pretrain, "images", "train"))
    for fitted, argument in FITTED.items():
        _replace_everywhere(patch, fitted, _watched(fitted, argument, "train"))
    patch.setattr(study, "save_outcome", _watched_job(study.save_outcome))
    _split_of.clear()
    for reader, argument in READERS.items():
        _replace_everywhere(patch, reader, _remembered(reader, argument))
    read = _remembered(FeatureClassifier.read, "images")
    patch.setattr(FeatureClassifier, "read", read)


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


def _watched_job(saved: Callable) -> Callable:
    """Return what runs a job of a study, so that a try reads no test image."""

    def run(task: partial, job: Job) -> Any:
        marks = getattr(job.variant, "is_try", False), task.keywords.get("is_try", False)
        if any(marks) or task.func.__name__ == "try_setting":
            _barred.add("test")
        try:
            return saved(task, job)
        finally:
            _barred.clear()

    return run


def _watched(function: Callable, argument: str, *allowed: str) -> Callable:
    signature = inspect.signature(function)

    @wraps(function)
    def watched(*args: Any, **kwargs: Any) -> Any:
        images = signature.bind(*args, **kwargs).arguments[argument]
        _allow(function.__name__, splits_of(images), set(allowed) - _barred)
        return function(*args, **kwargs)

    return watched


def _remembered(function: Callable, argument: str) -> Callable:
    """Return a reader that remembers of which split every row is that it returns."""
    signature = inspect.signature(function)

    @wraps(function)
    def reader(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        splits = splits_of(signature.bind(*args, **kwargs).arguments[argument])
        rows = result.features() if isinstance(result, Object) else result
        rows = rows.images if isinstance(rows, Split) else rows
        if len(splits) == 1:
            for row in _rows(rows.features if isinstance(rows, Reading) else rows):
                _split_of.setdefault(row, set()).update(splits)
        return result

    return reader


def _rows(values: Any) -> list[bytes]:
    """Return the numbers of every row of a tensor or an array (N, ...), as bytes."""
    return [row.tobytes() for row in np.ascontiguousarray(values).reshape(len(values), -1)]


def _allow(reader: str, read: Iterable[str], allowed: set[str]) -> None:
    if wrong := set(read) - allowed:
        raise Leak(f"{reader} read images of {sorted(wrong)}, and may read {sorted(allowed)}")


def _replace_everywhere(patch: pytest.MonkeyPatch, old: Callable, new: Callable) -> None:
    """Replace a function under its names in the package.

    A function of the library keeps its name where it is defined, because it may call itself there;
    what only remembers has no such harm.
    """
    at_home = old in READERS or old.__module__.startswith("capsule_zoo.experiments.")
    exempt = () if at_home else (old.__module__,)
    unwatched = (*exempt, SHOWS_BOTH, BY_LAYERS)
    for name, module in sys.modules.copy().items():  # a thread may import meanwhile
        if not name.startswith("capsule_zoo") or name in unwatched:
            continue
        for attribute, value in list(vars(module).items()):
            if value is old:
                patch.setattr(module, attribute, new)
