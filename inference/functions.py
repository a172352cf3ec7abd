"""Plain functions with `pyro.param` as models and guides: modules that own their parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn
from torch.distributions import constraints, transform_to

from capsule_zoo.inference.log_weight import call_arguments


class FunctionModule(nn.Module):
    """A Pyro function whose parameters are those of a torch module; made by `as_module`.

    The parameters are in unconstrained space. They are the very tensors that Pyro's parameter
    store holds, so that training the module trains the function.

    Attributes:
        function: the function, called as `function(images)` or `function(images, labels)`.
        unconstrained: parameters by name; a dot in a name is a slash here.
    """

    def __init__(
        self,
        function: Callable,
        parameters: dict[str, nn.Parameter],
        supports: dict[str, constraints.Constraint],
    ) -> None:
        super().__init__()
        self.__name__ = _name_of(function)
        self.function = function
        self.unconstrained = nn.ParameterDict({_key(n): p for n, p in parameters.items()})
        self._supports = supports

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        with _OwnParameters(self):
            return self.function(*arguments, **keywords)

    def value(self, name: str) -> Tensor:
        """Return a parameter as the function sees it, within its constraint.

        Raises:
            ValueError: the function had no such parameter when the module was made.
        """
        if name not in self._supports:
            raise ValueError(
                f"pyro.param {name!r} of {self.__name__} is not among those of the first call, "
                f"which are {', '.join(map(repr, self._supports)) or 'none'}; name the same "
                "parameters in every call"
            )
        return transform_to(self._supports[name])(self.unconstrained[_key(name)])


class _OwnParameters(Messenger):
    """Gives every `pyro.param` the value that the module holds."""

    def __init__(self, module: FunctionModule) -> None:
        super().__init__()
        self.module = module

    def _pyro_param(self, msg: Any) -> None:
        msg["value"] = self.module.value(msg["name"])
        msg["done"] = True
        msg["stop"] = True


def as_module(program: Callable, images: Tensor, labels: Tensor | None = None) -> nn.Module:
    """Return a model or a guide as a torch module that owns its parameters.

    A torch module is returned as it is. A function is run once, which creates its parameters in
    Pyro's store unless they are there; the module's parameters are those of the store, so that
    what is trained is what the function uses afterwards. The random state is left as it was.

    >>> guide = as_module(guide_function, images[:2])
    >>> torch.optim.Adam(guide.parameters())

    Args:
        program: a torch module, or a function of images (and labels) with `pyro.param`.
        images: (B, C, H, W), those that the function is run on.
        labels: (B,), handed on unless None.

    Raises:
        ValueError: the program is neither, or the function cannot run.
    """
    if isinstance(program, nn.Module):
        return program
    arguments = call_arguments(images, labels)
    try:
        with torch.random.fork_rng(), torch.no_grad(), poutine.block():
            trace = poutine.trace(program, param_only=True).get_trace(*arguments)
    except Exception as error:
        raise ValueError(f"{_name_of(program)} cannot run on these images: {error}") from error
    names = [name for name, site in trace.nodes.items() if site["type"] == "param"]
    return FunctionModule(program, *_owned(names))


def check_program(role: str, program: object) -> None:
    """Raise ValueError unless `program` can be a model or a guide."""
    if isinstance(program, nn.Module):
        return
    if isinstance(program, type):
        raise ValueError(
            f"{role} must be an instance, not the class {program.__name__}; make one by "
            f"{program.__name__}(...)"
        )
    if not callable(program):
        raise ValueError(
            f"{role} must be a torch.nn.Module or a function with pyro.param, not "
            f"{type(program).__name__}"
        )


def _owned(
    names: list[str],
) -> tuple[dict[str, nn.Parameter], dict[str, constraints.Constraint]]:
    """Make these entries of Pyro's store `nn.Parameter`s, and return them with constraints."""
    store = pyro.get_param_store()
    state = store.get_state()
    supports = {name: state["constraints"][name] for name in names}
    parameters: dict[str, nn.Parameter] = {}
    for name in names:
        value = state["params"][name]
        if not isinstance(value, nn.Parameter):  # one of a module in `pyro.module` is one already
            del store[name]
            value = nn.Parameter(value.detach().clone())
        parameters[name] = value
    store.set_state({"params": dict(parameters), "constraints": supports})
    return parameters, supports


def _key(name: str) -> str:
    return name.replace(".", "/")


def _name_of(program: Callable) -> str:
    return getattr(program, "__name__", type(program).__name__)
