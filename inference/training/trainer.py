"""The trained pair, the state of a run, and its training step, used by `fit`."""

import copy
import itertools
import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pyro
import torch
from pyro.infer import ELBO
from torch import Tensor, nn

from capsule_zoo.data import Split
from capsule_zoo.data.batches import Batch, BatchSource
from capsule_zoo.data.progress import Bar, write_line
from capsule_zoo.inference.check import refuse_misfit
from capsule_zoo.inference.objectives.base import check_served, loss_per_image, units_of
from capsule_zoo.inference.training.checkpoint import (
    CheckpointError,
    check_same_modules,
    load_checkpoint,
    random_state,
    save_checkpoint,
    set_random_state,
)
from capsule_zoo.inference.training.default_objective import default_objective
from capsule_zoo.inference.training.non_finite import NonFiniteLoss, first_bad_site
from capsule_zoo.inference.training.optimizers import Updates
from capsule_zoo.inference.training.progress import Progress
from capsule_zoo.inference.training.schedule import Budget
from capsule_zoo.inference.training.settings import Check, Checks, call_back
from capsule_zoo.inference.training.workers import Workers
from capsule_zoo.models.common.modes import eval_mode, use_seed
from capsule_zoo.models.common.spaces import space_of

SECONDS_BETWEEN_SAVES = 300  # most seconds of work that a killed run loses


