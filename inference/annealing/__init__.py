"""Annealed importance sampling between a guide and the posterior."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # at run time imported when used: guides that are annealed import this folder too
    from capsule_zoo.inference.annealing.bounds import (
        annealed_bounds,
        annealed_gaps,
        annealed_log_likelihood,
    )

__all__ = ["annealed_bounds", "annealed_gaps", "annealed_log_likelihood"]


def __getattr__(name: str) -> Any:
    """Import the functions when they are used."""
    if name in __all__:
        return getattr(import_module("capsule_zoo.inference.annealing.bounds"), name)
    raise AttributeError(f"module 'capsule_zoo.inference.annealing' has no attribute {name!r}")
