"""The training function `fit`, one loop for every model, guide and objective.

>>> run = fit(model, guide, load_dataset("digits"), epochs=20, seed=0, checks=Checks(patience=5))
>>> run.stopped, run.best_loss
"""

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from pyro import poutine
from pyro.infer import ELBO
from pyro.optim import PyroOptim
from torch import nn

from capsule_zoo.data import Batches, Split
from capsule_zoo.data.batches import BatchSource
from capsule_zoo.data.progress import show_progress
from capsule_zoo.data.readable import Data
from capsule_zoo.inference.evaluation.prepare import is_per_image
from capsule_zoo.inference.examination.pairs import refuse_training, replace_program
from capsule_zoo.inference.functions import as_module, check_program
from capsule_zoo.inference.isolation import isolated_parameters
from capsule_zoo.inference.objectives.base import Objective, check_objective
from capsule_zoo.inference.training.memory import keep_memory
from capsule_zoo.inference.training.optimizers import OptimizerFactory, Updates, optimizer_factory
from capsule_zoo.inference.training.progress import Run
from capsule_zoo.inference.training.schedule import SCHEDULES, Budget
from capsule_zoo.inference.training.settings import (
    Checks,
    Inputs,
    Pace,
    combine_settings,
    pace_arguments,
    with_groups,
)
from capsule_zoo.inference.training.trainer import Pair, Trainer
from capsule_zoo.inference.training.training_data import held_out, training_batches
from capsule_zoo.inference.training.workers import join_workers, usable_device
from capsule_zoo.models.checks import check_at_least, check_one_of, check_positive, whole
from capsule_zoo.models.common.modes import frozen
from capsule_zoo.models.common.trace_density import IMAGES_PLATE, latent_sites


