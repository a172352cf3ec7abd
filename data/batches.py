"""Batches in an order that depends only on (seed, epoch), so that a run can be resumed."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from capsule_zoo.data.seeds import RandomStream, seeded_generator
from capsule_zoo.data.splits import Split

Transform = Callable[..., Tensor]
Batch = tuple[Tensor, Any]  # images, and their labels or None


class BatchSource(ABC):
    """Base class of batches of images and labels, epoch by epoch, in an order that can be resumed.

    Args:
        batch_size: images per batch; the last batch of an epoch may hold fewer.
        seed: not negative.
        transform: called on the images of every batch, as `transform(images, generator=generator)`
            if it takes a generator, and as `transform(images)` otherwise. A transform without a
            generator may draw from the global streams of torch, numpy and `random`. They are
            seeded before the call and restored afterwards.

    Raises:
        ValueError: a batch size below 1, a negative seed, a transform that cannot be called.
    """

    def __init__(self, batch_size: int, seed: int = 0, transform: Transform | None = None) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {batch_size}")
        if seed < 0:
            raise ValueError(f"seed must not be negative, but is {seed}")
        if transform is not None and not callable(transform):
            raise ValueError(f"transform must be a function of images, not {transform!r}")
        self.batch_size = batch_size
        self.seed = seed
        self.transform = transform
        self._takes_generator = transform is not None and takes_generator(transform)

    @property
    @abstractmethod
    def num_images(self) -> int:
        """The number of images per epoch."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of batches per epoch."""

    @abstractmethod
    def example(self) -> Batch:
        """Return untransformed images and labels: all if one batch holds them, else two of each."""

    @abstractmethod
    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch, (images, labels or None), from batch number `start` on."""

    def _transform_images(self, images: Tensor, epoch: int, batch: int) -> Tensor:
        """Apply the transform to images, with random numbers from (seed, epoch, batch)."""
        if self.transform is None:
            return images
        if self._takes_generator:
            return self.transform(images, generator=seeded_generator(self.seed, epoch, batch))
        with RandomStream(self.seed, epoch, batch).active():
            return self.transform(images)


def takes_generator(transform: Transform) -> bool:
    """Return whether a transform can be called with the keyword `generator`."""
    program = transform.forward if isinstance(transform, nn.Module) else transform
    try:
        parameters = inspect.signature(program).parameters.values()
    except ValueError:  # some functions written in C have no signature
        return False
    return any(p.name == "generator" or p.kind is p.VAR_KEYWORD for p in parameters)


class ShuffledBatches(BatchSource):
    """The batches of numbered images in an order that is a function of (seed, epoch) alone.

    Args:
        size: number of images.
        batch_size, seed, transform: see `BatchSource`.
        shuffle: False keeps the images in the order of their numbers.

    Raises:
        ValueError: no image, a batch size below 1, a negative seed.
    """

    def __init__(
        self,
        size: int,
        batch_size: int,
        seed: int = 0,
        transform: Transform | None = None,
        shuffle: bool = True,
    ) -> None:
        if size == 0:
            raise ValueError("split is empty; give at least one image")
        super().__init__(batch_size, seed, transform)
        self.size = size
        self.shuffle = shuffle

    @property
    def num_images(self) -> int:
        return self.size

    def __len__(self) -> int:
        return -(-self.size // self.batch_size)

    def order(self, epoch: int) -> Tensor:
        """Return the permutation of the images' numbers in an epoch, on the CPU."""
        if not self.shuffle:
            return torch.arange(self.size)
        generator = seeded_generator(self.seed, epoch)
        return torch.randperm(self.size, generator=generator)

    def example(self) -> Batch:
        whole = self.batch_size >= self.size
        return self._take(torch.arange(self.size if whole else 2), 0, 0)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        order = self.order(epoch)
        for batch in range(start, len(self)):
            indices = order[batch * self.batch_size : (batch + 1) * self.batch_size]
            images, labels = self._take(indices, epoch, batch)
            yield self._transform_images(images, epoch, batch), labels

    @abstractmethod
    def _take(self, indices: Tensor, epoch: int, batch: int) -> Batch:
        """Return the images and labels with the given numbers."""


class Batches(ShuffledBatches):
    """The shuffled batches of a split, epoch by epoch.

    The order of epoch e is a function of (seed, e). The randomness of a transform is a function of
    (seed, e, batch). A run that stopped after batch b of epoch e continues with
    `batches.epoch(e, start=b)` and sees the batches that it would have seen without the stop.
    Images stay on their device, and random numbers are equal on all devices.

    Args:
        split: images and labels.
        batch_size, seed, transform, shuffle: see `ShuffledBatches`.

    Raises:
        ValueError: an empty split, a batch size below 1, a negative seed.
    """

    def __init__(
        self,
        split: Split,
        batch_size: int,
        seed: int = 0,
        transform: Transform | None = None,
        shuffle: bool = True,
    ) -> None:
        super().__init__(len(split), batch_size, seed, transform, shuffle)
        self.split = split

    def _take(self, indices: Tensor, epoch: int, batch: int) -> Batch:
        indices = indices.to(self.split.images.device)
        labels = self.split.labels
        targets = None if labels is None else labels.index_select(0, indices)
        return self.split.images.index_select(0, indices), targets
