"""Training in stages: one level after the other, then all levels together.

>>> stages = [Stage("parts", 2000, part_model, part_guide), Stage("all", 1000, model, guide)]
>>> run = fit_stages(stages, load_dataset("mnist"), minutes=60, checks=Checks(progress=False))

Every stage is a call of `fit` with a fraction of the whole length, in proportion to the steps that
it needs. Its model and guide hold the parameters of the whole pair, of which a stage may train a
part, so that each checkpoint holds everything. A resumed run continues in the stage in which it was
stopped.
"""

import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from capsule_zoo.data import Batches, Dataset, Split
from capsule_zoo.inference.training.checkpoint import (
    CheckpointError,
    check_same_modules,
    load_checkpoint,
)
from capsule_zoo.inference.training.fit import fit
from capsule_zoo.inference.training.progress import Before, Run
from capsule_zoo.inference.training.schedule import Budget
from capsule_zoo.inference.training.settings import Checks, Inputs, combine_settings, with_groups
from capsule_zoo.inference.training.workers import is_first_process, usable_device
from capsule_zoo.models.base import Model
from capsule_zoo.models.checks import check_at_least, check_whole

_BATCH_SIZE = 128


@dataclass(frozen=True)
class Stage:
    """One stage of a training run.

    Attributes:
        name: name of the stage, for progress messages.
        steps: steps that the stage needs. The length of a run is divided among its stages in
            proportion to these; a warning names stages that took fewer.
        model, guide: the trained pair, which shares all parameters with the pairs of other stages.
        prepare: a function of the data and the seed that returns what the stage is trained on, and
            may initialize parameters. None for a stage on the images themselves. It is called
            when the stage begins, and again when a run is resumed in this stage, with parameters
            that may be further; what it sets is then replaced by the checkpoint.
        settings: arguments of `fit` for this stage.
        batches: multiple of the run's batch size in each step.
        most: steps at most; later stages get what it leaves. None for no limit.
        check: a function of the data that raises ValueError where the stage cannot be trained on
            them. It is called before the first stage.
    """

    name: str
    steps: int
    model: Model
    guide: Any
    prepare: Callable[[Dataset, int], Dataset | Split] | None = None
    settings: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    batches: int = 1
    most: int | None = None
    check: Callable[[Dataset], None] | None = None

    def __post_init__(self) -> None:
        check_whole(1, steps=self.steps)
        check_at_least(1, batches=self.batches)
        if self.most is not None:
            check_at_least(1, most=self.most)


