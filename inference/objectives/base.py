"""Objectives: losses that work with both `pyro.infer.SVI` and torch optimizers.

An objective of the zoo is a `pyro.infer.ELBO` whose subclasses write `differentiable_loss` only, in
nats per image. The same object can then be used in both ways::

    SVI(model, guide, pyro.optim.Adam({"lr": 1e-3}), loss=objective).step(images)
    objective(model, guide)(images).backward()

Pyro's own ELBOs are objectives already. They sum over the batch; `loss_per_image` puts both on the
same scale.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
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
from torch import Tensor, nn

from capsule_zoo.data.tensors import accept_arrays
from capsule_zoo.inference.log_weight import call_arguments
from capsule_zoo.models.checks import check_tensor
from capsule_zoo.models.common.sharing import sharing
from capsule_zoo.models.common.spaces import tile_batch


class Objective(ELBO):
    """The base class of the zoo's objectives; subclasses write `differentiable_loss`.

    An objective with a state (persistent chains) also offers `state_dict()` and
    `load_state_dict(state)`. The state is a nested dict of tensors and numbers, and checkpoints
    store it.

    Attributes:
        units: the unit of the loss.
        is_bound: True when the negated loss is, in expectation, a lower bound on log p(images).
            Models are never ranked by an objective that is not a bound.
    """

    units = "nats per image"
    is_bound = False

    def check_pair(self, model: Callable, guide: Callable) -> None:
        """Raise ValueError if the objective does not serve the pair; `fit` calls it before step 1.

        An objective that `is_bound` refuses to train an energy model, see `refuse_energy_model`.
        """
        if self.is_bound:
            refuse_energy_model(self, model)

    def remark_on_end(self) -> str | None:
        """Return why results are wrong if training ends now, or None; `fit` warns of it."""
        return None

    def __call__(self, model: nn.Module, guide: nn.Module) -> nn.Module:
        """Return a module that computes the loss of the pair, after a check of the pair."""
        self.check_pair(model, guide)
        return super().__call__(model, guide)

    def differentiable_loss(
        self, model: Callable, guide: Callable, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Return the scalar to minimize, a mean over the images of the batch, in nats per image."""
        raise NotImplementedError(f"{type(self).__name__} must write differentiable_loss")

    def loss(self, model: Callable, guide: Callable, *args: Any, **kwargs: Any) -> float:
        """Return the value of the loss, in nats per image."""
        return torch_item(self.differentiable_loss(model, guide, *args, **kwargs))

    def loss_and_grads(self, model: Callable, guide: Callable, *args: Any, **kwargs: Any) -> float:
        """Return the loss, in nats per image, and add its gradients to the parameters."""
        self.check_pair(model, guide)
        loss = self.differentiable_loss(model, guide, *args, **kwargs)
        torch_backward(loss, self.retain_graph)
        return torch_item(loss)

    def _get_trace(
        self, model: Callable, guide: Callable, args: tuple, kwargs: dict
    ) -> tuple[Trace, Trace]:
        """Trace guide and model at one sample, and compute their log densities."""
        return get_importance_trace("flat", self.max_plate_nesting, model, guide, args, kwargs)


def with_gradient(
    value: Tensor, parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]
) -> Tensor:
    """Return a loss with given gradients in these parameters.

    The gradients do not depend on the computation of the value. This serves objectives whose
    descent direction is not the gradient of their value. Where a gradient is None, the parameter
    has none.
    """
    pairs = ((p, g) for p, g in zip(parameters, gradients, strict=True) if g is not None)
    slope = sum(((p * g).sum() for p, g in pairs), torch.zeros_like(value))
    return value.detach() + (slope - slope.detach())


_BOUNDS = (Trace_ELBO, TraceEnum_ELBO, TraceGraph_ELBO, TraceTMC_ELBO)
_NO_BOUNDS = (TraceTailAdaptive_ELBO, TraceMeanField_ELBO)  # the latter drops Delta densities


def is_bound(objective: ELBO) -> bool:
    """Return True if the negated loss is a lower bound on log p(images).

    Zoo and Pyro objectives are both accepted. The answer holds for guides with a density: see
    `evaluate` for guides with a Delta over a continuous site. A Renyi objective is a
    bound for alpha >= 0 (Li and Turner 2016, section 3).
    """
    if isinstance(objective, Objective):
        return objective.is_bound
    if isinstance(objective, RenyiELBO):
        return objective.alpha >= 0
    return isinstance(objective, _BOUNDS) and not isinstance(objective, _NO_BOUNDS)


