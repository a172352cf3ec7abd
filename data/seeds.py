"""Random numbers that depend on a few integers alone: generators and separate streams."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from pyro.util import get_rng_state, set_rng_state


def seeded_generator(*numbers: int) -> torch.Generator:
    """Return a CPU generator seeded by a list of integers; (1, 2) and (1, 2, 0) differ."""
    return torch.Generator().manual_seed(_seed_of(*numbers))


def _seed_of(*numbers: int) -> int:
    """Return a seed of 64 bits from a list of integers."""
    if any(number < 0 for number in numbers):
        raise ValueError(f"a seed must not be negative, and one of {numbers} is")
    entropy = (len(numbers), *numbers)  # numpy gives (1, 2) and (1, 2, 0) one seed
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0])


class RandomStream:
    """A separate global random state (torch, numpy, `random`), for code without a generator.

    >>> stream = RandomStream(seed, epoch)
    >>> with stream.active():
    ...     first = torch.rand(1)  # a function of seed and epoch
    >>> with stream.active():
    ...     second = torch.rand(1)  # continues the stream

    Outside `active` the global state is unchanged.

    Args:
        numbers: not negative. Different numbers give different streams.
    """

    def __init__(self, *numbers: int) -> None:
        self._seed = _seed_of(*numbers)
        self._state: dict[str, Any] | None = None

    @contextmanager
    def active(self) -> Iterator[None]:
        outer = _global_state()
        if self._state is None:
            torch.manual_seed(self._seed)
            random.seed(self._seed)
            np.random.seed(self._seed % 2**32)
        else:
            _set_global_state(self._state)
        try:
            yield
        finally:
            self._state = _global_state()
            _set_global_state(outer)


def _global_state() -> dict[str, Any]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {**get_rng_state(), "cuda": cuda}


def _set_global_state(state: dict[str, Any]) -> None:
    set_rng_state(state)
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])
