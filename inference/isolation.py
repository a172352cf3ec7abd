"""What inference changes for a while and puts back: parameter store, gradients, random streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pyro
import torch
from torch import nn


@contextmanager
def isolated_parameters(*programs: Callable) -> Iterator[Callable[[], None]]:
    """An empty parameter store, so that no module picks up another one's values.

    Pyro keys its global store by name and lets it override a module's own parameters; AutoGuides
    of one class all share their names. The store also sets `requires_grad` on whatever enters it:
    the function that is yielded freezes again what was frozen before, as does the end.
    """
    modules = [program for program in programs if isinstance(program, nn.Module)]
    frozen = [p for module in modules for p in module.parameters() if not p.requires_grad]

    def refreeze() -> None:
        for parameter in frozen:
            parameter.requires_grad_(False)

    with pyro.get_param_store().scope():
        try:
            yield refreeze
        finally:
            refreeze()


@contextmanager
def frozen(*modules: nn.Module) -> Iterator[None]:
    """Within it parameters take no gradient, which also spares their backward pass."""
    held = [p for module in modules for p in module.parameters() if p.requires_grad]
    for parameter in held:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in held:
            parameter.requires_grad_(True)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """A stream of draws of its own; torch's random state is put back at the end, on all devices."""
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        yield