def units_of(objective: ELBO, model: Callable) -> str:
    """Return the unit of a loss, with the density it refers to if that is not of images."""
    units = getattr(objective, "units", Objective.units)
    if units == Objective.units and getattr(model, "supervised", False):
        return f"{units}, of log p(label | image)"
    return units


@accept_arrays("images", "labels", like="model")
def loss_per_image(
    objective: ELBO, model: Callable, guide: Callable, images: Tensor, labels: Tensor | None = None
) -> Tensor:
    """Return the loss on a batch in nats per image, differentiable unless gradients are disabled.

    Args:
        objective: an objective of the zoo or of Pyro. Pyro's objectives sum over the batch; the
            sum is divided by the number of images.
        images: (B, C, H, W).
        labels: (B,), passed to model and guide unless None.

    Raises:
        ValueError: the objective offers no `differentiable_loss` (`pyro.infer.RenyiELBO`), or, with
            gradients, does not serve the pair (`check_served`).
    """
    check_objective(objective)
    if torch.is_grad_enabled():
        check_served(objective, model, guide)
    is_zoo_objective = isinstance(objective, Objective)
    # With nothing to differentiate, TraceEnum_ELBO offers `loss` only.
    evaluate = (
        objective.differentiable_loss
        if is_zoo_objective or torch.is_grad_enabled()
        else objective.loss
    )
    with sharing():
        loss = evaluate(model, guide, *call_arguments(images, labels))
    if is_zoo_objective and not (isinstance(loss, Tensor) and loss.dim() == 0):
        form = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(
            f"differentiable_loss of {type(objective).__name__} must return a scalar tensor, the "
            f"mean over the images of the batch, not {form}"
        )
    if not isinstance(loss, Tensor):
        loss = images.new_tensor(loss)
    return loss if is_zoo_objective else loss / len(images)


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
        remedy = (
            "use capsule_zoo.inference.ImportanceWeightedELBO("
            f"num_particles={objective.num_particles}, alpha={max(objective.alpha, 0):g})"
        )
        if objective.alpha < 0:
            remedy += f"; alpha={objective.alpha:g} gives no lower bound, and is not offered"
    else:
        remedy = "use a subclass of capsule_zoo.inference.Objective, Trace_ELBO or TraceEnum_ELBO"
    name = type(objective).__name__
    raise ValueError(f"objective {name} offers no differentiable_loss; {remedy}")


def check_served(objective: ELBO, model: Callable, guide: Callable) -> None:
    """Raise ValueError, with a remedy, if an objective does not serve a pair."""
    if isinstance(objective, Objective):
        objective.check_pair(model, guide)
    elif isinstance(objective, (*_BOUNDS, RenyiELBO)):
        refuse_energy_model(objective, model)


def refuse_energy_model(objective: ELBO, model: Callable) -> None:
    """Raise ValueError if an energy model, of unknown log Z, is trained by a bound.

    Without log Z its loss falls for ever. A model that is not trained (its parameters have no
    gradient, as under `fit(freeze="model")`) has a constant log Z, so that guides can be trained.
    """
    if is_energy_model(model) and is_trained(model):
        raise ValueError(
            f"{type(model).__name__} is an energy model, whose density is known up to log Z only, "
            f"so that {type(objective).__name__} has no floor; pass "
            'objective=ContrastiveDivergence(), or train the guide alone, freeze="model"'
        )


def is_energy_model(model: Callable) -> bool:
    """Return True if a model of images is not `normalized`."""
    return not getattr(model, "normalized", True) and not getattr(model, "supervised", False)


def is_trained(model: Callable) -> bool:
    """Return True unless the model is a module none of whose parameters has a gradient."""
    return not isinstance(model, nn.Module) or any(p.requires_grad for p in model.parameters())


def repeat_batch(images: Tensor, labels: Tensor | None, count: int) -> tuple[Tensor, Tensor | None]:
    """Return `count` copies of a batch, one after the other: (count B, ...) and (count B,)."""
    if labels is None:
        return tile_batch(images, count), None
    check_tensor("labels", labels, "tensor of integers (B,)")  # numpy's `repeat` is another
    return tile_batch(images, count), labels.repeat(count)
