"""Objectives: what training minimises, for `pyro.infer.SVI` and for torch optimizers alike.

An objective of the zoo is a `pyro.infer.ELBO` whose subclasses write `differentiable_loss` only, in
nats per image. One object then serves both ways people work::

    SVI(model, guide, pyro.optim.Adam({"lr": 1e-3}), loss=objective).step(images)
    objective(model, guide)(images).backward()

Pyro's own ELBOs are objectives already. They sum over the batch; `loss_per_image` puts both on the
same scale.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from pyro import poutine
from pyro.infer import (
    ELBO,
    RenyiELBO,
    Trace_ELBO,
    TraceEnum_ELBO,
    TraceGraph_ELBO,
    TraceMeanField_ELBO,
    TraceTailAdaptive_ELBO,
    TraceTMC_ELBO,
)
from pyro.infer.enum import get_importance_trace
from pyro.infer.util import torch_backward, torch_item
from pyro.poutine import Trace
from torch import Tensor

from capsule_zoo.inference.log_weight import call_arguments, enumerated_sites, plate_nesting
from capsule_zoo.models.blocks.sharing import sharing


class Objective(ELBO):
    """Base of the zoo's objectives: subclasses write `differentiable_loss` and nothing else.

    An objective with a state of its own (persistent chains) also offers `state_dict()` and
    `load_state_dict(state)`, a nested dict of tensors and numbers, which checkpoints then hold.

    Attributes:
        units: what the loss is measured in.
        is_bound: True when the negated loss is, in expectation, a lower bound on log p(images).
            Models are never ranked by an objective that is none.
    """

    units = "nats per image"
    is_bound = False

    def differentiable_loss(
        self, model: Callable, guide: Callable, *args: Any, **kwargs: Any
    ) -> Tensor:
        """The scalar to minimise, averaged over the images of the batch, in nats per image."""
        raise NotImplementedError(f"{type(self).__name__} must write differentiable_loss")

    def loss(self, model: Callable, guide: Callable, *args: Any, **kwargs: Any) -> float:
        """The value of the loss, in nats per image."""
        return torch_item(self.differentiable_loss(model, guide, *args, **kwargs))

    def loss_and_grads(self, model: Callable, guide: Callable, *args: Any, **kwargs: Any) -> float:
        """The value of the loss, in nats per image; its gradients are added to the parameters."""
        loss = self.differentiable_loss(model, guide, *args, **kwargs)
        torch_backward(loss, self.retain_graph)
        return torch_item(loss)

    def _get_trace(
        self, model: Callable, guide: Callable, args: tuple, kwargs: dict
    ) -> tuple[Trace, Trace]:
        """The model's and the guide's trace of one joint draw, log densities computed."""
        return get_importance_trace("flat", self.max_plate_nesting, model, guide, args, kwargs)


class _WithGradient(torch.autograd.Function):
    """See `with_gradient`."""

    @staticmethod
    def forward(ctx, value: Tensor, gradients: list[Tensor | None], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    def backward(ctx, outer: Tensor):
        return None, None, *(None if g is None else outer * g for g in ctx.gradients)


def with_gradient(
    value: Tensor, parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]
) -> Tensor:
    """A scalar whose gradient by each of these parameters is declared, whatever made the value.

    For objectives whose direction is not the gradient of their value. Where a gradient is None,
    the parameter has none.
    """
    return _WithGradient.apply(value.detach(), list(gradients), *parameters)


_BOUNDS = (Trace_ELBO, TraceEnum_ELBO, TraceGraph_ELBO, TraceTMC_ELBO)
_NO_BOUNDS = (TraceTailAdaptive_ELBO, TraceMeanField_ELBO)  # the latter drops Delta densities


def is_bound(objective: ELBO) -> bool:
    """Whether the negated loss is a lower bound on log p(images), for zoo and Pyro objectives.

    It is one for guides with a density: see `evaluate` for guides with a Delta over a continuous
    site. A Renyi objective is a bound for alpha >= 0 (Li and Turner 2016, section 3).
    """
    if isinstance(objective, Objective):
        return objective.is_bound
    if isinstance(objective, RenyiELBO):
        return objective.alpha >= 0
    return isinstance(objective, _BOUNDS) and not isinstance(objective, _NO_BOUNDS)


def loss_per_image(
    objective: ELBO,
    model: Callable,
    guide: Callable,
    images: Tensor,
    labels: Tensor | None = None,
) -> Tensor:
    """The loss on a batch, in nats per image, differentiable unless gradients are disabled.

    Args:
        objective: one of the zoo's or of Pyro's; Pyro's sum over the batch and are divided here.
        images: (B, C, H, W).
        labels: (B,), handed on to model and guide unless None.

    Raises:
        ValueError: the objective offers no `differentiable_loss` (`pyro.infer.RenyiELBO`).
    """
    check_objective(objective)
    # With nothing to differentiate, TraceEnum_ELBO offers `loss` only.
    evaluate = objective.differentiable_loss if torch.is_grad_enabled() else objective.loss
    with sharing():
        loss = evaluate(model, guide, *call_arguments(images, labels))
    if not isinstance(loss, Tensor):
        loss = images.new_tensor(loss)
    return loss if isinstance(objective, Objective) else loss / len(images)


def check_objective(objective: ELBO | None) -> None:
    """Raise ValueError, with a remedy, unless `objective` is None or has a differentiable loss."""
    if isinstance(objective, type):
        raise ValueError(
            f"objective must be an instance, not the class {objective.__name__}; write "
            f"{objective.__name__}() with brackets"
        )
    if objective is None or hasattr(objective, "differentiable_loss"):
        return
    if isinstance(objective, RenyiELBO):
        remedy = "use capsule_zoo.inference.ImportanceWeightedELBO(num_particles=K), its alpha=0"
    else:
        remedy = "use a subclass of capsule_zoo.inference.Objective, Trace_ELBO or TraceEnum_ELBO"
    name = type(objective).__name__
    raise ValueError(f"objective {name} offers no differentiable_loss; {remedy}")


def repeated(images: Tensor, labels: Tensor | None, count: int) -> tuple[Tensor, Tensor | None]:
    """A batch `count` times over, one copy behind the other, (count B, C, H, W) and (count B,)."""
    return images.repeat(count, 1, 1, 1), None if labels is None else labels.repeat(count)


def default_objective(
    model: Callable, images: Tensor, labels: Tensor | None = None
) -> TraceEnum_ELBO | Trace_ELBO:
    """`TraceEnum_ELBO` for a model that enumerates a site in parallel, `Trace_ELBO` for others."""
    with poutine.block(), torch.random.fork_rng(), torch.no_grad():
        trace = poutine.trace(model).get_trace(*call_arguments(images, labels))
    if not enumerated_sites(trace):
        return Trace_ELBO()
    return TraceEnum_ELBO(max_plate_nesting=plate_nesting(trace))
