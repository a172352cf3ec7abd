"""Determine whether a pair draws relaxed or discrete presences.

A relaxed pair has a log weight too, but it is a bound on the relaxed model only: it may exceed log
p(image) of the model with presences of 0 or 1. Evaluations report which kind they used.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
from pyro import poutine
from pyro.poutine import Trace
from pyro.poutine.util import prune_subsample_sites
from torch import Tensor, nn

from capsule_zoo.inference.check import IncompatibleGuide, draws_between, is_discrete, latent_sites
from capsule_zoo.inference.log_weight import call_arguments
from capsule_zoo.models.common.modes import in_eval_mode

P = TypeVar("P", bound=Callable)


def discrete_form(program: P) -> P:
    """Return `program.discretized()` where it is offered, else the program itself."""
    offered: Callable[[], P] | None = getattr(program, "discretized", None)
    return program if offered is None else offered()


def relaxed_sites(model: Callable, images: Tensor, labels: Tensor | None = None) -> set[str]:
    """Return the continuous sites of a model that are discrete in its discrete form."""
    discrete = discrete_form(model)
    if discrete is model:
        return set()
    laws = [_laws(form, images, labels) for form in (model, discrete)]
    return {
        name
        for name in laws[0].keys() & laws[1].keys()
        if not is_discrete(laws[0][name]["fn"]) and is_discrete(laws[1][name]["fn"])
    }


def presence_of(model: Callable, relaxed: set[str]) -> str:
    """Return "relaxed", "discrete", or "none" for a model that has nothing to relax.

    Args:
        model: the model in the form that is evaluated.
        relaxed: its `relaxed_sites`.
    """
    if relaxed:
        return "relaxed"
    return "none" if discrete_form(model) is model else "discrete"


def refuse_relaxed_draws(
    model: Callable, guide: Callable, sites: set[str], images: Tensor, labels: Tensor | None
) -> None:
    """Raise IncompatibleGuide if a guide without a discrete form draws relaxed presences.

    Args:
        model: the discrete model.
        sites: its presences that another form of the model relaxes.

    Raises:
        IncompatibleGuide: a one-line message that names the remedy.
    """
    if not sites or discrete_form(guide) is not guide:
        return
    try:
        drawn = _laws(guide, images, labels)
    except Exception:
        return  # the check of the pair reports it
    relaxed = sorted(name for name in sites & drawn.keys() if draws_between(drawn[name]))
    if relaxed:
        problem = (
            f"it draws relaxed presences only ({', '.join(relaxed)}); pass discrete=False, and "
            "never rank the result beside discrete numbers"
        )
        raise IncompatibleGuide.of(model, guide, [problem], suggest=False)


def _laws(program: Callable, images: Tensor, labels: Tensor | None) -> dict[str, dict]:
    """Return the latent sites of one run in evaluation mode; the random state is left as it was."""
    modules = [program] if isinstance(program, nn.Module) else []
    with poutine.block(), torch.random.fork_rng(), torch.no_grad(), in_eval_mode(*modules):
        trace: Trace = poutine.trace(program).get_trace(*call_arguments(images, labels))
    return latent_sites(prune_subsample_sites(trace))
