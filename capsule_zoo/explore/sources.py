"""Sources for the explorer: entries, weights and run folders, with images of their size."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from capsule_zoo import registry
from capsule_zoo.data import Dataset, MissingData
from capsule_zoo.data.datasets import load_tests
from capsule_zoo.explore.view import View
from capsule_zoo.models import Model, OnRequest, PartWholeCapsules, Scenes, ShapeCodes
from capsule_zoo.models.common.modes import seeded
from capsule_zoo.registry import (
    Entry,
    create,
    default_data,
    list_models,
    load,
    small_settings,
    takes_images,
)
from capsule_zoo.runs.folder import open_run
from capsule_zoo.zoo.generative_capsnet.view import RequestView
from capsule_zoo.zoo.part_whole.view import PartWholeView
from capsule_zoo.zoo.scenes.view import ScenesView
from capsule_zoo.zoo.shape_codes.view import ShapeCodesView

VIEWS: dict[type[Model], type[Any]] = {
    PartWholeCapsules: PartWholeView,
    ShapeCodes: ShapeCodesView,
    OnRequest: RequestView,
    Scenes: ScenesView,
}


def view_of(entry: Entry) -> View:
    """Return a view of an entry's model and guide.

    Raises:
        ValueError: the model has no view; the message names the entries that have one.
    """
    view = _kind_of_view(entry)
    if view is None:
        raise ValueError(
            f"there is no view of {entry.name or type(entry.model).__name__}; these have one: "
            f"{', '.join(viewable())}"
        )
    return view(entry.model, entry.guide)


def _stand_in(entry: Entry, error: MissingData) -> Dataset:
    """Return the entry's default data, which need no download, in its size and channels."""
    if not entry.observes_images:
        raise error
    channels, *size = entry.model.image_shape
    data = load_tests(default_data(entry.name), size=(size[0], size[1]))
    return data.transformed(lambda images: images.expand(-1, channels, -1, -1))


def viewable() -> list[str]:
    """Return the names of registered entries that `view_of` takes."""
    with torch.random.fork_rng(devices=[]):
        entries = {name: create(name, **small_settings(name)) for name in list_models()}
    return [name for name, entry in entries.items() if _kind_of_view(entry)]


def _kind_of_view(entry: Entry) -> type[Any] | None:
    return next((view for kind, view in VIEWS.items() if isinstance(entry.model, kind)), None)


def open_source(
    source: str, data: str | None = None, data_root: str | Path | None = None
) -> tuple[View, Tensor, str]:
    """Return a view, images (N, C, H, W) to show in it, and a title; see `Explorer.of`."""
    root = None if data_root is None else Path(data_root)
    if registry.recipe_path(source):
        title = Path(source).resolve().name
        try:
            entry, dataset, _ = open_run(source, data, root, only_tests=True)
        except MissingData as error:
            if data is not None:
                raise
            entry = load(source)
            dataset = _stand_in(entry, error)
            title += ", with scikit-learn's digits, as its own images are not there"
    elif source in list_models():
        dataset = load_tests(data or default_data(source), root)
        with seeded(0):
            shape = {"image_shape": dataset.image_shape} if takes_images(source) else {}
            entry = create(source, **shape)
        title = f"{source}, not trained"
    else:
        known = sorted({*registry.trained_names(), *list_models()})
        raise ValueError(registry.unknown_source("entry or trained entry", source, known))
    view = view_of(entry)
    entry.model.space.check(dataset.test.images[:1])
    return view, dataset.test.images, title
