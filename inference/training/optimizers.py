"""The optimizer of a run, its parameter groups and learning rates."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from pyro.optim import PyroOptim
from pyro.optim.lr_scheduler import PyroLRScheduler
from torch import nn

from capsule_zoo.inference.training.schedule import SCHEDULES
from capsule_zoo.inference.training.settings import Pace

OptimizerFactory = Callable[[list], torch.optim.Optimizer]

default_optimizer = partial(torch.optim.Adam, fused=True)  # a large decoder's step is 10% faster


@dataclass(frozen=True)
class Updates:
    """The optimizer of a run and its learning rates.

    Attributes:
        factory: a function that makes a torch optimizer from parameter groups.
        lr: see `fit`.
        pace: see `Pace`.
    """

    factory: OptimizerFactory
    lr: float | dict[str, float]
    pace: Pace

    def groups(self, modules: dict[str, nn.Module]) -> list[dict[str, Any]]:
        """Return a parameter group for each module, with its parameters that are not frozen.

        Raises:
            ValueError: all parameters are frozen.
        """
        groups: list[dict[str, Any]] = []
        members: set[nn.Parameter] = set()
        for role, module in modules.items():
            parameters = [p for p in module.parameters() if p.requires_grad and p not in members]
            members.update(parameters)
            if parameters:
                rate = self.lr[role] if isinstance(self.lr, dict) else self.lr
                groups.append({"params": parameters, "lr": rate})
        if not groups:
            raise ValueError("there is no parameter to train; freeze less")
        return groups

    def make_optimizer(self, groups: list[dict[str, Any]]) -> Any:
        """Make the optimizer of parameter groups; raise ValueError if `fit` cannot use it."""
        optimizer = self.factory(groups)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ValueError(
                f"optimizer must return a torch.optim.Optimizer, not a {type(optimizer).__name__}"
            )
        if any(group.get("lrd", 1.0) != 1.0 for group in optimizer.param_groups):
            raise ValueError(
                "optimizer has lrd, but fit sets the learning rate of every step; use "
                'pace=Pace("linear") or Pace("cosine") for a rate that falls'
            )
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
        return optimizer

    def factor(self, step: int, fraction: float) -> float:
        """Return the factor of learning rates in a step, from 0, at this fraction of the run."""
        rise = min((step + 1) / max(self.pace.warmup or 0, 1), 1)
        return SCHEDULES[self.pace.schedule or "constant"](fraction) * rise


def optimizer_factory(optimizer: OptimizerFactory | PyroOptim | None) -> OptimizerFactory:
    """Return a function that makes a torch optimizer from parameter groups.

    Args:
        optimizer: such a function, for example a class of torch optimizers; or a Pyro optimizer,
            whose `lr` (if set) replaces the rates of the groups; or None for Adam.

    Raises:
        ValueError: anything else, or a Pyro optimizer with a scheduler, settings by parameter, or
            clipping, which `fit` does itself.
    """
    if optimizer is None:
        return default_optimizer
    if isinstance(optimizer, PyroOptim):
        return _convert_pyro_optimizer(optimizer)
    if isinstance(optimizer, torch.optim.Optimizer):
        name = f"torch.optim.{type(optimizer).__name__}"
        raise ValueError(
            f"optimizer must be made by fit, which knows the parameters; give the class {name}, "
            f"or functools.partial({name}, ...), not an optimizer that exists"
        )
    if not callable(optimizer):
        raise ValueError(
            "optimizer must be a class such as torch.optim.Adam, a function of parameter groups, "
            f'or a Pyro optimizer such as pyro.optim.Adam({{"lr": 1e-3}}), not {optimizer!r}'
        )
    if optimizer is torch.optim.LBFGS:
        raise ValueError(
            "optimizer LBFGS computes the loss several times a step, which fit does not do; give "
            "one such as torch.optim.Adam"
        )
    return optimizer


def _convert_pyro_optimizer(optimizer: PyroOptim) -> OptimizerFactory:
    name = getattr(optimizer.pt_optim_constructor, "__name__", "the optimizer")
    if isinstance(optimizer, PyroLRScheduler):
        raise ValueError(
            f"optimizer is a Pyro scheduler; give {name} alone, and "
            'pace=Pace("linear") or Pace("cosine") for a rate that falls'
        )
    arguments = optimizer.pt_optim_args
    if not isinstance(arguments, dict):
        raise ValueError(
            "optimizer is a Pyro optimizer whose settings are a function of the parameter; give "
            'a dict of settings, and lr={"model": ..., "guide": ...} for rates by module'
        )
    if optimizer.pt_clip_args:
        raise ValueError(
            "optimizer is a Pyro optimizer that clips gradients; use pace=Pace(clip=...) of fit"
        )

    constructor: Any = optimizer.pt_optim_constructor

    def factory(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        rates = {"lr": arguments["lr"]} if "lr" in arguments else {}
        return constructor([{**g, **rates} for g in groups], **arguments)

    return factory
