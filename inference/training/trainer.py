"""The state of a training run and its training step, driven by `fit`."""

from __future__ import annotations

import itertools
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyro
import torch
from pyro.infer import ELBO
from torch import Tensor, nn
from tqdm.auto import tqdm

from capsule_zoo.data import Split
from capsule_zoo.data.batches import BatchSource
from capsule_zoo.inference.check import refuse_misfit
from capsule_zoo.inference.objectives.base import default_objective, loss_per_image
from capsule_zoo.inference.training.callbacks import Callback, Check, call_back
from capsule_zoo.inference.training.checkpoint import (
    CheckpointError,
    check_same_module,
    load_checkpoint,
    random_state,
    save_checkpoint,
    set_random_state,
    to_cpu,
)
from capsule_zoo.inference.training.non_finite import NonFiniteLoss, first_bad_site
from capsule_zoo.inference.training.optimizers import OptimizerFactory, make_optimizer
from capsule_zoo.inference.training.progress import Progress
from capsule_zoo.inference.training.schedule import SCHEDULES, Budget
from capsule_zoo.inference.training.workers import Workers
from capsule_zoo.models.modes import in_eval_mode, seeded

CheckpointPlace = str | os.PathLike | Callable[[dict], None]


class Trainer:
    """The state of one run and its training step."""

    def __init__(
        self,
        model: nn.Module,
        guide: nn.Module,
        objective: ELBO | None,
        batches: BatchSource,
        validation: Split | None,
        workers: Workers,
        labels: bool,
    ) -> None:
        self.pair = model.to(workers.device), guide.to(workers.device)
        self.modules = dict(zip(("model", "guide"), self.pair, strict=True))
        self.batches, self.validation = batches, validation
        self.workers, self.labels = workers, labels
        self.dtype = next((p.dtype for module in self.pair for p in module.parameters()), None)
        example = self._ready(*batches.example())
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
        self.saved: str | os.PathLike | None = None  # the last checkpoint of this run

    def set_optimizer(
        self,
        factory: OptimizerFactory,
        lr: float | dict,
        schedule: str,
        warmup: int,
        clip: float | None,
    ) -> None:
        groups: list[dict[str, Any]] = []
        seen: set[nn.Parameter] = set()
        for role, module in self.modules.items():
            parameters = [p for p in module.parameters() if p.requires_grad and p not in seen]
            seen.update(parameters)
            if parameters:
                rate = lr[role] if isinstance(lr, dict) else lr
                groups.append({"params": parameters, "lr": rate})
        if not groups:
            raise ValueError("there is no parameter to train; freeze less")
        self.optimizer = make_optimizer(factory, groups)
        for group in self.optimizer.param_groups:
            group["initial_lr"] = group["lr"]
        self.parameters = [p for group in groups for p in group["params"]]
        self.schedule, self.warmup, self.clip = SCHEDULES[schedule], max(warmup, 1), clip

    def set_checks(
        self,
        validate_every: int,
        patience: int | None,
        checkpoint: CheckpointPlace | None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.validate_every, self.patience, self.checkpoint = validate_every, patience, checkpoint
        self.callbacks = callbacks

    def start(self, resume: str | os.PathLike | None, seed: int) -> None:
        """Seed the run, or restore the state in the checkpoint `resume`."""
        pyro.set_rng_seed(seed + self.workers.rank)
        self.random = random_state(self.workers.device)
        if resume is not None:
            self._load(load_checkpoint(resume))
            self.saved = resume

    def run(self, budget: Budget, bar: tqdm) -> str:
        """Take steps until something ends the run, and return the reason."""
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
        share = self.schedule(fraction) * min((self.progress.step + 1) / self.warmup, 1)
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * share
        self.optimizer.step()
        self.random = random_state(self.workers.device)
        rate = self.optimizer.param_groups[0]["lr"]
        self.progress.record(loss.item(), norm.item(), rate)

    def _loss(self, images: Tensor, labels: Tensor | None, before: dict) -> Tensor:
        try:
            return loss_per_image(self.objective, *self.pair, images, labels)
        except ValueError:  # Pyro refuses NaN parameters before there is a loss
            self._explain(images, labels, before, certain=False)
            raise

    def _explain(
        self, images: Tensor, labels: Tensor | None, before: dict, certain: bool = True
    ) -> None:
        """Raise NonFiniteLoss with the first bad site, found by repeating the step's draws."""
        set_random_state(before, self.workers.device)
        site = first_bad_site(*self.pair, images, labels)
        if site or certain:
            raise NonFiniteLoss(self.progress.step + 1, site, self.saved)

    def _check(self) -> str | None:
        """Update held-out value, best state and checkpoint; return a reason to stop, or None."""
        improved = self.progress.check(self._held_out())
        if improved and self.patience is not None:
            self.best = {role: to_cpu(m.state_dict()) for role, m in self.modules.items()}
        self._save()
        stopping = self._call_back()
        if self.patience is None or self.progress.checks_since_best < self.patience:
            return stopping
        return (
            f"no lower value in {self.patience} checks since step {self.progress.best_step} "
            f"({self.progress.best_loss:.4f} nats per image), which is restored"
        )

    def _call_back(self) -> str | None:
        """Call the callbacks on the first process, and return a reason to stop or None."""
        if not self.callbacks:
            return None
        name = None
        if self.workers.is_first:
            with in_eval_mode(*self.pair):
                name = call_back(self.callbacks, Check(*self.pair, **self.progress.latest))
            set_random_state(self.random, self.workers.device)  # undo the callbacks' draws
        wanted = self.workers.agree(float(name is not None))
        return f"stopped by the callback {name or 'of the first process'}" if wanted else None

    def _held_out(self) -> float:
        """Return the loss on the validation split, in nats per image; NaN without a split."""
        if self.validation is None:
            return math.nan
        total = 0.0
        with _evaluating(self.objective, *self.pair), seeded(self.seed):
            size = self.batches.batch_size
            for begin in range(0, len(self.validation), size):
                part = self.validation[begin : begin + size]
                images, labels = self._ready(part.images, part.labels)
                loss = loss_per_image(self.objective, *self.pair, images, labels)
                total += loss.item() * len(images)
        return self.workers.agree(total / len(self.validation))

    def _finish(self, stopped: str) -> None:
        if stopped != "interrupted" and self.progress.unchecked:
            self._check()
        elif stopped == "interrupted":
            self._save()
            self._call_back()
        if self.best and stopped != "interrupted":
            for role, module in self.modules.items():
                module.load_state_dict(self.best[role])

    def _stream(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches from the present step on."""
        epoch, start = divmod(self.progress.step, len(self.batches))
        yield from self.batches.epoch(epoch, start)
        for later in itertools.count(epoch + 1):
            yield from self.batches.epoch(later)

    def _ready(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return a batch on the device and in the precision of the modules."""
        device = self.workers.device
        images = images.to(device, self.dtype or images.dtype)
        return images, labels.to(device) if self.labels else None

    def _save(self) -> None:
        generators = {k: self.workers.gather(v) for k, v in self.random.items()}
        if self.checkpoint is None or not self.workers.is_first:
            return
        tree = {
            "classes": {role: type(m).__name__ for role, m in self.modules.items()},
            **{role: module.state_dict() for role, module in self.modules.items()},
            "optimizer": self.optimizer.state_dict(),
            "objective": getattr(self.objective, "state_dict", dict)(),
            "best": self.best,
            "random": generators,
            "progress": self.progress.state_dict(),
            "config": self._config(),
        }
        if callable(self.checkpoint):
            self.checkpoint(tree)
        else:
            save_checkpoint(self.checkpoint, tree)
            self.saved = self.checkpoint

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
        rates = [group["initial_lr"] for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(tree["optimizer"])
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["initial_lr"] = rate  # of this call, which may differ from the previous one
        if hasattr(self.objective, "load_state_dict"):
            self.objective.load_state_dict(tree["objective"])
        self.best = tree["best"]
        self.progress.load_state_dict(tree["progress"])
        self.random = {k: states[self.workers.rank] for k, states in tree["random"].items()}
        set_random_state(self.random, self.workers.device)

    def _config(self) -> dict[str, str | int]:
        """Return the settings that must match between a checkpoint and the run that resumes it."""
        return {
            "objective": type(self.objective).__name__,
            "optimizer": type(self.optimizer).__name__,
            "trained_parameters": len(self.parameters),
            "images": self.batches.num_images,
            "batch_size": self.batches.batch_size,
            "seed": self.seed,
            "processes": self.workers.size,
        }


@contextmanager
def _evaluating(objective: ELBO, *modules: nn.Module) -> Iterator[None]:
    """Disable gradients, set modules to eval mode, and restore the objective's state afterwards."""
    state = to_cpu(objective.state_dict()) if hasattr(objective, "state_dict") else None
    try:
        with in_eval_mode(*modules), torch.no_grad():
            yield
    finally:
        if state is not None:
            objective.load_state_dict(state)


@contextmanager
def _interrupts_deferred() -> Iterator[threading.Event]:
    """Yield an event that Ctrl-C sets; only a second Ctrl-C interrupts a step."""
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
