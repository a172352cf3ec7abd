"""Training: one loop for every model, guide and objective.

>>> run = fit(model, guide, load_dataset("digits"), epochs=20, seed=0, checkpoint="run.safetensors")
>>> run.stopped, run.best_loss
"""

from __future__ import annotations

import itertools
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pyro
import torch
from pyro.infer import ELBO
from torch import Tensor, nn
from tqdm.auto import tqdm

from capsule_zoo.data import Batches, Dataset, Split
from capsule_zoo.inference.check import isolated_parameters, refuse_misfit
from capsule_zoo.inference.checkpoint import (
    CheckpointError,
    check_same_module,
    load_checkpoint,
    random_state,
    save_checkpoint,
    set_random_state,
    to_cpu,
)
from capsule_zoo.inference.history import Run
from capsule_zoo.inference.objective import default_objective, loss_per_image
from capsule_zoo.inference.progress import Progress
from capsule_zoo.inference.schedule import SCHEDULES, Budget
from capsule_zoo.inference.trouble import NonFiniteLoss, first_bad_site
from capsule_zoo.inference.workers import Workers, join_workers
from capsule_zoo.models.base import check_images

HELD_OUT_IMAGES = 1000
OptimizerFactory = Callable[[list], torch.optim.Optimizer]


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
    checkpoint: str | os.PathLike | None = None,
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
        optimizer: makes a torch optimizer from parameter groups; default `torch.optim.Adam`.
        lr: one learning rate, or `{"model": ..., "guide": ...}`; read by the default optimizer
            and set on the groups of any other.
        schedule: "constant", "cosine" or "linear"; the latter two end at zero.
        epochs, steps, minutes: at least one; the first limit that is reached ends the run.
        seed: governs the order of the data and every draw of the run.
        transform: applied to each batch, see `capsule_zoo.data.Batches`.
        freeze: "model" or "guide" keeps its parameters as they are.
        validate_every: steps between two checks (held-out value, checkpoint); default an epoch,
            but at least 100 steps.
        patience: stop after so many checks without a lower value, and restore the best state.
        clip: largest norm of the gradient.
        checkpoint: safetensors file, replaced whole at every check and at the end.
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
    kind = _InOrder if batch_size >= len(train) else Batches
    batches = kind(train, batch_size, seed, transform)
    budget = Budget.of(epochs, steps, minutes, len(batches))
    with (
        _frozen(model, guide, freeze),
        isolated_parameters(model, guide) as refreeze,
        join_workers(device) as workers,
    ):
        trainer = _Trainer(model, guide, objective, batches, validation, workers, labels)
        refreeze()
        trainer.set_optimizer(optimizer or torch.optim.Adam, lr, schedule, clip)
        trainer.validate_every = validate_every or max(len(batches), 100)
        trainer.patience, trainer.checkpoint = patience, checkpoint
        trainer.start(resume, seed)
        with budget.bar(shown=progress and workers.is_first) as bar:
            stopped = trainer.run(budget, bar)
        return trainer.progress.run(stopped)