@with_groups
def fit_stages(
    stages: Sequence[Stage],
    data: Dataset,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    minutes: float | None = None,
    batch_size: int = _BATCH_SIZE,
    seed: int = 0,
    inputs: Inputs = Inputs(),
    checks: Checks = Checks(),
    say: Callable[[str], None] = print,
    **settings: Any,
) -> Run:
    """Run several stages as one training run.

    Args:
        stages: at least one.
        data: the data set, which every stage prepares for itself.
        epochs, steps, minutes: length of the whole run, which is divided among the stages.
        batch_size, seed: see `fit`.
        inputs: see `fit`. A stage that prepares its data gets all images transformed once.
        checks: see `fit`; a checkpoint is resumed in the stage in which it was written.
        say: a function that is called with a line when a stage begins, if progress is shown.
        settings: further arguments of `fit` for all stages, which replace a stage's.

    Warns:
        UserWarning: once, at the end, where stages had fewer steps than they need.

    Returns:
        The record of the whole run, whose history has the steps of all stages. `best_loss` and
        `best_step` are from the last stage, because the losses of stages differ.

    Raises:
        ValueError: no stage, no length, or an argument that `fit` refuses.
        CheckpointError: the checkpoint is not of a run with these stages.
    """
    if not stages:
        raise ValueError("stages is empty; give at least one Stage")
    budget = Budget.of(epochs, steps, minutes, per_epoch=-(-len(data.train) // batch_size))
    before = _restore_stages(stages, checks.resume)._replace(whole=budget)
    checks = replace(checks, before=before)
    for stage in stages:
        if stage.check is not None:
            stage.check(data)
    for number in range(before.stage, len(stages)):
        stage, before = stages[number], checks.before
        if checks.progress:
            say(f"stage {number + 1} of {len(stages)}: {stage.name}")
        for module in (stage.model, stage.guide):
            module.to(usable_device(inputs.device))
        stage_inputs: Inputs = inputs
        prepared: Dataset | Split = data
        if stage.prepare is not None:
            stage_inputs = replace(inputs, transform=None)
            prepared = stage.prepare(
                _transform_data(data, inputs.transform, batch_size, seed), seed
            )
        left = budget.after(len(before.rows), before.seconds)
        limits = left.limits_of_fraction(stage.steps / needed_steps(stages[number:]))
        if stage.most is not None:
            limits["steps"] = min(limits.get("steps", stage.most), stage.most)
        run = fit(
            stage.model,
            stage.guide,
            prepared,
            batch_size=stage.batches * batch_size,
            seed=seed,
            **combine_settings(
                stage.settings, settings, {"inputs": stage_inputs, "checks": checks}, limits
            ),
        )
        if run.stopped == "interrupted":
            return run
        rows = torch.from_numpy(run.history.to_numpy(dtype=float))
        taken, spent = len(rows) - len(before.rows), run.stopped.startswith("reached")
        short = ((number, taken),) if spent and taken < stage.steps else ()
        before = Before(number + 1, rows, run.seconds, (*before.short, *short), budget)
        checks = replace(checks, resume=None, before=before)
    _warn_of_short_stages(stages, checks.before, budget)
    return replace(run, stopped=budget.reason())


def needed_steps(stages: Sequence[Stage]) -> int:
    """Return the number of steps of a run that gives every stage the steps that it needs."""
    return sum(stage.steps for stage in stages)


def _warn_of_short_stages(stages: Sequence[Stage], before: Before, budget: Budget) -> None:
    """Warn of stages that had fewer steps than they need, with the needed number."""
    if not before.short or not is_first_process():
        return
    numbers = ", ".join(str(number + 1) for number, _ in before.short)
    counts = "; ".join(f"{taken:,} of {stages[number].steps:,}" for number, taken in before.short)
    more: dict[str, int] = {}
    if math.isfinite(budget.seconds):
        factor = max(stages[number].steps / max(1, taken) for number, taken in before.short)
        more["minutes"] = math.ceil(factor * budget.seconds / 60)
    if math.isfinite(budget.steps):
        more["steps"] = needed_steps(stages)
    options = " ".join(f"--{name} {limit}" for name, limit in more.items())
    arguments = ", ".join(f"{name}={limit}" for name, limit in more.items())
    subject = f"stages {numbers} of {len(stages)} were"
    if len(before.short) == 1:
        subject = f"stage {numbers} of {len(stages)} was" if len(stages) > 1 else "training was"
    warnings.warn(
        f"{subject} cut short ({counts} steps), so that results may be poor, such as blurred "
        f"draws; train again with {options} (in Python {arguments})",
        stacklevel=4,
    )


def _transform_data(
    data: Dataset, transform: Callable[..., Tensor] | None, batch_size: int, seed: int
) -> Dataset:
    """Return the data with every training image transformed once."""
    if transform is None:
        return data
    batches = Batches(data.train, batch_size, seed, transform)
    images, numbers = zip(*batches.epoch(0), strict=True)
    labels = None if numbers[0] is None else torch.cat(numbers)
    return replace(data, train=replace(data.train, images=torch.cat(images), labels=labels))


def check_enough(data: Dataset, size: str, number: int) -> None:
    """Raise ValueError if there are fewer training images than kinds (or objects) to initialize."""
    if len(data.train) < number:
        raise ValueError(
            f"{data.name} has {len(data.train)} training pictures, but the model has {number} "
            f"{size}; make fewer by --set {size}=N, or add pictures"
        )


def _restore_stages(stages: Sequence[Stage], resume: str | os.PathLike | None) -> Before:
    """Restore the parameters of the stage to continue with, and return the earlier stages.

    They are needed before the run goes on: a stage may encode its data by trained parameters.
    """
    if resume is None:
        return Before()
    tree = load_checkpoint(resume)
    before = Before(*tree["progress"]["before"]) if tree["config"]["stage"] else Before()
    if before.stage >= len(stages):
        raise CheckpointError(
            f"{resume} is not a checkpoint of a run with these {len(stages)} stages; resume it "
            "with the call that began it"
        )
    stage = stages[before.stage]
    modules = {"model": stage.model, "guide": stage.guide}
    check_same_modules(modules, tree)
    for role, module in modules.items():
        module.load_state_dict(tree[role])
    return before
