"""Synchronization of Pyro's parameter store with the parameters of the zoo's modules.

Pyro trains the tensors of its store, and a module computes with its own parameters. They are the
same tensors until values are loaded into the store, set there or assigned: then the module computes
with its old values, and training changes tensors that nothing reads. Here a module takes such
values over before it reads a parameter, and its own tensor goes back into the store.

Pyro finds values by name. Names are numbered in the order in which modules are made, so that values
that were saved by another program may not be found. This is reported by a warning.
"""

import re
import warnings
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import pyro
import torch
from pyro.nn import PyroModule
from pyro.nn import module as pyro_modules
from pyro.nn.module import _Context
from pyro.params.param_store import param_with_module_name
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn
from torch.distributions import constraints

_NUMBERED = re.compile(r"(?P<kind>.+?)_(?P<number>\d+)\.")  # start of a parameter's name
_entered: WeakValueDictionary[str, Tensor] = WeakValueDictionary()  # put in by modules
_STORE = pyro.get_param_store()
_named_parameters: WeakKeyDictionary[nn.Module, list] = (
    WeakKeyDictionary()
)  # names and parameters, for speed


class ReadingContext(_Context):
    """The context of a module's call, in which its parameters agree with Pyro's store."""

    _handler: "StoredValues | None" = None

    def __enter__(self) -> None:
        super().__enter__()
        if self.active == 1 and not torch.compiler.is_exporting():
            self._handler = StoredValues()
            self._handler.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self.active == 1 and self._handler is not None:
            self._handler.__exit__(*error)
            self._handler = None
        super().__exit__(*error)


class StoredValues(Messenger):
    """The effect handler that synchronizes every used parameter with Pyro's store."""

    def __init__(self) -> None:
        super().__init__()
        self._searched = False

    def _process_message(self, msg: Any) -> None:
        if msg["type"] != "param" or pyro_modules._MODULE_LOCAL_PARAMS:
            return
        name, parameter = msg["name"], msg["args"][-1]
        stored = _STORE._params.get(name)
        if parameter is name:  # a PyroParam, which Pyro synchronizes
            if stored is not None and _entered.get(name) is not stored:
                _entered[name] = stored
            return
        if stored is parameter or not isinstance(parameter, nn.Parameter):
            return
        if stored is None and not self._searched:
            self._searched = True
            _warn_of_other_numbers(name)
        _settle(name, parameter, stored)

    def _postprocess_message(self, msg: Any) -> None:
        """Do nothing to the result."""


def take_over(module: PyroModule, warns: bool = False) -> None:
    """Copy the values that Pyro's store holds for a module, if any, into the module.

    Args:
        warns: warn if it holds loaded values for another number instead.
    """
    params = _STORE._params
    if not params:
        return
    missing = None
    for name, parameter in _name_parameters(module):
        stored = params.get(name)
        if stored is None:
            missing = name
        elif stored is not parameter:
            _settle(name, parameter, stored)
    if warns and missing is not None:
        _warn_of_other_numbers(missing)


def agree(module: PyroModule) -> None:
    """Copy loaded values as `take_over` does, fast enough for every call of a guide.

    A guide may read parameters of its model before the model itself runs.
    """
    params = _STORE._params
    if not params:
        return
    if (pairs := _named_parameters.get(module)) is None:
        pairs = _named_parameters[module] = list(_name_parameters(module))
    if any(params.get(name, parameter) is not parameter for name, parameter in pairs):
        take_over(module)
        _named_parameters[module] = list(_name_parameters(module))


def forget_names(module: PyroModule) -> None:
    """Drop the cached parameter names of a module that is renamed."""
    _named_parameters.pop(module, None)


def _name_parameters(module: PyroModule) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of a module under their names in Pyro's store."""
    for path, parameter in module.named_parameters():
        part: Any = module
        *parents, last = path.split(".")
        for depth, child in enumerate(parents):
            holder, part = part, part._modules[child]
            if not isinstance(part, PyroModule):
                name = f"{holder._pyro_name}.{child}"
                yield (
                    param_with_module_name(name, ".".join([*parents[depth + 1 :], last])),
                    parameter,
                )
                break
        else:
            last = last.removesuffix("_unconstrained")  # the name of a PyroParam
            yield f"{part._pyro_name}.{last}", parameter


def _settle(name: str, parameter: nn.Parameter, stored: Tensor | None) -> None:
    """Put a module's parameter into the store, after copying loaded values from the store.

    Raises:
        ValueError: the values have another shape.
    """
    if stored is not None:
        if _entered.get(name) is not stored:  # loaded or set, not left by the module itself
            if stored.shape != parameter.shape:
                raise ValueError(
                    f"Pyro's parameter store holds {name!r} of shape {tuple(stored.shape)}, but "
                    f"the module's has shape {tuple(parameter.shape)}: they are of another module; "
                    "call pyro.clear_param_store(), and save and load by state_dict"
                )
            parameter.data.copy_(stored.detach())
        _STORE._param_to_name.pop(stored, None)
    _STORE._params[name] = parameter
    _STORE._param_to_name[parameter] = name
    _STORE._constraints.setdefault(name, constraints.real)
    _entered[name] = parameter


def warn_of_unread(guide: Any) -> None:
    """Warn if the store holds values for an AutoGuide that has not run yet.

    Only a call makes its parameters, and lets it take these values over.
    """
    start = f"{guide._pyro_name}."
    if guide.prototype_trace is None and any(name.startswith(start) for name in _STORE._params):
        warnings.warn(
            f"{guide._pyro_name} has not run yet and starts anew, while Pyro's parameter store "
            "holds values under its name; call guide(images) first to take them over, or "
            "pyro.clear_param_store() if they are of another guide",
            stacklevel=2,
        )


def _warn_of_other_numbers(name: str) -> None:
    """Warn if the store holds loaded values for a module's name with another number only."""
    start = _NUMBERED.match(name)
    if start is None:
        return
    for other, stored in _STORE._params.items():
        other_match = other.startswith(start["kind"]) and _NUMBERED.match(other)
        if (
            not other_match
            or other_match["kind"] != start["kind"]
            or other_match["number"] == start["number"]
        ):
            continue
        if _entered.get(other) is not stored:
            module, holder = (f"{x['kind']}_{x['number']}" for x in (start, other_match))
            warnings.warn(
                f"Pyro's parameter store holds loaded values of {holder}, which {module} does not "
                "take: names are numbered in the order in which modules are made; save and load "
                "by torch.save((model, guide), path) or by state_dict",
                stacklevel=2,
            )
            return
