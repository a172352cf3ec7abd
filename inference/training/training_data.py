"""Conversion of all data that `fit` accepts to batches and a held-out split."""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data import Dataset as TorchDataset

from capsule_zoo.data import Batches, Dataset, Split
from capsule_zoo.data.batches import BatchSource, Transform
from capsule_zoo.data.seeds import RandomStream
from capsule_zoo.data.splits import labels_of
from capsule_zoo.data.streams import (
    ItemBatches,
    LoaderBatches,
    images_and_labels,
    items_in,
    read_items,
)
from capsule_zoo.models.common.spaces import space_of

HELD_OUT_IMAGES = 1000
BATCH_SIZE = 128

Data = Dataset | Split | Tensor | np.ndarray | TorchDataset | DataLoader


def training_batches(
    data: Data,
    model: Callable,
    batch_size: int | None,
    seed: int,
    transform: Transform | None,
    labels: bool,
) -> BatchSource:
    """Return the training batches of a run.

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
    readable = _readable(data.train if isinstance(data, Dataset) else data, "data", check, labels)
    if isinstance(readable, DataLoader):
        if batch_size is not None:
            raise ValueError(
                f"batch_size={batch_size} is given, but a DataLoader makes its own batches; leave "
                "batch_size out and set that of the DataLoader"
            )
        return LoaderBatches(readable, seed, transform, check=check, labels=labels)
    size = BATCH_SIZE if batch_size is None else batch_size
    if isinstance(readable, Split):
        return Batches(readable, size, seed, transform, shuffle=size < len(readable))
    shuffle = size < items_in(readable)
    return ItemBatches(readable, size, seed, transform, shuffle, check=check, labels=labels)


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
    readable = _readable(validation, "validation", check, labels)
    with RandomStream(0).active():
        if isinstance(readable, DataLoader):
            return _first_images(readable, partial(images_and_labels, check=check, labels=labels))
        shuffle = torch.randperm(items_in(readable), generator=torch.Generator().manual_seed(0))
        chosen = shuffle[:HELD_OUT_IMAGES]
        if isinstance(readable, Split):
            return readable[chosen]
        return Split(*read_items(readable, chosen, check, labels))


def _first_images(loader: DataLoader, parts: Callable) -> Split:
    images: list[Tensor] = []
    numbers: list[Tensor] = []
    for batch in loader:
        some_images, some_labels = parts(batch)
        images.append(some_images)
        if some_labels is not None:
            numbers.append(some_labels)
        if sum(map(len, images)) >= HELD_OUT_IMAGES:
            break
    if not images:
        raise ValueError("validation is a DataLoader without a batch; give at least one image")
    labels = torch.cat(numbers) if numbers else None
    return Split(torch.cat(images), labels)[:HELD_OUT_IMAGES]


def _readable(
    data: Data, name: str, check: Callable[[Tensor], None], labels: bool
) -> Split | TorchDataset | DataLoader:
    """Return data as one of three kinds; data in memory becomes a split."""
    if isinstance(data, np.ndarray):
        data = tensor_of(data, name)
    if isinstance(data, Tensor):
        if labels:
            raise ValueError("labels=True needs data with labels: give a Split or a TensorDataset")
        check(data)
        return Split(data)
    if isinstance(data, TensorDataset):
        return Split(*images_and_labels(data.tensors, check, labels))
    if isinstance(data, Split):
        check(data.images)
        if labels:
            labels_of(data)
        return data
    if isinstance(data, DataLoader | TorchDataset):
        return data
    kind = "None" if data is None else f"a {type(data).__name__}"
    raise ValueError(
        f"{name} must be a Dataset, a Split, images (N, C, H, W) as a torch.Tensor or a numpy "
        f"array, a torch Dataset or a torch DataLoader, not {kind}; see load_dataset(name), "
        "Split(images, labels), and numpy.stack for a list of images of one shape"
    )


def tensor_of(array: np.ndarray, name: str) -> Tensor:
    """Return an array of numbers, in any layout and byte order, as a tensor."""
    if array.dtype.kind not in "fiub" or array.dtype.itemsize > 8:
        raise ValueError(
            f"{name} must hold floating point pixels, not {array.dtype}; stack images of one shape"
        )
    native = array.dtype.newbyteorder("=")
    return torch.from_numpy(np.require(array, dtype=native, requirements=["C", "W"]))
