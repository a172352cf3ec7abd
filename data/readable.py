"""Conversion of the data that training and evaluation take: splits in memory, or batches."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data import Dataset as TorchDataset

from capsule_zoo.data.batches import Batch
from capsule_zoo.data.splits import Dataset, Split, labels_of
from capsule_zoo.data.streams import (
    CheckImages,
    ItemBatches,
    images_and_labels,
    items_in,
    read_loader,
)

Data = Dataset | Split | Tensor | np.ndarray | TorchDataset | DataLoader | Sequence
_SHUFFLING = RandomSampler, SubsetRandomSampler, WeightedRandomSampler


def as_source(
    data: Data, name: str, check: CheckImages, labels: bool
) -> Split | TorchDataset | DataLoader:
    """Convert data to a split, a torch `Dataset` or a `DataLoader`; data in memory become a split.

    Args:
        data: any of `Data` except a `Dataset` of the zoo, of which the caller takes a split.
        name: name of the argument, for errors.
        check: raises ValueError where the images are not what the model takes.
        labels: whether labels are wanted.

    Raises:
        ValueError: data of another type, images that fail the check, or no labels.
    """
    if isinstance(data, list | tuple) and (batches := _batches_in(data)):
        parts = [images_and_labels(batch, check, labels) for batch in batches]
        images, numbers = zip(*parts, strict=True)
        return Split(torch.cat(images), torch.cat(numbers) if labels else None)
    if isinstance(data, Tensor | np.ndarray):
        return Split(*images_and_labels((data,), check, labels, name))
    if isinstance(data, TensorDataset):
        return Split(*images_and_labels(data.tensors, check, labels, name))
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
        "array, a list of such batches, a torch Dataset or a torch DataLoader, not "
        f"{kind}; see load_dataset(name), Split(images, labels), and numpy.stack for a list of "
        "images of one shape"
    )


def _batches_in(data: Sequence) -> Sequence:
    """Return the batches in a list, images (B, ...) or (images, labels); [] for other items.

    The list itself may be one batch of images and labels, as a DataLoader yields it.
    """
    first = data[0] if data else None
    pair = len(data) == 2 and _rank(first) > 2 and _rank(data[1]) == 1
    batches = [data] if pair else data
    images_of = (
        batch[0] if isinstance(batch, list | tuple) and batch else batch for batch in batches
    )
    ranks = {_rank(images) for images in images_of}
    return batches if ranks == {4} or (pair and len(ranks) == 1) else []


def _rank(value: Any) -> int:
    return value.ndim if isinstance(value, Tensor | np.ndarray) else 0


def is_shuffled(data: Any) -> bool:
    """Return whether data are a `DataLoader` with a random order of images."""
    if not isinstance(data, DataLoader):
        return False
    samplers = data.sampler, getattr(data.batch_sampler, "sampler", None)
    return any(isinstance(sampler, _SHUFFLING) for sampler in samplers)


class ImageStream:
    """The images of a torch `DataLoader` or `Dataset`, read again each time they are split.

    It replaces a tensor (N, C, H, W) in code that only splits its images, so that the images need
    not fit in memory. Two passes in parts of one size give equal images in equal order: random
    numbers from the global streams of torch, numpy and `random` are a function of the number of the
    part alone. The global streams are left as they were.

    Args:
        data: a loader or a map-style data set.
        check: raises ValueError where a batch of images is not what the model takes.
        convert: returns a batch of images and labels on the device and in the precision wanted.
        labels: whether labels are read; otherwise they are None.

    Raises:
        ValueError: no images.
    """

    def __init__(
        self,
        data: TorchDataset | DataLoader,
        check: CheckImages,
        convert: Callable[[Batch], Batch],
        labels: bool = False,
    ) -> None:
        if not isinstance(data, DataLoader):
            items_in(data)
        self.data = data
        self.check = check
        self.convert = convert
        self.labels = labels
        self._size: int | None = None
        first = next(self.split(2), None)
        if first is None:
            raise ValueError(
                f"data is a {type(data).__name__} without a batch; give at least one image"
            )
        self._first = first
        self.dtype, self.device = first.dtype, first.device

    def split(self, rows: int) -> Iterator[Tensor]:
        """Yield the images in parts of `rows` images; the last part may hold fewer."""
        return (images for images, _ in self.batches(rows))

    def batches(self, rows: int) -> Iterator[Batch]:
        """Yield images and labels in parts of `rows` images; the last part may hold fewer."""
        size = 0
        if isinstance(self.data, DataLoader):
            read = read_loader(self.data, self.check, self.labels)
        else:
            batches = ItemBatches(
                self.data, rows, shuffle=False, check=self.check, labels=self.labels
            )
            read = batches.epoch(0)
        for batch in rebatch(read, rows):
            size += len(batch[0])
            yield self.convert(batch)
        self._size = size

    def __len__(self) -> int:
        """Return the number of images; the first call reads all of them if necessary."""
        if self._size is None:
            for _ in self.batches(1000):
                pass
        assert self._size is not None
        return self._size

    def __getitem__(self, rows: slice) -> Tensor:
        """Return the first images, `stream[:rows]`."""
        return self._first[rows] if rows.stop <= 2 else next(self.split(rows.stop))


def rebatch(batches: Iterable[Batch], rows: int) -> Iterator[Batch]:
    """Regroup batches of any sizes into batches of `rows` images."""
    pending: list[Batch] = []
    for batch in batches:
        pending.append(batch)
        if sum(len(images) for images, _ in pending) >= rows:
            images, labels = join_batches(pending)
            full = len(images) // rows * rows
            for begin in range(0, full, rows):
                part = slice(begin, begin + rows)
                yield images[part], None if labels is None else labels[part]
            rest = images[full:], None if labels is None else labels[full:]
            pending = [rest] if len(rest[0]) else []
    if pending:
        yield join_batches(pending)


def join_batches(batches: list[Batch]) -> Batch:
    """Concatenate batches; labels are None if the first batch has none."""
    images, labels = zip(*batches, strict=True)
    return torch.cat(images), None if labels[0] is None else torch.cat(labels)
