"""Contexts that change a state and restore it: evaluation mode, gradients, random streams.

Pyro has one stack of handlers and one parameter store in a process, and torch one random state.
Threads therefore take turns: every context that a public function opens around a Pyro program
holds `PYRO_LOCK`, so that a second thread waits until the first has left the context.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from threading import RLock

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

PYRO_LOCK = RLock()  # held by the thread that runs Pyro programs


@contextmanager
def eval_mode(*programs: Callable) -> Iterator[None]:
    """Put modules in evaluation mode (running statistics) and restore their modes at the end.

    If a program is a plain function, then so is every module that is called (`evaluate_calls`).
    """
    modules = _modules(programs)
    functions = len(modules) < len(programs)
    with PYRO_LOCK, evaluate_calls() if functions else nullcontext():
        before = [(part, part.training) for module in modules for part in module.modules()]
        for module in modules:
            module.eval()
        try:
            yield
        finally:
            for part, training in before:
                part.training = training


@contextmanager
def evaluate_calls() -> Iterator[None]:
    """Call modules in evaluation mode within the context, and restore their modes at its end.

    A plain function does not tell which modules it calls.
    """
    before: list[nn.Module] = []

    def evaluate(module: nn.Module, inputs: object) -> None:
        if module.training:
            before.extend(part for part in module.modules() if part.training)
            module.eval()

    hook = register_module_forward_pre_hook(evaluate)
    try:
        yield
    finally:
        hook.remove()
        for part in before:
            part.training = True


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
    """Return the modules among programs, and those of which a program is a method."""
    owners = [getattr(program, "__self__", program) for program in programs]
    return [owner for owner in owners if isinstance(owner, nn.Module)]
