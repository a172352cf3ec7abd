"""How an experiment trains an entry: by the entry's own settings, as the options say."""

from __future__ import annotations

from typing import Any

from torch import nn

from capsule_zoo.data import Dataset, Split
from capsule_zoo.experiments import Options
from capsule_zoo.inference import Run, fit
from capsule_zoo.registry import Entry


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