@with_groups
@torch.inference_mode(False)
def fit(
    model: Callable,
    guide: Callable,
    data: Data,
    *,
    objective: ELBO | None = None,
    optimizer: OptimizerFactory | PyroOptim | None = None,
    lr: float | dict[str, float] | None = None,
    epochs: int | None = None,
    steps: int | None = None,
    minutes: float | None = None,
    batch_size: int | None = None,
    seed: int = 0,
    freeze: str | None = None,
    pace: Pace = Pace(),
    inputs: Inputs = Inputs(),
    checks: Checks = Checks(),
) -> Run:
    """Train a model and a guide in place, and move them to the device of the inputs.

    The same call under `torchrun` spreads every batch over its processes. Ctrl-C or SIGTERM stops
    at the end of a step, writes the checkpoint and returns the run. A callback logs, or ends the
    run::

        writer = torch.utils.tensorboard.SummaryWriter("runs/first")
        log = lambda check: writer.add_scalar("held out", check.held_out, check.step)
        fit(model, guide, data, epochs=20, checks=Checks(callbacks=[log]))

    Args:
        model, guide: torch modules called as `model(images)`, or functions with `pyro.param`, whose
            parameters stay in Pyro's store; `check_pair` must find that they fit. A guide of
            `auto_encoder` is trained next to its program, whose parameters stay as they are.
        data: a `Dataset` (trained on `.train`, held out `.validation`) or a `Split`; or images
            (N, C, H, W), a tensor or a numpy array, in the model's range of pixels, or a list of
            batches of them, with or without labels; or a map-style torch
            `Dataset` of images or of (image, label), such as torchvision's, whose images are
            loaded when they are needed (of a `TensorDataset`: at once); or a torch `DataLoader`,
            which decides on batches and their order, see `LoaderBatches`; a resumed run loads
            again, and skips, the batches of its epoch that it has seen. Batches are shuffled unless
            one batch holds all the images, which then keep their order, as guides with parameters
            per image need.
        objective: default `ContrastiveDivergence` for an RBM, `TraceEnum_ELBO` where the model
            enumerates a site, else `Trace_ELBO`. An energy model is not trained by a bound.
        optimizer: a class such as `torch.optim.SGD`, any function that makes a torch optimizer from
            parameter groups, or one of Pyro's such as `pyro.optim.Adam({"lr": 1e-3})`, whose own
            rate replaces `lr`; default fused `torch.optim.Adam`.
        lr: one learning rate, or `{"model": ..., "guide": ...}`; read by the default optimizer
            and set on the groups of any other. If it is None, it comes from the guide's
            `fit_settings`, else it is 1e-3.
        epochs, steps, minutes: at least one; the first limit that is reached ends the run.
        batch_size: images of a step, over all processes together; default 128. Not allowed with a
            `DataLoader`.
        seed: determines the order of the data and every draw of the run.
        freeze: "model" or "guide", whose parameters are then not trained.
        pace: the schedule of the learning rate, its warm-up, and clipping; see `Pace`.
        inputs: transform, labels, validation images and device; see `Inputs`.
        checks: when held-out images are looked at, callbacks, checkpoints, resuming, the progress
            bar; see `Checks`.

    Raises:
        ValueError: an argument is not allowed, or a guide with parameters per image (Pyro's
            AutoGuides, guides with `per_image = True`) would get minibatches or held-out images.
        IncompatibleGuide: the guide does not fit the model.
        CheckpointError: a checkpoint cannot be read or written or is of another pair.
        NonFiniteLoss: the loss or its gradient is not finite; names the first bad site.
    """
    if freeze != "model":
        refuse_training(model, guide)
    model, data = replace_program(model, guide, data)
    guide_settings = pace_arguments(getattr(guide, "fit_settings", {}))
    rate = {} if lr is None else {"lr": lr}
    arguments = combine_settings({"lr": 1e-3}, guide_settings, {"pace": pace, **rate})
    updates = Updates(optimizer_factory(optimizer), **arguments)
    _check_arguments(model, guide, freeze, updates)
    check_objective(objective)
    epochs, steps, batch_size, seed, every, patience = _whole_numbers(
        epochs=epochs,
        steps=steps,
        batch_size=batch_size,
        seed=seed,
        every=checks.every,
        patience=checks.patience,
    )
    device, labels = usable_device(inputs.device), inputs.labels
    batches = training_batches(data, model, batch_size, seed, inputs.transform, labels)
    held = held_out(data, inputs.validation, model, labels)
    _check_labels(model, labels, batches, held)
    budget = Budget.of(epochs, steps, minutes, len(batches))
    checks = replace(checks, every=every or max(len(batches), 100), patience=patience)
    keep_memory()
    with show_progress(False), join_workers(device) as workers:  # no bars within steps
        model, guide = _modules(model, guide, batches, workers.device, labels)
        fixed = [module for role, module in (("model", model), ("guide", guide)) if role == freeze]
        for module in (model, guide):
            module.train(module not in fixed)
        with frozen(*fixed), isolated_parameters(model, guide) as refreeze:
            pair = Pair(model, guide, workers.device, labels)
            _check_whole_batch(pair, batches, held)
            objective = pair.objective(objective, *batches.example())
            refreeze()
            trainer = Trainer(pair, objective, batches, held, workers, updates, checks)
            if checks.resume is not None:
                trainer.resume(checks.resume)
            with budget.bar(trainer.progress, checks.progress and workers.is_first) as bar:
                stopped = trainer.run(budget, bar)
            if workers.is_first and checks.before.whole is None:
                _warn_of_warmup(trainer, budget, stopped)
                if isinstance(objective, Objective) and (text := objective.remark_on_end()):
                    warnings.warn(text, stacklevel=4)
            return replace(trainer.progress.run(stopped), units=trainer.units)


def fit_to_end(*arguments: Any, **settings: Any) -> Run:
    """Return what `fit` returns, or raise KeyboardInterrupt where the user interrupted it.

    For fits that are a part of a longer call, which is not to go on with what is half trained.
    """
    run = fit(*arguments, **settings)
    if run.stopped == "interrupted":
        raise KeyboardInterrupt
    return run


