"""Batches that are read during a run, from a torch `Dataset` or a torch `DataLoader`.

Both are read in an order that a resumed run can repeat. An item, or a batch of a loader, is either
images alone or (images, labels).
"""

from collections.abc import Callable, Iterator, Sized
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data.distributed import DistributedSampler

from capsule_zoo.data.batches import Batch, BatchSource, ShuffledBatches, Transform
from capsule_zoo.data.seeds import RandomStream, seeded_generator
from capsule_zoo.data.splits import labels_for
from capsule_zoo.data.tensors import tensor_of

CheckImages = Callable[[Tensor], None]
_ITEMS = 1  # separates the stream of reading items from the stream of the transform


class ItemBatches(ShuffledBatches):
    """The shuffled batches of a map-style torch `Dataset`, whose items are read when needed.

    The order is the order of `Batches`. Random numbers that an item draws from the global streams
    of torch, numpy and `random` are a function of (seed, epoch, batch). A resumed run therefore
    sees the items that it would have seen without a stop.

    Args:
        dataset: yields an image (C, H, W), or (image, label), for a number.
        batch_size, seed, transform, shuffle: see `Batches`.
        check: raises ValueError where a batch of images is not what the model takes.
        labels: whether labels are read; otherwise they are None.

    Raises:
        ValueError: an empty data set, or an item that is neither of the two.
    """

    def __init__(
        self,
        dataset: TorchDataset,
        batch_size: int,
        seed: int = 0,
        transform: Transform | None = None,
        shuffle: bool = True,
        *,
        check: CheckImages,
        labels: bool,
    ) -> None:
        super().__init__(items_in(dataset), batch_size, seed, transform, shuffle)
        self.dataset = dataset
        self.check = check
        self.labels = labels

    def _take(self, indices: Tensor, epoch: int, batch: int) -> Batch:
        with RandomStream(self.seed, epoch, batch, _ITEMS).active():
            return read_items(self.dataset, indices, self.check, self.labels)


class LoaderBatches(BatchSource):
    """The batches of a torch `DataLoader`, in the order that the loader gives them.

    Everything that the loader and its data draw from the global streams of torch, numpy and
    `random` is a function of (seed, epoch), and so is a generator that the loader was given. A
    resumed run reads its epoch from the beginning and skips the batches that it has seen. It
    then sees the batches of a run without a stop, unless the data draw from other streams, or
    workers are persistent and draw (they keep their random state from epoch to epoch).

    Args:
        loader: its length must be known, as it is for every map-style data set.
        seed, transform: see `BatchSource`.
        check, labels: see `ItemBatches`.

    Raises:
        ValueError: a loader of unknown length, without a batch, or with a `DistributedSampler`; a
            batch that is neither images nor (images, labels).
    """

    def __init__(
        self,
        loader: DataLoader,
        seed: int = 0,
        transform: Transform | None = None,
        *,
        check: CheckImages,
        labels: bool,
    ) -> None:
        samplers = (loader.sampler, getattr(loader.batch_sampler, "sampler", None))
        if any(isinstance(sampler, DistributedSampler) for sampler in samplers):
            raise ValueError(
                "data is a DataLoader with a DistributedSampler, but every process needs the whole "
                "batches and takes its part of each; leave the sampler out"
            )
        try:
            self._length = len(loader)
        except TypeError as error:
            raise ValueError(
                "data is a DataLoader of unknown length; give its IterableDataset a __len__ "
                "(images per epoch)"
            ) from error
        self.loader = loader
        self.check = check
        self.labels = labels
        super().__init__(loader.batch_size or 1, seed, transform)
        first = next(self._read(0), None)
        if first is None:
            raise ValueError("data is a DataLoader without a batch; give at least one image")
        self.batch_size = max(self.batch_size, len(first[0]))
        count = len(first[0]) if len(self) == 1 else 2
        self._example = first[0][:count], None if first[1] is None else first[1][:count]

    @property
    def num_images(self) -> int:
        dataset = self.loader.dataset
        return len(dataset) if isinstance(dataset, Sized) else len(self) * self.batch_size

    def __len__(self) -> int:
        return self._length

    def example(self) -> Batch:
        return self._example

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        read = 0
        for batch, (images, labels) in enumerate(self._read(epoch)):
            read = batch + 1
            if batch >= start:
                yield self._transform_images(images, epoch, batch), labels
            if read == len(self):
                return
        raise ValueError(
            f"data is a DataLoader that gave {read} batches in epoch {epoch}, but its length is "
            f"{len(self)}; make both agree"
        )

    def _read(self, epoch: int) -> Iterator[Batch]:
        return _read_epoch(self.loader, self.seed, epoch, self.check, self.labels)


