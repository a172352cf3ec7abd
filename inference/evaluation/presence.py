"""Determine whether a pair draws relaxed or discrete presences.

A relaxed pair has a log weight too, but it is a bound on the relaxed model only: it may exceed log
p(image) of the model with presences of 0 or 1. Evaluations report which kind they used.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
from pyro import poutine
from torch import Tensor

from capsule_zoo.inference.check import IncompatibleGuide, draws_between, latent_sites
from capsule_zoo.inference.log_weight import call_arguments
from capsule_zoo.models.common.modes import in_eval_mode

P = TypeVar("P", bound=Callable)


def discrete_form(program: P) -> P:
    """Return `program.discretized()` where it is offered, else the program itself."""
    offered: Callable[[], P] | None = getattr(program, "discretized", None)
    return program if offered is None else offered()


def relaxed_sites(model: Callable) -> tuple[str, ...]:
    """Return the names of sites that are continuous in this model but discrete in evaluation."""
    own, evaluated = (getattr(form, "sites", ()) for form in (model, discrete_form(model)))
    discrete = {site.name for site in evaluated if site.discrete}
    return tuple(site.name for site in own if site.name in discrete and not site.discrete)


def presence_of(model: Callable, relaxed: tuple[str, ...]) -> str:
    """Return "relaxed", "discrete", or "none" for a model that has nothing to relax.

    Args:
        model: the model in the form that is evaluated.
        relaxed: its `relaxed_sites`.
    """
    if relaxed:
        return "relaxed"
    return "none" if discrete_form(model) is model else "discrete"


def refuse_relaxed_draws(
    model: Callable, guide: Callable, images: Tensor, labels: Tensor | None = None
) -> None:
    """Raise IncompatibleGuide if a guide without a discrete form draws relaxed presences.

    The random state is left as it was.

    Raises:
        IncompatibleGuide: a one-line message that names the remedy.
    """
    sites = relaxed_sites(model)
    if not sites or discrete_form(guide) is not guide:
        return
    try:
        with poutine.block(), torch.random.fork_rng(), torch.no_grad(), in_eval_mode(guide):
            trace = poutine.trace(guide).get_trace(*call_arguments(images, labels))
    except Exception:
        return  # the check of the pair reports it
    drawn = latent_sites(trace)
    relaxed = sorted(name for name in sites if name in drawn and draws_between(drawn[name]))
    if relaxed:
        problem = (
            f"it draws relaxed presences only ({', '.join(relaxed)}); pass discrete=False, and "
            "never rank the result beside discrete numbers"
        )
        raise IncompatibleGuide.of(model, guide, [problem], suggest=False)
