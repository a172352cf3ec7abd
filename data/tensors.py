"""Conversion of numpy arrays, lists and numbers to tensors, for public functions.

>>> @accept_arrays("images", "motions")
... def warp_images(images, motions): ...
"""

from collections.abc import Callable, Mapping
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

Taken = ParamSpec("Taken")
Result = TypeVar("Result")
_ARRAY_TYPES = (np.ndarray, np.generic, list, tuple, int, float, str)  # a str is refused


def tensor_of(array: np.ndarray, name: str) -> Tensor:
    """Convert an array of numbers, in any layout and byte order, to a tensor."""
    if array.dtype.kind not in "fiub" or array.dtype.itemsize > 8:
        raise ValueError(
            f"{name} must hold floating point pixels, not {array.dtype}; stack images of one shape"
        )
    native = array.dtype.newbyteorder("=")
    return torch.from_numpy(np.require(array, dtype=native, requirements=["C", "W"]))


def as_tensor(name: str, value: Any, like: Tensor | None = None) -> Tensor:
    """Convert an array, a list or a number to a tensor; a tensor is returned as it is.

    Args:
        name: name of the argument, for errors.
        value: a tensor, a numpy array, a (nested) list of numbers, or a number.
        like: a tensor whose device, and whose precision where the value is not whole, an array, a
            list or a number gets.

    Raises:
        ValueError: anything else; the message names the argument and the type.
    """
    if isinstance(value, Tensor):
        return value
    try:
        tensor = torch.as_tensor(np.asarray(value))
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(
            f"{name} must be a torch.Tensor, a numpy array or a list of numbers of one shape, not "
            f"{type(value).__name__}"
        ) from None
    if like is None:
        return tensor if isinstance(value, np.ndarray) else tensor.to(_default(tensor))
    return tensor.to(like.device, like.dtype if tensor.is_floating_point() else tensor.dtype)


def as_tensors(name: str, values: Any, like: Tensor | None = None) -> dict[str, Tensor]:
    """Convert the values of a mapping to tensors; see `as_tensor`."""
    if not isinstance(values, Mapping):
        raise ValueError(
            f"{name} must be a dict of values (N, ...) by site, not {type(values).__name__}"
        )
    return {site: as_tensor(f"{name}[{site!r}]", value, like) for site, value in values.items()}


def accept_arrays(
    *names: str, like: str = ""
) -> Callable[[Callable[Taken, Result]], Callable[Taken, Result]]:
    """Return a decorator that converts arrays, lists and numbers to tensors in arguments.

    Args:
        names: names of arguments that the function takes as tensors, or as dicts of tensors.
        like: name of an argument that is a module; arrays get its device and precision.
    """

    def decorate(function: Callable[Taken, Result]) -> Callable[Taken, Result]:
        form = signature(function)

        @wraps(function)
        def converting(*args: Taken.args, **kwargs: Taken.kwargs) -> Result:
            bound = form.bind(*args, **kwargs)
            arguments = bound.arguments
            for name in names:
                if isinstance(value := arguments.get(name), Mapping):
                    arguments[name] = as_tensors(name, value, _parameter(arguments.get(like)))
                elif isinstance(value, _ARRAY_TYPES):
                    arguments[name] = as_tensor(name, value, _parameter(arguments.get(like)))
            return function(*bound.args, **bound.kwargs)

        return converting

    return decorate


def label_tensor(labels: Any) -> Tensor:
    """Convert labels to a tensor; raise ValueError for no array and no list of numbers."""
    if isinstance(labels, Tensor):
        return labels
    if isinstance(labels, np.ndarray | list | tuple):
        try:
            return as_tensor("labels", labels)
        except ValueError:
            pass
    raise ValueError(
        f"labels must be a tensor of integers, not {type(labels).__name__}; number classes that "
        "are words"
    )


def _parameter(module: Any) -> Tensor | None:
    return next(module.parameters(), None) if isinstance(module, nn.Module) else None


def _default(values: Tensor) -> torch.dtype:
    return torch.get_default_dtype() if values.is_floating_point() else values.dtype