def _warn_of_warmup(trainer: Trainer, budget: Budget, stopped: str) -> None:
    """Warn if a run's time ended while its learning rate still rose."""
    steps, warmup = trainer.progress.step, trainer.updates.pace.warmup or 0
    if stopped == budget.reason() and steps < min(warmup, budget.steps):
        warnings.warn(
            f"training was cut short ({steps} of the {warmup} steps in which its learning rate "
            "rises), so that results may be poor; give steps in place of minutes, or more minutes "
            "(--steps, --minutes)",
            stacklevel=5,
        )


def _modules(
    model: Callable, guide: Callable, batches: BatchSource, device: torch.device, labels: bool
) -> tuple[nn.Module, nn.Module]:
    """Convert model and guide to modules; functions are run once, the guide first."""
    images, numbers = batches.example()
    example = (images.to(device), numbers.to(device) if labels else None)
    guide = as_module(guide, *example)
    return as_module(model, *example), guide


def _check_labels(model: Callable, labels: bool, batches: BatchSource, held: Split | None) -> None:
    """Raise ValueError for labels that the model lacks, or that are not among its classes."""
    check = getattr(poutine.unwrap(model), "check_labels", None)
    if labels and check is not None:  # here, because Pyro adds its trace to errors of `forward`
        check(batches.split.labels if isinstance(batches, Batches) else batches.example()[1])
        check(None if held is None else held.labels)
    if getattr(model, "supervised", False) and not labels:
        raise ValueError(
            f"inputs=Inputs(labels=True) is needed: {type(model).__name__} explains the label of "
            "an image, and without labels there is nothing to train"
        )


def _check_whole_batch(pair: Pair, batches: BatchSource, held: Split | None) -> None:
    """Raise ValueError if a guide with per-image parameters would get other images."""
    if not is_per_image(pair.guide) or (len(batches) == 1 and held is None):
        return
    with poutine.block(), torch.random.fork_rng(), torch.no_grad():
        trace = poutine.trace(pair.model).get_trace(*pair.takes(*batches.example()))
    if any(
        IMAGES_PLATE in [frame.name for frame in site["cond_indep_stack"]]
        for site in latent_sites(trace).values()
    ):
        raise ValueError(
            f"{type(pair.guide).__name__} has parameters for each image, so a batch must hold all "
            f"images and none may be held out: pass batch_size={batches.num_images}, and of a data "
            "set the images to fit alone, such as data.train"
        )


def _check_arguments(
    model: Callable, guide: Callable, freeze: str | None, updates: Updates
) -> None:
    lr, pace = updates.lr, updates.pace
    check_program("model", model)
    check_program("guide", guide)
    if isinstance(lr, dict) and set(lr) != {"model", "guide"}:
        raise ValueError(f"lr as a dict needs the keys 'model' and 'guide', not {sorted(lr)}")
    rates = {f"lr[{k!r}]": v for k, v in lr.items()} if isinstance(lr, dict) else {"lr": lr}
    check_positive(**rates)
    check_one_of("schedule", pace.schedule or "constant", tuple(SCHEDULES))
    check_one_of("freeze", freeze, (None, "model", "guide"))
    check_at_least(0, warmup=pace.warmup or 0)
    if pace.clip is not None and not pace.clip > 0:
        raise ValueError(f"clip must be positive or None, not {pace.clip!r}")


def _whole_numbers(**counts: Any) -> tuple[Any, ...]:
    """Convert counts to ints (None stays); raise ValueError for one that is not whole."""
    result = []
    for name, value in counts.items():
        least = 1 if name in ("every", "patience") else None
        remedy = "; for part of an epoch give steps" if name == "epochs" else ""
        result.append(None if value is None else whole(name, value, least, remedy=remedy))
    return tuple(result)
