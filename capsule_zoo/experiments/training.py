"""Training of entries in experiments, by the entry's own settings and the options."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, TypeVar

import torch
from torch import nn

from capsule_zoo.data import Dataset, Split
from capsule_zoo.experiments import Options
from capsule_zoo.inference import Run, fit
from capsule_zoo.registry import Entry, create, load

T = TypeVar("T")
S = TypeVar("S")


def train(
    entry: Entry,
    data: Dataset | Split,
    options: Options,
    minutes: float | None = None,
    *,
    guide: nn.Module | None = None,
    **settings: Any,
) -> Run:
    """Fit an entry, energy models from visible biases at the data's mean; leaves it on the CPU.

    Args:
        guide: the one to train; the entry's own by default.
        settings: of `fit`, over those of the entry.
    """
    guide = entry.guide if guide is None else guide
    if hasattr(entry.model, "set_base_rates"):
        images = data.train.images if isinstance(data, Dataset) else data.images
        entry.model.set_base_rates(images)
    chosen: dict[str, Any] = {
        "objective": entry.objective,
        "minutes": minutes,
        "seed": options.seed,
        "progress": options.progress,
        "device": options.device,
        **entry.training,
        **settings,
    }
    run = fit(entry.model, guide, data, **chosen)
    entry.model.cpu()
    guide.cpu()
    return run


def trained(name: str, data: Dataset, options: Options, minutes: float, **settings: Any) -> Entry:
    """What the options name, or the entry of that name trained on `data` for so long."""
    if options.run:
        return load(options.run)
    entry = create(name, image_shape=data.image_shape)
    train(entry, data, options, options.minutes or minutes, **settings)
    return entry


def shortened(steps: int, length: float) -> int:
    """Optimizer steps where a run is `length` times as long as a full one, which takes `steps`."""
    return max(2, round(steps * min(length, 1)))


def side_by_side(task: Callable[[T], S], jobs: Iterable[T]) -> list[S]:
    """The task of every job, each on one thread of its own process, as many as torch has threads.

    Two models of the zoo's sizes train faster side by side than one after the other on two threads.
    """
    context = get_context("spawn")  # a fork would inherit torch's threads, which do not survive it
    with ProcessPoolExecutor(
        torch.get_num_threads(), context, torch.set_num_threads, (1,)
    ) as processes:
        return list(processes.map(task, jobs))