def read_loader(loader: DataLoader, check: CheckImages, labels: bool) -> Iterator[Batch]:
    """Yield the batches of a loader, equal at every call, and restore its generators.

    Args:
        check, labels: see `ItemBatches`.
    """
    samplers = (loader, loader.sampler, loader.batch_sampler)
    owned = [getattr(sampler, "generator", None) for sampler in samplers]
    states = [(g, g.get_state()) for g in owned if isinstance(g, torch.Generator)]
    try:
        yield from _read_epoch(loader, 0, 0, check, labels)
    finally:
        for generator, state in states:
            generator.set_state(state)


def _read_epoch(
    loader: DataLoader, seed: int, epoch: int, check: CheckImages, labels: bool
) -> Iterator[Batch]:
    """Yield the loader's batches, each read in the random stream of the epoch."""
    stream = RandomStream(seed, epoch)
    for sampler in (loader, loader.sampler, loader.batch_sampler):
        if isinstance(generator := getattr(sampler, "generator", None), torch.Generator):
            generator.manual_seed(seeded_generator(seed, epoch).initial_seed())
        if set_epoch := getattr(sampler, "set_epoch", None):
            set_epoch(epoch)
    with stream.active():
        batches = iter(loader)
    while True:
        with stream.active():
            batch = next(batches, None)
        if batch is None:
            return
        yield images_and_labels(batch, check, labels)


def read_items(dataset: TorchDataset, indices: Tensor, check: CheckImages, labels: bool) -> Batch:
    """Read the items with these numbers, as images (n, C, H, W) and labels (n,)."""
    items = [dataset[number] for number in indices.tolist()]
    if not labels:  # the other entries may be anything
        items = [item[0] if isinstance(item, tuple | list) else item for item in items]
    try:
        batch = default_collate(items)
    except (TypeError, RuntimeError) as error:
        raise ValueError(
            "the items of data cannot be made into a batch; an item must be an image (C, H, W), or "
            "(image, label), and all images tensors or numpy arrays of one shape (torchvision: "
            f"transform=ToTensor()): {error}"
        ) from error
    return images_and_labels(batch, check, labels)


def images_and_labels(batch: Any, check: CheckImages, labels: bool, name: str = "data") -> Batch:
    """Split a batch, images or (images, labels), into images and labels.

    Args:
        batch: tensors or numpy arrays.
        check: raises ValueError where the images are not what the model takes.
        labels: whether labels are wanted; otherwise they are None.
        name: name of the argument, for errors.

    Raises:
        ValueError: the batch is neither, or it lacks the labels that are wanted.
    """
    parts = batch if isinstance(batch, tuple | list) else (batch,)
    if not parts or isinstance(parts[0], dict):
        raise ValueError(
            f"a batch of data must be images or (images, labels), not {_describe_batch(batch)}; "
            "give a DataLoader with a collate_fn that picks them"
        )
    images = tensor_of(parts[0], name) if isinstance(parts[0], np.ndarray) else parts[0]
    check(images)
    if not labels:
        return images, None
    if len(parts) < 2:
        raise ValueError(
            f"{name} has no labels, which are needed here: give a Split or a TensorDataset of "
            "images and labels, or data that yield (image, label)"
        )
    return images, labels_for(images, parts[1])


def items_in(dataset: TorchDataset) -> int:
    """Return the number of items of a data set; ValueError if it is empty or not map-style."""
    size = getattr(dataset, "__len__", None)
    if size is None or isinstance(dataset, IterableDataset):
        raise ValueError(
            f"data is a {type(dataset).__name__}, a torch Dataset that cannot be read by number; "
            "wrap it in a torch.utils.data.DataLoader"
        )
    if size() == 0:
        raise ValueError(f"data is an empty {type(dataset).__name__}; give at least one image")
    return size()


def _describe_batch(batch: Any) -> str:
    if isinstance(batch, dict):
        return f"a dict with the keys {', '.join(map(repr, batch))}"
    return f"a {type(batch).__name__} of {len(batch)}" if isinstance(batch, Sized) else repr(batch)
