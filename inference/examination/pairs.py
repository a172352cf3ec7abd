"""A plain Pyro program next to a guide that was made for it, as a pair of the zoo.

The guides of `auto_encoder(program, x)` and `fit_guide(kind, program, None, x)` have the program as
a model of the zoo, `guide.model`. Functions that get the program itself next to such a guide take
this model in its place, and rows in place of the program's data.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyro
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoGuide
from torch import Tensor, nn

from capsule_zoo.data import Split
from capsule_zoo.guides.base import Guide
from capsule_zoo.inference.check import name_of
from capsule_zoo.inference.examination.program import Call, ProgramModel, as_model, signature_of
from capsule_zoo.inference.examination.refusals import UnservedProgram
from capsule_zoo.inference.examination.rows import same_data
from capsule_zoo.models.base import Model


def replace_program(model: Any, guide: object, data: Any) -> tuple[Any, Any]:
    """Return `guide.model` and rows in place of a plain program and its data.

    Every other pair is returned unchanged, with its data.

    Args:
        model: what a user gave as the model.
        guide: the guide next to it.
        data: rows; a tensor or an array, of a program whose data are one tensor; or values by the
            names of arguments and sites, where those that are not named stay as the guide got them.

    Raises:
        UnservedProgram: the guide was made for another program, or for other values of its
            parameters; or the data have another form.
    """
    program_model = _program_model(model, guide)
    if program_model is None:
        return model, data
    name, call = name_of(model), program_model.call
    if call.program != model:
        raise UnservedProgram(
            f"guide was made for the program {program_model.__name__}, and model is {name}; give "
            f"that program, or make a guide by auto_encoder({name}, data)"
        )
    store = pyro.get_param_store()
    for parameter, value in call.parameters.items():
        if parameter in store and not torch.equal(store[parameter].to(value), value):
            raise UnservedProgram(
                f"parameter {parameter!r} of {name} has changed since the guide was made; make the "
                f"guide anew by auto_encoder({name}, data), or give guide.model and rows for its "
                "former value"
            )
    return program_model, _rows(program_model, data)


def refuse_training(model: Any, guide: object) -> None:
    """Raise UnservedProgram for a plain program with parameters, which its guide keeps constant."""
    program_model = _program_model(model, guide)
    if program_model is None:
        return
    call, name = program_model.call, name_of(model)
    trained = isinstance(call.owner, nn.Module) and any(True for _ in call.owner.parameters())
    if call.parameters or trained:
        raise UnservedProgram(
            f"parameters of {name} stay as they are next to a guide that was made for it; give "
            f'freeze="model" to train the guide alone, or train {name} with a plain Pyro guide'
        )


def model_of_program(model: Any, data: Any) -> tuple[Any, Any]:
    """Return a plain program as a model of the zoo, with its data as rows; a `Model` unchanged.

    Raises:
        UnservedProgram: the program cannot be taken; the message names the site and the remedy.
    """
    if not _is_plain(model):
        return model, data
    if isinstance(data, Mapping):
        return as_model(model, observed=data)
    values = data.images if isinstance(data, Split) else data
    if not isinstance(values, Tensor | np.ndarray):
        raise UnservedProgram(
            f"images must be the data of {name_of(model)}, a tensor for a program with one "
            f'argument or {{"argument or site": values}}, not a {type(data).__name__}'
        )
    return as_model(model, values)


def rows_by_name(model: ProgramModel, values: Any, argument: str) -> Tensor:
    """Return the rows (B, F) with other values of some arguments and sites.

    Args:
        values: by the names of arguments or sites; the others stay as the model got them.
        argument: name of the argument that gave the values, for errors.

    Raises:
        UnservedProgram: it names an argument or a site that the model's data do not have.
    """
    if not isinstance(values, Mapping):
        raise UnservedProgram(
            f'{argument} must be {{"argument or site": values}}, not a {type(values).__name__}; '
            "name all data that change"
        )
    call, data = model.call, _data_by_name(model.call)
    if strange := [name for name in values if name not in data]:
        raise UnservedProgram(
            f"{argument} names {strange[0]!r}, which is not among the given data, "
            f"{', '.join(sorted(data))}"
        )
    positional = len(data) - len(call.kwargs) - len(call.conditions)
    both = [values.get(name, value) for name, value in data.items()]
    named = dict(zip([*data][positional:], both[positional:], strict=True))
    return model.rows_of(*both[:positional], *call.args[positional:], observed=named)


def rows_of_guide(guide: object, data: Any) -> Any:
    """Return data by name as rows, next to a guide made for a program; all else unchanged."""
    model = getattr(guide, "model", None)
    if isinstance(model, ProgramModel) and isinstance(data, Mapping):
        return rows_by_name(model, data, "images")
    return data


def _data_by_name(call: Call) -> dict[str, Any]:
    """Return the arguments of a call and its conditions by name, positional arguments first."""
    return (
        dict(zip(signature_of(call.program).parameters, call.args, strict=False))
        | call.kwargs
        | call.conditions
    )


def _program_model(model: object, guide: object) -> ProgramModel | None:
    """Return the program of a guide as a model, where `model` is a plain program."""
    forgot = isinstance(guide, AutoGuide) and not guide._model  # Pyro does so in a pickle
    program_model = None if forgot or not _is_plain(model) else getattr(guide, "model", None)
    if callable(program_model):  # of an AutoGuide, within a messenger of Pyro
        program_model = poutine.unwrap(program_model)
    return program_model if isinstance(program_model, ProgramModel) else None


def _is_plain(model: object) -> bool:
    """Return whether `model` is a program that is no `Model` of the zoo."""
    program = poutine.unwrap(model) if callable(model) else model
    return callable(program) and not isinstance(program, type | Model | Guide)


def _rows(model: ProgramModel, data: Any) -> Any:
    """Return data as rows of a model; what is no tensor, array or mapping is returned unchanged."""
    if isinstance(data, Mapping):
        return rows_by_name(model, data, "images")
    values = torch.from_numpy(data.copy()) if isinstance(data, np.ndarray) else data
    if not isinstance(values, Tensor):
        return data
    tensors = {n: v for n, v in _data_by_name(model.call).items() if isinstance(v, Tensor)}
    name, value = next(iter(tensors.items()))
    if values.dim() == 2 and values.shape[1] == model.space.width:
        is_argument = len(tensors) == 1 and value.shape[1:] == values.shape[1:]
        if not is_argument or same_data(value, model.space.examples):
            return values
        raise UnservedProgram(
            f"images may be rows of {model.__name__} or its argument {name!r}, which are not "
            f'equal; give {{"{name}": values}}, or the rows next to guide.model'
        )
    if len(tensors) > 1:
        raise UnservedProgram(
            f"images is one tensor, and {model.__name__} has the data {', '.join(tensors)}; give "
            '{"argument or site": values}, or guide.model.rows_of(*args, observed=...)'
        )
    return rows_by_name(model, {name: values}, "images")
