"""Temporary changes that are undone afterwards: parameter store, gradients, random streams."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pyro
from pyro.infer.autoguide import AutoGuide
from torch import nn

from capsule_zoo.models.base import NamedModule
from capsule_zoo.models.common.modes import PYRO_LOCK
from capsule_zoo.models.common.param_store import take_over, warn_of_unread


@contextmanager
def isolated_parameters(*programs: Callable) -> Iterator[Callable[[], None]]:
    """Open a context with an empty parameter store, so that no module gets another one's values.

    Values that were loaded into the global store under a module's name are taken over before.

    Pyro keys its global store by name, and the store overrides a module's own parameters. All
    AutoGuides of one class share their names. The store also sets `requires_grad` on every
    parameter that enters it. The yielded function freezes again what was frozen before; the same
    happens on exit.

    A program that is not a module (a plain function) has its parameters in the global store and
    nowhere else. With such a program, the temporary store keeps every entry that does not belong to
    a module. Other threads wait until the context ends.
    """
    with PYRO_LOCK:
        modules = [program for program in programs if isinstance(program, nn.Module)]
        for module in modules:
            if isinstance(module, NamedModule):
                take_over(module, warns=True)
            elif isinstance(module, AutoGuide):
                warn_of_unread(module)
        state = None if len(modules) == len(programs) else _not_owned_by(modules)
        frozen = [p for module in modules for p in module.parameters() if not p.requires_grad]

        def refreeze() -> None:
            for parameter in frozen:
                parameter.requires_grad_(False)

        with pyro.get_param_store().scope(state):
            try:
                yield refreeze
            finally:
                refreeze()


def _not_owned_by(modules: list[nn.Module]) -> Any:
    """Return the state of the global store without the parameters of these modules."""
    state: Any = pyro.get_param_store().get_state()
    names = [getattr(part, "_pyro_name", "") for module in modules for part in module.modules()]
    prefixes = tuple(f"{name}." for name in names if name)
    return {
        kind: {name: value for name, value in held.items() if not name.startswith(prefixes)}
        for kind, held in state.items()
    }
