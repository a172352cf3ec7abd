"""Training in stages: one level after the other, and then all of them together.

>>> stages = [Stage("parts", 0.7, part_model, part_guide), Stage("all", 0.3, model, guide)]
>>> run = fit_stages(stages, load_dataset("mnist"), minutes=60, checkpoint="run.safetensors")

Every stage is a call of `fit` with a share of the whole length. Its model and guide hold the
parameters of the whole pair, of which a stage may train a part, so that each checkpoint holds
everything. A resumed run continues in the stage in which it was stopped.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from capsule_zoo.data import Batches, Dataset, Split
from capsule_zoo.inference.training.checkpoint import (
    CheckpointError,
    check_same_module,
    load_checkpoint,
    save_checkpoint,
)
from capsule_zoo.inference.training.fit import fit
from capsule_zoo.inference.training.history import COLUMNS, Run
from capsule_zoo.inference.training.schedule import Budget
from capsule_zoo.inference.training.trainer import CheckpointPlace
from capsule_zoo.inference.training.workers import usable_device
from capsule_zoo.models.base import Model
from capsule_zoo.models.checks import check_at_least, check_positive

_BATCH_SIZE = 128


@dataclass(frozen=True)
class Stage:
    """One stage of a training run.

    Attributes:
        name: what is learned, for the progress messages.
        share: share of the length of the whole run.
        model, guide: what is trained; they share all parameters with those of the other stages.
        prepare: a function of the data and the seed that returns what the stage is trained on, and
            may set parameters to a start. None for a stage on the images themselves. It is called
            when the stage begins, and again when a run is resumed in this stage, with parameters
            that may be further; what it sets is then replaced by the checkpoint.
        settings: arguments of `fit` for this stage.
        batches: images of a step, in batches of the run.
        most: steps at most; later stages get what it leaves. None for no limit.
    """

    name: str
    share: float
    model: Model
    guide: Any
    prepare: Callable[[Dataset, int], Dataset | Split] | None = None
    settings: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    batches: int = 1
    most: int | None = None

    def __post_init__(self) -> None:
        check_positive(share=self.share)
        check_at_least(1, batches=self.batches)
        if self.most is not None:
            check_at_least(1, most=self.most)


def fit_stages(
    stages: Sequence[Stage],
    data: Dataset,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    minutes: float | None = None,
    batch_size: int = _BATCH_SIZE,
    seed: int = 0,
    transform: Callable[..., Tensor] | None = None,
    checkpoint: CheckpointPlace | None = None,
    resume: str | os.PathLike | None = None,
    device: str | torch.device = "cpu",
    progress: bool = True,
    say: Callable[[str], None] = print,
    **settings: Any,
) -> Run:
    """Run the stages one after the other, as one run.

    Args:
        stages: at least one.
        data: the data set, which every stage prepares for itself.
        epochs, steps, minutes: length of the whole run, of which each stage gets its share.
        batch_size, seed, checkpoint, device, progress: see `fit`.
        transform: called on the images of each batch. A stage that prepares its data gets all
            images transformed once.
        resume: a checkpoint of such a run.
        say: a function that is called with a line when a stage begins, if `progress`.
        settings: further arguments of `fit` for all stages, which replace those of a stage.

    Returns:
        The record of the whole run, whose history has the steps of all stages. `best_loss` and
        `best_step` are those of the last stage, because stages have losses of their own.

    Raises:
        ValueError: no stage, no length, or an argument that `fit` refuses.
        CheckpointError: the checkpoint is not of a run with these stages.
    """
    if not stages:
        raise ValueError("stages is empty; give at least one Stage")
    budget = Budget.of(epochs, steps, minutes, per_epoch=-(-len(data.train) // batch_size))
    first, done = _resumed(stages, resume, device)
    runs = [] if done is None else [done]
    for number in range(first, len(stages)):
        stage = stages[number]
        if progress:
            say(f"stage {number + 1} of {len(stages)}: {stage.name}")
        for module in (stage.model, stage.guide):
            module.to(usable_device(device))
        chosen: dict[str, Any] = {**stage.settings, **settings}
        chosen["batch_size"] = stage.batches * batch_size
        prepared: Dataset | Split = data
        if stage.prepare is None:
            chosen["transform"] = transform
        else:
            prepared = stage.prepare(_transformed(data, transform, batch_size, seed), seed)
        left = budget.after(sum(r.steps for r in runs), sum(r.seconds for r in runs))
        chosen |= left.shared(stage.share / sum(later.share for later in stages[number:]))
        if stage.most is not None:
            chosen["steps"] = min(chosen.get("steps", stage.most), stage.most)
        run = fit(
            stage.model,
            stage.guide,
            prepared,
            seed=seed,
            checkpoint=_place(checkpoint, number, runs),
            resume=resume if number == first else None,
            device=device,
            progress=progress,
            **chosen,
        )
        runs.append(run)
        if run.stopped == "interrupted":
            return _joined(runs)
    return replace(_joined(runs), stopped=budget.reason())


def _transformed(
    data: Dataset, transform: Callable[..., Tensor] | None, batch_size: int, seed: int
) -> Dataset:
    """Return the data with every training image transformed once."""
    if transform is None:
        return data
    batches = Batches(data.train, batch_size, seed, transform)
    images, numbers = zip(*batches.epoch(0), strict=True)
    labels = None if numbers[0] is None else torch.cat(numbers)
    return replace(data, train=replace(data.train, images=torch.cat(images), labels=labels))


def _place(
    checkpoint: CheckpointPlace | None, number: int, before: Sequence[Run]
) -> CheckpointPlace | None:
    """Return a function that adds the stage, and the steps before it, to every checkpoint."""
    if checkpoint is None:
        return None
    earlier = _joined(before) if before else None
    history = torch.tensor(
        [] if earlier is None else earlier.history.to_numpy(), dtype=torch.float64
    ).reshape(-1, len(COLUMNS))

    def place(tree: dict) -> None:
        whole = {**tree, "stage": number, "earlier": history}
        if callable(checkpoint):
            checkpoint(whole)
        else:
            save_checkpoint(checkpoint, whole)

    return place


def _resumed(
    stages: Sequence[Stage], resume: str | os.PathLike | None, device: str | torch.device
) -> tuple[int, Run | None]:
    """Return the stage to continue with and the steps before it, and restore the parameters."""
    if resume is None:
        return 0, None
    tree = load_checkpoint(resume)
    number = tree.get("stage")
    if not isinstance(number, int) or number >= len(stages):
        raise CheckpointError(
            f"{resume} is not a checkpoint of a run with these {len(stages)} stages; resume it "
            "with the call that began it"
        )
    for role in ("model", "guide"):
        module = getattr(stages[number], role)
        check_same_module(role, module, tree["classes"][role], tree[role])
        module.load_state_dict(tree[role])
    rows = pd.DataFrame(tree["earlier"].numpy(), columns=list(COLUMNS))
    rows = rows.astype({"step": int, "epoch": int})
    if rows.empty:
        return number, None
    last = rows.iloc[-1]
    done = Run(rows, float("nan"), int(last.step), int(last.step), float(last.seconds), "")
    return number, done


def _joined(runs: Sequence[Run]) -> Run:
    """Return the record of runs that followed each other."""
    parts, steps, seconds = [], 0, 0.0
    for run in runs:
        own = run.history.copy()
        own["step"] += steps
        own["seconds"] += seconds
        parts.append(own)
        before, steps, seconds = steps, steps + run.steps, seconds + run.seconds
    last = runs[-1]
    history = pd.concat(parts, ignore_index=True)
    return Run(history, last.best_loss, before + last.best_step, steps, seconds, last.stopped)
