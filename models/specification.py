"""Specifications: modules and settings of the zoo as JSON, from which they are rebuilt.

    specification = spec(model)
    {"class": "PartWholeCapsules", "objects": 16, "painting": {"class": "Painting", ...}, ...}
    build(specification)  # an equal model, untrained

A specification holds every argument of the constructor, defaults included. Of a guide, the model
and its parts are references, so that a pair is rebuilt as a pair:

    spec(guide, model=model)
    {"class": "PartWholeGuide", "model": {"part_of": "model", "name": ""}, "pose": "delta", ...}

Only classes that are already defined are built. Nothing is imported by name or unpickled.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from numbers import Number
from typing import Any

import torch
from torch import Tensor, nn

from capsule_zoo.data.registration import Settings, without_partials
from capsule_zoo.models.checks import check_known, unknown_name_message
from capsule_zoo.models.common.remembering import Remembering, Submodule

CLASS, PART, CHANGES = "class", "part_of", "changes"


def spec(value: Any, **owners: nn.Module) -> Any:
    """Return the specification of an object, in JSON types, for `build`.

    Args:
        value: a module of the zoo, a dataclass of settings, a class of submodules or a partial of
            one, a tensor, or a value of JSON.
        owners: modules that are given to `build` too; they and their parts become references.

    Raises:
        ValueError: the object, or an argument that it was made with, cannot be written as JSON.
    """
    for owner, module in owners.items():
        if isinstance(value, nn.Module):
            for name, part in module.named_modules():
                if part is value:
                    return {PART: owner, "name": name}
    if isinstance(value, Remembering):
        return _specify_module(value, owners)
    if isinstance(value, Settings):
        all_fields: Any = fields(value) if is_dataclass(value) else ()
        held = {field.name: getattr(value, field.name) for field in all_fields if field.init}
        return {CLASS: type(value).__name__, **_specify_all(held, owners)}
    if is_submodule(value):
        parameters = inspect.signature(value).parameters.items()
        held = {name: p.default for name, p in parameters if p.default is not p.empty}
        return {CLASS: without_partials(value).__name__, **_specify_all(held, owners)}
    if isinstance(value, Tensor):
        # JSON has no number for inf or NaN
        numbers = _map_nested(value.tolist(), lambda x: x if math.isfinite(x) else str(x))
        return {"tensor": numbers, "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, Mapping):
        return _specify_all(value, owners)
    if isinstance(value, tuple | list):
        return [spec(item, **owners) for item in value]
    if value is None or isinstance(value, bool | str | int | float):
        return value
    if isinstance(value, Number) and hasattr(value, "item"):
        return value.item()  # a NumPy scalar
    raise ValueError(
        f"{type(value).__name__} cannot be written as JSON: {value!r:.60}; make it a subclass of "
        "capsule_zoo.models.Settings, or pass numbers, words and modules of the zoo"
    )


def _map_nested(numbers: Any, convert: Callable[[Any], Any]) -> Any:
    """Convert every number of nested lists."""
    if isinstance(numbers, list):
        return [_map_nested(number, convert) for number in numbers]
    return convert(numbers)


def is_submodule(value: object) -> bool:
    """Return True for a class of submodules, or a partial of one."""
    kind = without_partials(value)
    return isinstance(kind, type) and issubclass(kind, Submodule)


def _specify_module(module: Remembering, owners: Mapping[str, nn.Module]) -> dict[str, Any]:
    """Return the specification of a module: its arguments, and changed attributes."""
    try:
        written = _specify_all(module.arguments, owners)
        changes = _specify_all(module.changes, owners)
    except ValueError as error:
        raise ValueError(f"{type(module).__name__} was made with {error}") from error
    return {CLASS: type(module).__name__, **written} | ({CHANGES: changes} if changes else {})


def _specify_all(values: Mapping[str, Any], owners: Mapping[str, nn.Module]) -> dict[str, Any]:
    written = {}
    for name, value in values.items():
        try:
            written[name] = spec(value, **owners)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    return written


def build(specification: Any, **owners: nn.Module) -> Any:
    """Build the untrained object of a specification.

    Args:
        owners: the modules that references name; see `spec`.

    Raises:
        ValueError: a class that is not defined, or an argument that its constructor does not take
            (with the nearest ones); or whatever the constructor refuses.
    """
    if isinstance(specification, list):
        return tuple(build(item, **owners) for item in specification)
    if not isinstance(specification, Mapping):
        return specification
    if PART in specification:
        check_known("module", specification[PART], owners)
        return owners[specification[PART]].get_submodule(specification["name"])
    if "tensor" in specification:
        numbers = _map_nested(
            specification["tensor"], lambda x: float(x) if isinstance(x, str) else x
        )
        return torch.tensor(numbers, dtype=getattr(torch, specification["dtype"]))
    held = {name: build(value, **owners) for name, value in specification.items() if name != CLASS}
    if CLASS not in specification:
        return held
    kind: Any = class_of(specification[CLASS])
    changes = held.pop(CHANGES, {})
    check_arguments(kind, held)
    if issubclass(kind, Submodule):
        return partial(kind, **held)
    made, constant = kind(**held), changes.pop("constant", False)
    made = made.sharing_parameters(**changes) if changes else made
    return made.make_constant() if constant else made


def classes() -> dict[str, type]:
    """Return every defined class of modules and settings, by name."""
    return {
        kind.__name__: kind for base in (Remembering, Settings, Submodule) for kind in _below(base)
    }


def _below(base: Any) -> Iterator[type]:
    for kind in base.__subclasses__():
        yield kind
        yield from _below(kind)


def class_of(name: str) -> type:
    """Return the class of a name; raise ValueError, with the nearest names, if there is none."""
    defined = classes()
    if name not in defined:
        message = unknown_name_message("class", name, sorted(defined))
        raise ValueError(f"{message}; if another module defines {name}, import it first")
    return defined[name]


def check_arguments(kind: type, arguments: Mapping[str, Any]) -> None:
    """Raise ValueError, with the nearest names, for an argument that a class does not take."""
    parameters = inspect.signature(kind).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    for name in arguments:
        check_known(f"argument of {kind.__name__}", name, parameters)
