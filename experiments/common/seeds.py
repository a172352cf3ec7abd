"""One training from several seeds: the same length, on one thread of torch or on several."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import Any

import pyro
import torch

from capsule_zoo.experiments import Job, Options, Study
from capsule_zoo.experiments.common.findings import mean_and_error, single
from capsule_zoo.records import Numbers


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Use this many threads of torch, and as many as before at the end."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def from_seeds(
    task: Callable[[Options], Any], options: Options, seeds: int, numbers: Mapping[str, int]
) -> dict[str, list]:
    """Return what a task gives at every seed, for each number of threads by name.

    Args:
        task: a function of a module, or a partial of one, whose limits do not depend on the
            minutes of its options.
        numbers: numbers of threads by name.
    """
    study = Study(dict(numbers), seeds)
    options.say(f"Training {seeds * len(numbers)} times")
    return study.run(_on_threads, replace(options, minutes=None), task=task)


def _on_threads(job: Job[int], *, task: Callable[[Options], Any]) -> Any:
    with threads(job.variant):
        pyro.set_rng_seed(job.options.seed)
        return task(job.options)


def spread(values: list[float]) -> Numbers:
    """Return the mean over seeds with its error, and the median, lowest and highest value."""
    count = len(values)
    return {
        "mean": mean_and_error(values),
        "median": single(median(values), count),
        "lowest": single(min(values), count),
        "highest": single(max(values), count),
    }
