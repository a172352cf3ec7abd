"""Batches in an order that depends on nothing but (seed, epoch), so that a run can be resumed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from capsule_zoo.data.splits import Split

Transform = Callable[..., Tensor]


def seeded_generator(*numbers: int) -> torch.Generator:
    """A CPU generator that is a function of all the numbers; (1, 2) and (1, 2, 0) differ."""
    if any(number < 0 for number in numbers):
        raise ValueError(f"a seed must not be negative, and one of {numbers} is")
    entropy = (len(numbers), *numbers)  # numpy itself takes (1, 2) and (1, 2, 0) for the same seed
    state = np.random.SeedSequence(entropy).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0]))


class Batches:
    """Shuffled batches of a split, epoch by epoch.

    The order of epoch e is a function of (seed, e) and the randomness of a transform one of
    (seed, e, batch). A run that stopped after batch b of epoch e goes on with
    `batches.epoch(e, start=b)` and sees what it would have seen. Images stay on their device, and
    the random numbers are the same on all of them.

    Args:
        split: images and labels.
        batch_size: images per batch; the last batch of an epoch holds what is left.
        seed: not negative.
        transform: called as `transform(images, generator=generator)` on every batch.

    Raises:
        ValueError: an empty split, a batch size below 1, a negative seed.
    """

    def __init__(
        self,
        split: Split,
        batch_size: int,
        seed: int = 0,
        transform: Transform | None = None,
    ) -> None:
        if len(split) == 0:
            raise ValueError("split is empty; give at least one image")
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {batch_size}")
        if seed < 0:
            raise ValueError(f"seed must not be negative, but is {seed}")
        self.split = split
        self.batch_size = batch_size
        self.seed = seed
        self.transform = transform

    def __len__(self) -> int:
        """Batches per epoch."""
        return -(-len(self.split) // self.batch_size)

    def order(self, epoch: int) -> Tensor:
        """The permutation of the split that epoch `epoch` walks through, on the CPU."""
        generator = seeded_generator(self.seed, epoch)
        return torch.randperm(len(self.split), generator=generator)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (images, labels) of the epoch's batches, from batch number `start` on."""
        images, labels = self.split.images, self.split.labels
        order = self.order(epoch).to(images.device)
        for batch in range(start, len(self)):
            chosen = order[batch * self.batch_size : (batch + 1) * self.batch_size]
            selected = images.index_select(0, chosen)
            if self.transform is not None:
                generator = seeded_generator(self.seed, epoch, batch)
                selected = self.transform(selected, generator=generator)
            yield selected, labels.index_select(0, chosen)
