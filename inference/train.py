"""Training: one loop for every model, guide and objective.

>>> run = fit(model, guide, load_dataset("digits"), epochs=20, seed=0, checkpoint="run.safetensors")
>>> run.stopped, run.best_loss
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import torch
from pyro.infer import ELBO
from torch import Tensor, nn

from capsule_zoo.data import Batches, Dataset, Split
from capsule_zoo.inference.history import Run
from capsule_zoo.inference.isolation import frozen, isolated_parameters
from capsule_zoo.inference.memory import keep_memory
from capsule_zoo.inference.schedule import SCHEDULES, Budget
from capsule_zoo.inference.trainer import CheckpointPlace, OptimizerFactory, Trainer
from capsule_zoo.inference.workers import join_workers
from capsule_zoo.models.base import (
    check_at_least,
    check_images_of,
    check_one_of,
    check_positive,
)

HELD_OUT_IMAGES = 1000


def fit(
    model: nn.Module,
    guide: nn.Module,
    data: Dataset | Split | Tensor,
    *,
    objective: ELBO | None = None,
    optimizer: OptimizerFactory | None = None,
    lr: float | dict[str, float] = 1e-3,
    schedule: str = "constant",
    epochs: int | None = None,
    steps: int | None = None,
    minutes: float | None = None,
    batch_size: int = 128,
    seed: int = 0,
    transform: Callable[..., Tensor] | None = None,
    freeze: str | None = None,
    validate_every: int | None = None,
    patience: int | None = None,
    clip: float | None = None,
    checkpoint: CheckpointPlace | None = None,
    resume: str | os.PathLike | None = None,
    device: str | torch.device = "cpu",
    progress: bool = True,
    labels: bool = False,
) -> Run:
    """Train a model and a guide in place; they end on `device`.

    The same call under `torchrun` spreads every batch over its processes. Ctrl-C stops at the end
    of a step, writes the checkpoint and returns the run.

    Args:
        model, guide: torch modules called as `model(images)`; `check_pair` must find that they fit.
        data: a `Dataset` (trained on `.train`, held out `.validation`), a `Split`, or images
            (N, C, H, W). Batches are shuffled unless one batch holds all the images, which then
            keep their order, as guides with parameters per image need.
        objective: default `TraceEnum_ELBO` where the model enumerates a site, else `Trace_ELBO`.
        optimizer: makes a torch optimizer from parameter groups; default `torch.optim.Adam`, with
            all of a parameter's update in one kernel.
        lr: one learning rate, or `{"model": ..., "guide": ...}`; read by the default optimizer
            and set on the groups of any other.
        schedule: "constant", "cosine" or "linear"; the latter two end at zero.
        epochs, steps, minutes: at least one; the first limit that is reached ends the run.
        batch_size: images of a step, those of all processes together.
        seed: governs the order of the data and every draw of the run.
        transform: applied to each batch, see `capsule_zoo.data.Batches`.
        freeze: "model" or "guide" keeps its parameters as they are.
        validate_every: steps between two checks (held-out value, checkpoint); default an epoch,
            but at least 100 steps.
        patience: stop after so many checks without a lower value, and restore the best state.
        clip: largest norm of the gradient.
        checkpoint: safetensors file, replaced whole at every check and at the end; or a function
            that is called with the tree to save, in the first process only.
        resume: checkpoint to go on from, to the numbers of an uninterrupted run.
        labels: hand the labels to model and guide too.

    Raises:
        ValueError: an argument is not allowed.
        IncompatibleGuide: the guide does not fit the model.
        CheckpointError: a checkpoint cannot be read or written or is of another pair.
        NonFiniteLoss: the loss or its gradient is not finite; names the first bad site.
    """
    _check_arguments(model, guide, lr, schedule, freeze, validate_every, patience, clip)
    train, validation = _splits(data, labels)
    for split in (train, validation):
        if split is not None:
            check_images_of(model, split.images)
    kind = _InOrder if batch_size >= len(train) else Batches
    batches = kind(train, batch_size, seed, transform)
    budget = Budget.of(epochs, steps, minutes, len(batches))
    keep_memory()
    held = [module for role, module in (("model", model), ("guide", guide)) if role == freeze]
    for module in (model, guide):
        module.train(module not in held)
    with (
        frozen(*held),
        isolated_parameters(model, guide) as refreeze,
        join_workers(device) as workers,
    ):
        trainer = Trainer(model, guide, objective, batches, validation, workers, labels)
        refreeze()
        trainer.set_optimizer(optimizer or _adam, lr, schedule, clip)
        trainer.set_checks(validate_every or max(len(batches), 100), patience, checkpoint)
        trainer.start(resume, seed)
        with budget.bar(shown=progress and workers.is_first) as bar:
            stopped = trainer.run(budget, bar)
        return trainer.progress.run(stopped)


_adam = partial(torch.optim.Adam, fused=True)  # a tenth off the step of a large decoder


class _InOrder(Batches):
    """The whole split as one batch, in its own order."""

    def order(self, epoch: int) -> Tensor:
        return torch.arange(len(self.split))


def _splits(data: Dataset | Split | Tensor, labels: bool) -> tuple[Split, Split | None]:
    """Training split and at most `HELD_OUT_IMAGES` images of the validation split."""
    if isinstance(data, Tensor):
        if labels:
            raise ValueError("labels=True needs data with labels: give a Split or a Dataset")
        return Split(data, torch.zeros(len(data), dtype=torch.int64)), None
    if isinstance(data, Split):
        return data, None
    if data.validation is None or len(data.validation) == 0:
        return data.train, None
    shuffle = torch.randperm(len(data.validation), generator=torch.Generator().manual_seed(0))
    return data.train, data.validation[shuffle[:HELD_OUT_IMAGES]]


def _check_arguments(
    model: nn.Module,
    guide: nn.Module,
    lr: float | dict[str, float],
    schedule: str,
    freeze: str | None,
    validate_every: int | None,
    patience: int | None,
    clip: float | None,
) -> None:
    for role, module in (("model", model), ("guide", guide)):
        if not isinstance(module, nn.Module):
            raise ValueError(
                f"{role} must be a torch.nn.Module, not {type(module).__name__}; "
                "write functions with pyro.param as a PyroModule"
            )
    if isinstance(lr, dict) and set(lr) != {"model", "guide"}:
        raise ValueError(f"lr as a dict needs the keys 'model' and 'guide', not {sorted(lr)}")
    rates = {f"lr[{k!r}]": v for k, v in lr.items()} if isinstance(lr, dict) else {"lr": lr}
    check_positive(**rates)
    check_one_of("schedule", schedule, tuple(SCHEDULES))
    check_one_of("freeze", freeze, (None, "model", "guide"))
    counts = {"validate_every": validate_every, "patience": patience}
    check_at_least(1, **{name: value for name, value in counts.items() if value is not None})
    if clip is not None and not clip > 0:
        raise ValueError(f"clip must be positive or None, not {clip!r}")