class Pair:
    """A model and a guide, with their device and dtype.

    Args:
        model, guide: the modules; they are moved to the device.
        device: the device of the run.
        labels: True if both are given the labels.
    """

    def __init__(
        self, model: nn.Module, guide: nn.Module, device: torch.device, labels: bool
    ) -> None:
        self.model = model.to(device)
        self.guide = guide.to(device)
        self.device = device
        self.labels = labels
        self.dtype = next((p.dtype for module in self.both for p in module.parameters()), None)

    @property
    def both(self) -> tuple[nn.Module, nn.Module]:
        return self.model, self.guide

    def takes(self, images: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Move a batch to the device and dtype of the modules."""
        images = images.to(self.device, self.dtype or images.dtype)
        return images, labels.to(self.device) if self.labels and labels is not None else None

    def objective(self, choice: ELBO | None, images: Tensor, labels: Tensor | None) -> ELBO:
        """Return the given objective, or the default one, after a check that the pair runs.

        Afterwards all parameters exist, and the objective knows the plates. The random state is
        left as it was.

        Raises:
            ValueError: the objective does not serve the pair.
            IncompatibleGuide: the guide does not fit the model.
        """
        example = self.takes(images, labels)
        if choice is not None:
            check_served(choice, *self.both)
        objective = choice or default_objective(self.model, *example)
        refuse_misfit(*self.both, *example)
        with torch.random.fork_rng(), torch.no_grad():  # Pyro's ELBOs guess the plates on first use
            if not hasattr(objective, "state_dict"):
                loss_per_image(objective, *self.both, *example)
        return objective


class Trainer:
    """The state of one run and its training step.

    Making a trainer seeds the global random state with the seed of the batches.

    Args:
        pair: model and guide, which have run once, so that all their parameters exist.
        objective: the loss.
        batches: the training data.
        validation: the held-out images, or None.
        workers: the processes of the run.
        updates: the optimizer and its rates.
        checks: callbacks and checks between the steps, with `every` set.

    Raises:
        ValueError: there is no parameter to train, or the optimizer is of the wrong kind.
    """

    def __init__(
        self,
        pair: Pair,
        objective: ELBO,
        batches: BatchSource,
        validation: Split | None,
        workers: Workers,
        updates: Updates,
        checks: Checks,
    ) -> None:
        self.pair = pair
        self.modules = {"model": pair.model, "guide": pair.guide}
        self.objective = objective
        self.units = units_of(objective, pair.model)
        self.batches = batches
        self.validation = validation
        self.workers = workers
        self.updates = updates
        self.checks = checks
        for module in self.modules.values():
            workers.broadcast(module)
        groups = updates.groups(self.modules)
        self.parameters = [p for group in groups for p in group["params"]]
        self.optimizer = updates.make_optimizer(groups)
        self.progress = Progress(len(batches), checks.before, checks.clock)
        self.best: dict[str, dict[str, Tensor]] = {}
        self.good: dict[str, dict[str, Tensor]] = {}  # the last known state with a finite loss
        self.good_step = 0
        self._unproven = self._states()  # becomes good at the next step, if its loss is finite
        self.seed = batches.seed
        self.saved: str | os.PathLike | None = None  # the last checkpoint of this run
        self.saved_at = time.monotonic()
        pyro.set_rng_seed(self.seed + workers.rank)
        self.random = random_state(workers.device)

    def resume(self, checkpoint: str | os.PathLike) -> None:
        """Restore the state of the run from its checkpoint.

        Raises:
            CheckpointError: the checkpoint cannot be read, or is of another run.
        """
        self._load(load_checkpoint(checkpoint))
        self._unproven = self._states()
        self.saved = checkpoint

    def run(self, budget: Budget, bar: Bar) -> str:
        """Take steps until the run ends, and return the reason."""
        stream, first, before = self._stream(), self.progress.step, self.progress.before
        stopped = None
        with _defer_interrupts() as interrupted:
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
                        is_third = self.progress.step == first + 2 and before.stage == 0
                        if is_third and self.workers.is_first:
                            _say((before.whole or budget).warning(self.progress))
                        if self.progress.step % (self.checks.every or 1) == 0:
                            stopped = self._check()
                        elif self.workers.agree(float(self._save_is_due())):
                            self._save()
            except KeyboardInterrupt:  # in the middle of a step that was not taken
                set_random_state(self.random, self.workers.device)
                stopped = "interrupted"
        self._finish(stopped)
        return stopped

    def _step(self, batch: Batch, fraction: float) -> None:
        whole = len(batch[0])
        images, labels = self.pair.takes(*map(self.workers.share, batch))
        self.optimizer.zero_grad(set_to_none=True)
        loss = torch.zeros((), device=self.workers.device)
        before = random_state(self.workers.device)
        if len(images):
            loss = self._loss(images, labels, before) * (len(images) / whole)
            loss.backward()
        self.workers.reduce_gradients(self.parameters)
        loss = self.workers.total(loss)
        norm = nn.utils.clip_grad_norm_(self.parameters, self.updates.pace.clip or math.inf)
        if not torch.isfinite(loss + norm):
            self._explain(images, labels, before)
        if self._unproven:
            self.good, self.good_step, self._unproven = self._unproven, self.progress.step, {}
        share = self.updates.factor(self.progress.step, fraction)
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * share
        self.optimizer.step()
        self.random = random_state(self.workers.device)
        self.progress.record(loss.item(), norm.item(), self.optimizer.param_groups[0]["lr"])

    def _loss(self, images: Tensor, labels: Tensor | None, before: dict) -> Tensor:
        try:
            return loss_per_image(self.objective, *self.pair.both, images, labels)
        except ValueError:  # Pyro refuses NaN parameters before there is a loss
            self._explain(images, labels, before, certain=False)
            raise

    def _explain(
        self, images: Tensor, labels: Tensor | None, before: dict, certain: bool = True
    ) -> None:
        """Raise NonFiniteLoss with the first bad site, found by repeating the step's draws.

        Both modules get their last good state back.
        """
        if len(images):  # a transform may have made them not finite
            space_of(self.pair.model).check(images)
        set_random_state(before, self.workers.device)
        site = first_bad_site(*self.pair.both, images, labels)
        if site or certain:
            self._restore(self.good)
            restored = self.good_step if self.good else None
            raise NonFiniteLoss(self.progress.step + 1, site, self.saved, restored) from None

    def _check(self) -> str | None:
        """Update held-out value, best state and checkpoint; return a reason to stop, or None."""
        improved = self.progress.check(self._held_out())
        if improved and self.checks.patience is not None:
            self.best = self._states()
        self._unproven = self._states()
        self._save()
        stopping = self._call_back()
        if self.checks.patience is None or self.progress.checks_since_best < self.checks.patience:
            return stopping
        return (
            f"no lower value in {self.checks.patience} checks since step {self.progress.best_step} "
            f"({self.progress.best_loss:.4f} {self.units}), which is restored"
        )

    def _call_back(self) -> str | None:
        """Call the callbacks on the first process, and return a reason to stop or None."""
        if not self.checks.callbacks:
            return None
        name = None
        if self.workers.is_first:
            with eval_mode(*self.pair.both):
                name = call_back(
                    self.checks.callbacks, Check(*self.pair.both, **self.progress.latest)
                )
            set_random_state(self.random, self.workers.device)  # undo the callbacks' draws
        wanted = self.workers.agree(float(name is not None))
        return f"stopped by the callback {name or 'of the first process'}" if wanted else None

    def _held_out(self) -> float:
        """Return the loss on the validation split, in nats per image; NaN without a split."""
        if self.validation is None:
            return math.nan
        total = 0.0
        with _evaluating(self.objective, *self.pair.both), use_seed(self.seed):
            size = self.batches.batch_size
            for begin in range(0, len(self.validation), size):
                part = self.validation[begin : begin + size]
                images, labels = self.pair.takes(part.images, part.labels)
                loss = loss_per_image(self.objective, *self.pair.both, images, labels)
                total += loss.item() * len(images)
        return self.workers.agree(total / len(self.validation))

    def _finish(self, stopped: str) -> None:
        if stopped != "interrupted" and self.progress.has_unchecked_step:
            self._check()
        elif stopped == "interrupted":
            self.progress.stop()
            self._save()
            self._call_back()
        if stopped != "interrupted":
            self._restore(self.best)

    def _states(self) -> dict[str, dict[str, Tensor]]:
        """Return copies of the states of both modules, on the CPU."""
        return {
            role: {name: value.to("cpu", copy=True) for name, value in module.state_dict().items()}
            for role, module in self.modules.items()
        }

    def _restore(self, states: dict[str, dict[str, Tensor]]) -> None:
        """Load the states of both modules, if there are any."""
        for role, state in states.items():
            self.modules[role].load_state_dict(state)

    def _stream(self) -> Iterator[Batch]:
        """Yield the batches from the present step on."""
        epoch, start = divmod(self.progress.step, len(self.batches))
        yield from self.batches.epoch(epoch, start)
        for later in itertools.count(epoch + 1):
            yield from self.batches.epoch(later)

    def _save_is_due(self) -> bool:
        return time.monotonic() - self.saved_at > SECONDS_BETWEEN_SAVES

    def _save(self) -> None:
        self.saved_at = time.monotonic()
        generators = {k: self.workers.gather(v) for k, v in self.random.items()}
        if self.checks.checkpoint is None or not self.workers.is_first:
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
        if callable(self.checks.checkpoint):
            self.checks.checkpoint(tree)
        else:
            save_checkpoint(self.checks.checkpoint, tree)
            self.saved = self.checks.checkpoint

    def _load(self, tree: dict) -> None:
        check_same_modules(self.modules, tree)
        self._check_settings({"stage": 0, **tree["config"]})
        for role, module in self.modules.items():
            module.load_state_dict(tree[role])
        rates = [group["initial_lr"] for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(tree["optimizer"])
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["initial_lr"] = rate  # this call's rate, which may differ from the previous one
        if hasattr(self.objective, "load_state_dict"):
            self.objective.load_state_dict(tree["objective"])
        self.best = tree["best"]
        self.progress.load_state_dict(tree["progress"])
        self.random = {k: states[self.workers.rank] for k, states in tree["random"].items()}
        set_random_state(self.random, self.workers.device)

    def _check_settings(self, saved: dict) -> None:
        config = self._config()
        if differ := [
            f"{k}={saved.get(k)!r}, not {config[k]!r}" for k in config if saved.get(k) != config[k]
        ]:
            raise CheckpointError(
                "the checkpoint is of a run with other settings; resume with the same ones: it has "
                + "; ".join(differ)
            )

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
            "stage": self.progress.before.stage,
        }


@contextmanager
def _evaluating(objective: ELBO, *modules: nn.Module) -> Iterator[None]:
    """Disable gradients, set modules to eval mode, and restore the objective's state afterwards."""
    state = copy.deepcopy(objective.state_dict()) if hasattr(objective, "state_dict") else None
    try:
        with eval_mode(*modules), torch.no_grad():
            yield
    finally:
        if state is not None:
            objective.load_state_dict(state)


def _say(line: str | None) -> None:
    if line is not None:
        write_line(line)


@contextmanager
def _defer_interrupts() -> Iterator[threading.Event]:
    """Yield an event that Ctrl-C or SIGTERM sets; only a second one interrupts a step."""
    interrupted = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield interrupted
        return
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    def handle(signum: int, frame: object) -> None:
        interrupted.set()
        restore()

    for number in previous:
        signal.signal(number, handle)
    try:
        yield interrupted
    finally:
        restore()
