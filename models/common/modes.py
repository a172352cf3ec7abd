"""Contexts that change a state and restore it: evaluation mode, gradients, random streams.

Pyro has one stack of handlers and one parameter store in a process, and torch one random state.
Threads therefore take turns: every context that a public function opens around a Pyro program
holds `PYRO_LOCK`, so that a second thread waits until the first has left the context.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import RLock

import torch
from torch import nn

PYRO_LOCK = RLock()  # held by the thread that runs Pyro programs


@contextmanager
def eval_mode(*programs: Callable) -> Iterator[None]:
    """Put modules in evaluation mode (running statistics) and restore their modes at the end.

    Plain functions among the programs have no mode and are left alone.
    """
    with PYRO_LOCK:
        modules = _modules(programs)
        before = [(part, part.training) for module in modules for part in module.modules()]
        for module in modules:
            module.eval()
        try:
            yield
        finally:
            for part, training in before:
                part.training = training


@contextmanager
def frozen(*programs: Callable) -> Iterator[None]:
    """Turn off the gradients of modules' parameters, which also saves their backward pass."""
    held = [p for module in _modules(programs) for p in module.parameters() if p.requires_grad]
    for parameter in held:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in held:
            parameter.requires_grad_(True)


@contextmanager
def use_seed(seed: int) -> Iterator[None]:
    """Seed torch's random state for the context and restore it at the end, on all devices."""
    with PYRO_LOCK, torch.random.fork_rng(range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        yield


def _modules(programs: tuple[Callable, ...]) -> list[nn.Module]:
    return [program for program in programs if isinstance(program, nn.Module)]
