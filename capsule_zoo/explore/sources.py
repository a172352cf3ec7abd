"""Sources for the explorer: entries, weights and run folders, with images that fit them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from capsule_zoo import registry
from capsule_zoo.data import MissingData
from capsule_zoo.data.datasets import load_tests
from capsule_zoo.data.progress import announce
from capsule_zoo.explore.view import View
from capsule_zoo.guides import Peeling
from capsule_zoo.models import Model, OnRequest, PartWholeCapsules, Scenes, ShapeCodes
from capsule_zoo.models.common.modes import use_seed
from capsule_zoo.registry import Entry, create, list_models, load, small_settings, takes_images
from capsule_zoo.runs.folder import open_run, whole_pictures_of
from capsule_zoo.zoo.generative_capsnet.view import RequestView
from capsule_zoo.zoo.part_whole.view import PartWholeView
from capsule_zoo.zoo.scenes.view import ScenesView
from capsule_zoo.zoo.scenes.whole_view import WholePictureView
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
    if isinstance(entry.model, Scenes) and entry.model.log_intensity is not None:
        return WholePictureView(entry.model, entry.guide_of(Peeling))
    for kind, view in VIEWS.items():
        if isinstance(entry.model, kind):
            return view(entry.model, entry.guide)
    raise ValueError(
        f"there is no view of {entry.name or type(entry.model).__name__}; these have one: "
        f"{', '.join(viewable())}"
    )


def viewable() -> list[str]:
    """Return the names of the registered entries that have a view."""
    with torch.random.fork_rng(devices=[]):
        models = {name: create(name, **small_settings(name)).model for name in list_models()}
    return [name for name, model in models.items() if isinstance(model, tuple(VIEWS))]


def open_source(
    source: str, data: str | None = None, data_root: str | Path | None = None
) -> tuple[View, Sequence[Tensor] | Tensor, str]:
    """Open a source: return its view, images and a title; see `Explorer.of` and `Explorer`."""
    root = None if data_root is None else Path(data_root)
    if registry.recipe_path(source):
        entry, title = load(source), Path(source).resolve().name
        view = view_of(entry)
        if data is None:  # what is refused then says nothing else
            announce(f"loading {source} and its images")
        if (whole := whole_pictures_of(source, entry, data)) is not None:
            return view, whole[0], title
        try:
            dataset = open_run(source, data, root, only_tests=True)[1]
        except MissingData:
            if data is not None:
                raise
            channels, *size = entry.model.image_shape
            name = registry.find_registration(entry.name).data
            digits = load_tests(name, size=(size[0], size[1]))
            dataset = digits.transform_images(lambda images: images.expand(-1, channels, -1, -1))
            title += ", with scikit-learn's digits, as its own images are not there"
    elif source in list_models():
        dataset = load_tests(data or registry.find_registration(source).data, root)
        with use_seed(0):
            shape = {"image_shape": dataset.image_shape} if takes_images(source) else {}
            entry = create(source, **shape)
        view, title = view_of(entry), f"{source}, not trained"
    else:
        names = sorted({*registry.trained_names(), *list_models()})
        raise ValueError(registry.unknown_source("entry or trained entry", source, names))
    entry.model.space.check(dataset.test.images[:1])
    return view, dataset.test.images, title
