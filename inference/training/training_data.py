"""Conversion of the data of `fit` to batches and a held-out split."""

from collections.abc import Callable, Iterable

import torch
from torch.utils.data import DataLoader

from capsule_zoo.data import Batches, Dataset, Split
from capsule_zoo.data.batches import Batch, BatchSource, Transform
from capsule_zoo.data.readable import Data, as_source
from capsule_zoo.data.seeds import RandomStream
from capsule_zoo.data.streams import ItemBatches, LoaderBatches, items_in, read_items, read_loader
from capsule_zoo.models.common.spaces import space_of

HELD_OUT_IMAGES = 1000
BATCH_SIZE = 128


def training_batches(
    data: Data,
    model: Callable,
    batch_size: int | None,
    seed: int,
    transform: Transform | None,
    labels: bool,
) -> BatchSource:
    """Convert data to the training batches of a run.

    Args:
        data: see `fit`.
        model: the model, which may define the images that it takes.
        batch_size: default `BATCH_SIZE`; a `DataLoader` has its own.
        seed, transform: see `BatchSource`.
        labels: True if labels are needed.

    Raises:
        ValueError: `data` is of another kind, or holds images that the model does not take.
    """
    check = space_of(model).check
    source = as_source(data.train if isinstance(data, Dataset) else data, "data", check, labels)
    if isinstance(source, DataLoader):
        if batch_size is not None:
            raise ValueError(
                f"batch_size={batch_size} is given, but a DataLoader makes its own batches; leave "
                "batch_size out and set that of the DataLoader"
            )
        return LoaderBatches(source, seed, transform, check=check, labels=labels)
    size = BATCH_SIZE if batch_size is None else batch_size
    if isinstance(source, Split):
        return Batches(source, size, seed, transform, shuffle=size < len(source))
    shuffle = size < items_in(source)
    return ItemBatches(source, size, seed, transform, shuffle, check=check, labels=labels)


def held_out(data: Data, validation: Data | None, model: Callable, labels: bool) -> Split | None:
    """Return at most `HELD_OUT_IMAGES` images that training does not see, or None.

    The images come from `validation` if it is given, else from the validation split of a `Dataset`.
    A `DataLoader` is read until there are enough images. From any other source a random subset is
    taken, which does not depend on the run.
    """
    if validation is None and isinstance(data, Dataset) and len(data.validation or ()):
        validation = data.validation
    if validation is None:
        return None
    check = space_of(model).check
    if isinstance(validation, Dataset):
        validation = validation.validation
    source = as_source(validation, "validation", check, labels)
    with RandomStream(0).active():
        if isinstance(source, DataLoader):
            return _first_images(read_loader(source, check, labels))
        shuffle = torch.randperm(items_in(source), generator=torch.Generator().manual_seed(0))
        indices = shuffle[:HELD_OUT_IMAGES]
        if isinstance(source, Split):
            return source[indices]
        return Split(*read_items(source, indices, check, labels))


def _first_images(batches: Iterable[Batch]) -> Split:
    parts: list[Batch] = []
    for batch in batches:
        parts.append(batch)
        if sum(len(images) for images, _ in parts) >= HELD_OUT_IMAGES:
            break
    if not parts:
        raise ValueError("validation is a DataLoader without a batch; give at least one image")
    images, labels = zip(*parts, strict=True)
    whole = Split(torch.cat(images), None if labels[0] is None else torch.cat(labels))
    return whole[:HELD_OUT_IMAGES]