class _Trainer:
    """The state of one run, and the step that moves it on."""

    def __init__(
        self,
        model: nn.Module,
        guide: nn.Module,
        objective: ELBO | None,
        batches: Batches,
        validation: Split | None,
        workers: Workers,
        labels: bool,
    ) -> None:
        self.modules = {"model": model.to(workers.device), "guide": guide.to(workers.device)}
        self.batches, self.validation = batches, validation
        self.workers, self.labels = workers, labels
        self.dtype = next((p.dtype for p in self._all_parameters()), None)
        example = self._ready(batches.split.images[:2], batches.split.labels[:2])
        if batches.batch_size >= len(batches.split):
            example = self._ready(batches.split.images, batches.split.labels)
        check_images(example[0])
        refuse_misfit(model, guide, *example)
        self.objective = objective or default_objective(model, *example)
        with torch.random.fork_rng(), torch.no_grad():  # Pyro's ELBOs guess the plates on first use
            if not hasattr(self.objective, "state_dict"):
                loss_per_image(self.objective, model, guide, *example)
        for module in self.modules.values():
            workers.broadcast(module)
        self.progress = Progress(len(batches))
        self.best: dict[str, dict[str, Tensor]] = {}
        self.seed = batches.seed

    def set_optimizer(
        self, factory: OptimizerFactory, lr: float | dict, schedule: str, clip: float | None
    ) -> None:
        groups, seen = [], set()
        for role, module in self.modules.items():
            parameters = [p for p in module.parameters() if p.requires_grad and p not in seen]
            seen.update(parameters)
            if parameters:
                rate = lr[role] if isinstance(lr, dict) else lr
                groups.append({"params": parameters, "lr": rate})
        if not groups:
            raise ValueError("there is no parameter to train; freeze less")
        self.optimizer = factory(groups)
        for group in self.optimizer.param_groups:
            group["initial_lr"] = group["lr"]
        self.parameters = [p for group in groups for p in group["params"]]
        self.schedule, self.clip = SCHEDULES[schedule], clip

    def start(self, resume: str | os.PathLike | None, seed: int) -> None:
        """Seed the run, or take up the state of the one that `resume` holds."""
        pyro.set_rng_seed(seed + self.workers.rank)
        self.random = random_state(self.workers.device)
        if resume is not None:
            self._load(load_checkpoint(resume))

    def run(self, budget: Budget, bar: tqdm) -> str:
        """Step until something ends the run; returns what it was."""
        stream = self._stream()
        stopped = None
        with _interrupts_deferred() as interrupted:
            try:
                while stopped is None:
                    fraction = self.workers.agree(budget.fraction(self.progress))
                    if fraction >= 1:
                        stopped = budget.reason()
                    elif self.workers.agree(float(interrupted.is_set())):
                        stopped = "interrupted"
                    else:
                        self._step(next(stream), fraction)
                        budget.advance(bar, self.progress)
                        if self.progress.step % self.validate_every == 0:
                            stopped = self._check()
            except KeyboardInterrupt:  # in the middle of a step that was not taken
                set_random_state(self.random, self.workers.device)
                stopped = "interrupted"
        self._finish(stopped)
        return stopped

    def _step(self, batch: tuple[Tensor, Tensor], fraction: float) -> None:
        whole = len(batch[0])
        images, labels = self._ready(*map(self.workers.share, batch))
        self.optimizer.zero_grad(set_to_none=True)
        loss = torch.zeros((), device=self.workers.device)
        before = random_state(self.workers.device)
        if len(images):
            loss = self._loss(images, labels, before) * (len(images) / whole)
            loss.backward()
        self.workers.reduce_gradients(self.parameters)
        loss = self.workers.total(loss)
        norm = nn.utils.clip_grad_norm_(self.parameters, self.clip or math.inf)
        if not torch.isfinite(loss + norm):
            self._explain(images, labels, before)
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * self.schedule(fraction)
        self.optimizer.step()
        self.random = random_state(self.workers.device)
        rate = self.optimizer.param_groups[0]["lr"]
        self.progress.record(loss.item(), norm.item(), rate)

    def _loss(self, images: Tensor, labels: Tensor | None, before: dict) -> Tensor:
        try:
            return loss_per_image(self.objective, *self.modules.values(), images, labels)
        except ValueError:  # Pyro refuses NaN parameters before there is a loss
            self._explain(images, labels, before, certain=False)
            raise

    def _explain(
        self, images: Tensor, labels: Tensor | None, before: dict, certain: bool = True
    ) -> None:
        """Raise NonFiniteLoss with the first bad site, found by repeating the step's draws."""
        set_random_state(before, self.workers.device)
        site = first_bad_site(*self.modules.values(), images, labels)
        if site or certain:
            raise NonFiniteLoss(self.progress.step + 1, site, self.checkpoint)

    def _check(self) -> str | None:
        """Held-out value, best state, checkpoint; the reason to stop early, if there is one."""
        improved = self.progress.check(self._held_out())
        if improved and self.patience is not None:
            self.best = {role: to_cpu(m.state_dict()) for role, m in self.modules.items()}
        self._save()
        if self.patience is None or self.progress.checks_since_best < self.patience:
            return None
        return (
            f"no lower value in {self.patience} checks since step {self.progress.best_step} "
            f"({self.progress.best_loss:.4f} nats per image), which is restored"
        )

    def _held_out(self) -> float:
        """Loss on the validation split, nats per image; NaN where there is none."""
        if self.validation is None:
            return math.nan
        model, guide = self.modules.values()
        total = 0.0
        with _evaluating(self.objective, model, guide), torch.random.fork_rng():
            torch.manual_seed(self.seed)
            size = self.batches.batch_size
            for begin in range(0, len(self.validation), size):
                part = self.validation[begin : begin + size]
                images, labels = self._ready(part.images, part.labels)
                loss = loss_per_image(self.objective, model, guide, images, labels)
                total += loss.item() * len(images)
        return self.workers.agree(total / len(self.validation))

    def _finish(self, stopped: str) -> None:
        if stopped != "interrupted" and self.progress.unchecked:
            self._check()
        elif stopped == "interrupted":
            self._save()
        if self.best and stopped != "interrupted":
            for role, module in self.modules.items():
                module.load_state_dict(self.best[role])

    def _stream(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches from the present step on."""
        epoch, start = divmod(self.progress.step, len(self.batches))
        yield from self.batches.epoch(epoch, start)
        for later in itertools.count(epoch + 1):
            yield from self.batches.epoch(later)

    def _ready(self, images: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """A batch where and as the modules want it."""
        device = self.workers.device
        images = images.to(device, self.dtype or images.dtype)
        return images, labels.to(device) if self.labels else None

    def _all_parameters(self) -> Iterator[nn.Parameter]:
        return itertools.chain(*(m.parameters() for m in self.modules.values()))

    def _save(self) -> None:
        generators = {k: self.workers.gather(v) for k, v in self.random.items()}
        if self.checkpoint is None or not self.workers.is_first:
            return
        objective = getattr(self.objective, "state_dict", dict)()
        tree = {
            "classes": {role: type(m).__name__ for role, m in self.modules.items()},
            **{role: module.state_dict() for role, module in self.modules.items()},
            "optimizer": self.optimizer.state_dict(),
            "objective": objective,
            "best": self.best,
            "random": generators,
            "progress": self.progress.state_dict(),
            "config": self._config(),
        }
        save_checkpoint(self.checkpoint, tree)

    def _load(self, tree: dict) -> None:
        for role, module in self.modules.items():
            check_same_module(role, module, tree["classes"][role], tree[role])
        saved, own = tree["config"], self._config()
        if differ := [
            f"{k}={saved.get(k)!r}, not {own[k]!r}" for k in own if saved.get(k) != own[k]
        ]:
            raise CheckpointError(
                "the checkpoint is of a run with other settings; resume with the same ones: it has "
                + "; ".join(differ)
            )
        for role, module in self.modules.items():
            module.load_state_dict(tree[role])
        self.optimizer.load_state_dict(tree["optimizer"])
        if hasattr(self.objective, "load_state_dict"):
            self.objective.load_state_dict(tree["objective"])
        self.best = tree["best"]
        self.progress.load_state_dict(tree["progress"])
        self.random = {k: states[self.workers.rank] for k, states in tree["random"].items()}
        set_random_state(self.random, self.workers.device)

    def _config(self) -> dict[str, str | int]:
        """What must be the same for a resumed run to be the uninterrupted one."""
        return {
            "objective": type(self.objective).__name__,
            "optimizer": type(self.optimizer).__name__,
            "trained_parameters": len(self.parameters),
            "images": len(self.batches.split),
            "batch_size": self.batches.batch_size,
            "seed": self.seed,
            "processes": self.workers.size,
        }


class _InOrder(Batches):
    """The whole split as one batch, in its own order."""

    def order(self, epoch: int) -> Tensor:
        return torch.arange(len(self.split))


def _splits(data: Dataset | Split | Tensor, labels: bool) -> tuple[Split, Split | None]:
    """Training split and at most `HELD_OUT_IMAGES` images of the validation split."""
    if isinstance(data, Tensor):
        if labels:
            raise ValueError("labels=True needs data with labels: give a Split or a Dataset")
        check_images(data)
        return Split(data, torch.zeros(len(data), dtype=torch.int64)), None
    if not hasattr(data, "train"):
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
    for name, rate in lr.items() if isinstance(lr, dict) else [("lr", lr)]:
        if not 0 < rate < math.inf:
            raise ValueError(f"lr must be positive and finite, not {rate!r} ({name})")
    if isinstance(lr, dict) and set(lr) != {"model", "guide"}:
        raise ValueError(f"lr as a dict needs the keys 'model' and 'guide', not {sorted(lr)}")
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, not {schedule!r}")
    if freeze not in (None, "model", "guide"):
        raise ValueError(f"freeze must be None, 'model' or 'guide', not {freeze!r}")
    for name, value in (("validate_every", validate_every), ("patience", patience)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1 or None, not {value!r}")
    if clip is not None and not clip > 0:
        raise ValueError(f"clip must be positive or None, not {clip!r}")


@contextmanager
def _frozen(model: nn.Module, guide: nn.Module, freeze: str | None) -> Iterator[None]:
    """Train mode for what is trained; no gradients for what is frozen, until the end."""
    chosen = {"model": model, "guide": guide}.get(freeze or "")
    for module in (model, guide):
        module.train(module is not chosen)
    held = [p for p in chosen.parameters() if p.requires_grad] if chosen is not None else []
    for parameter in held:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in held:
            parameter.requires_grad_(True)


@contextmanager
def _evaluating(objective: ELBO, *modules: nn.Module) -> Iterator[None]:
    """No gradients, modules in eval mode, and the objective's own state put back afterwards."""
    modes = [module.training for module in modules]
    state = to_cpu(objective.state_dict()) if hasattr(objective, "state_dict") else None
    for module in modules:
        module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.train(mode)
        if state is not None:
            objective.load_state_dict(state)


@contextmanager
def _interrupts_deferred() -> Iterator[threading.Event]:
    """Ctrl-C sets the event instead of breaking a step in two; a second one breaks it."""
    interrupted = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield interrupted
        return
    previous = signal.getsignal(signal.SIGINT)

    def handle(signum: int, frame: object) -> None:
        interrupted.set()
        signal.signal(signal.SIGINT, previous)

    signal.signal(signal.SIGINT, handle)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, previous)
