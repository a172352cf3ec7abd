"""The default objective of a training run."""

from collections.abc import Callable

import torch
from pyro import poutine
from pyro.infer import ELBO, Trace_ELBO, TraceEnum_ELBO
from torch import Tensor

from capsule_zoo.inference.energy.contrastive_divergence import ContrastiveDivergence
from capsule_zoo.inference.log_weight import call_arguments, enumerated_sites, plate_nesting
from capsule_zoo.inference.objectives.base import is_energy_model, is_trained
from capsule_zoo.models.capsule_rbm import CapsuleRBM


def default_objective(model: Callable, images: Tensor, labels: Tensor | None = None) -> ELBO:
    """Return the default objective for a model.

    It is `ContrastiveDivergence` for an RBM that is trained, `TraceEnum_ELBO` for a model that
    enumerates a site in parallel, and else `Trace_ELBO`.

    Args:
        images: (B, C, H, W), which the model is run on.
        labels: (B,), passed to the model unless None.

    Raises:
        ValueError: an energy model of another class, for which there is no default.
    """
    if is_energy_model(model) and is_trained(model):
        if isinstance(model, CapsuleRBM):
            return ContrastiveDivergence()
        raise ValueError(
            f"{type(model).__name__} is an energy model, whose density is known up to log Z only, "
            "so that an ELBO has no floor; pass objective=, a subclass of "
            'capsule_zoo.inference.Objective, or train the guide alone, freeze="model"'
        )
    with poutine.block(), torch.random.fork_rng(), torch.no_grad():
        trace = poutine.trace(model).get_trace(*call_arguments(images, labels))
    if not enumerated_sites(trace):
        return Trace_ELBO()
    return TraceEnum_ELBO(max_plate_nesting=plate_nesting(trace))
