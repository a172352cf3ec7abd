"""Checks of arguments (labels, numbers, names, choices), with a remedy in each error."""

import difflib
from collections.abc import Collection
from operator import index
from typing import Any

import numpy as np
import torch
from torch import Tensor

MOST_LISTED = 12  # names that an error lists; if there are more, it names the nearest
_SHORT = {torch.float16, torch.bfloat16}


def whole(
    name: str, value: Any, least: int | None = None, below: int | None = None, remedy: str = ""
) -> int:
    """Return a number as an int; raise ValueError unless it is whole and in range.

    Args:
        least, below: the range from `least` up to but not including `below`; None for no end.
        remedy: further words of the error.
    """
    try:
        number = None if isinstance(value, bool) else index(value)
    except TypeError:
        number = None
    too_small = number is not None and least is not None and number < least
    if number is None or too_small or (below and number >= below):
        wanted = "a whole number" if least is None else f"a whole number, {least} or more"
        wanted = f"at least {least}" if too_small else wanted
        wanted = f"a whole number from {least} to {below - 1}" if below else wanted
        raise ValueError(f"{name} must be {wanted}, not {value!r}{remedy}")
    return number


def check_whole(least: int, **arguments: Any) -> None:
    """Raise ValueError for the first argument that is not a whole number of at least `least`."""
    for name, value in arguments.items():
        whole(name, value, least)


def check_seed(seed: Any) -> int:
    """Return a seed as an int; raise ValueError unless it is whole and from 0 to 2^63 - 1."""
    return whole("seed", seed, 0, 2**63)


def check_at_least(minimum: float, **arguments: float | list[float] | tuple[float, ...]) -> None:
    """Raise ValueError that names the first argument, or entry of one, below `minimum`."""
    for name, value in arguments.items():
        if isinstance(value, list | tuple):
            check_at_least(minimum, **{f"{name}[{i}]": entry for i, entry in enumerate(value)})
        elif not value >= minimum:
            raise ValueError(f"{name} must be at least {minimum!r}, not {value!r}")


def told_apart(number: float, *others: float) -> str:
    """Format a number in six digits, or in all digits if it would equal another number.

    1.0000002 would else be shown as 1, and refused for not being in a range that ends at 1.
    """
    same = [other for other in others if other != number and f"{other:g}" == f"{number:g}"]
    return repr(float(number)) if same else f"{number:g}"


def check_positive(**arguments: float) -> None:
    """Raise ValueError that names the first argument that is not a positive finite number."""
    for name, value in arguments.items():
        if isinstance(value, str) or not 0 < value < float("inf"):
            raise ValueError(f"{name} must be positive and finite, not {value!r}")


def check_precision(role: str, name: str, dtype: torch.dtype) -> None:
    """Raise ValueError for a dtype of 16 bits."""
    if dtype in _SHORT:
        raise ValueError(
            f"{role} {name!r} has the precision {dtype}, but in 16 bits log densities round by "
            "whole nats and updates are lost; call float() of model, guide and images first, and "
            "use torch.autocast for speed"
        )


def check_one_of(name: str, value: object, allowed: tuple) -> None:
    """Raise ValueError that names the argument unless its value is allowed."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, not {value!r}")


def check_known(kind: str, name: str, names: Collection[str]) -> None:
    """Raise ValueError with the nearest known names unless a name is known."""
    if name not in names:
        raise ValueError(unknown_name_message(kind, name, names))


def unknown_name_message(kind: str, name: str, names: Collection[str]) -> str:
    """Return a message for an unknown name, with the nearest known names.

    Args:
        kind: kind of the named object, such as "entry".
        name: the given name.
        names: the allowed names.
    """
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(map(repr, near))}?"
    if not near:
        suggestions = (
            names if len(names) <= MOST_LISTED else difflib.get_close_matches(name, names, 3, 0)
        )
        first = f"the nearest of {len(names)} are" if len(suggestions) < len(names) else "there are"
        hint = f"{first} {', '.join(suggestions) or 'none'}"
    return f"unknown {kind} {name!r}; {hint}"


def check_tensor(
    name: str, value: Any, form: str = "torch.Tensor", remedy: str = "give a tensor"
) -> None:
    """Raise ValueError unless an argument is a tensor.

    Args:
        form: description of the tensor.
        remedy: what to do with a value that is no array and no list.
    """
    if isinstance(value, Tensor):
        return
    if isinstance(value, np.ndarray):
        remedy = f"call torch.from_numpy({name})"
    elif isinstance(value, list | tuple | int | float):
        remedy = f"call torch.tensor({name})"
    raise ValueError(f"{name} must be a {form}, not {type(value).__name__}; {remedy}")


def check_labels(labels: Tensor | None, classes: int) -> None:
    """Raise ValueError unless labels, if any, are (B,) integers from 0 to `classes` - 1."""
    if labels is None:
        return
    check_tensor("labels", labels, "tensor of integers (B,)")
    if labels.dim() != 1 or labels.is_floating_point():
        raise ValueError(
            f"labels must be integers of shape (B,), not {labels.dtype} of shape "
            f"{tuple(labels.shape)}"
        )
    if labels.numel() and not 0 <= (low := labels.min().item()) <= labels.max() < classes:
        more = f", or build the model with classes={labels.max().item() + 1}" if low >= 0 else ""
        raise ValueError(
            f"labels must lie in 0 to {classes - 1}, but these span {low} to {labels.max().item()}"
            f"; number the classes from 0, torch.unique(labels, return_inverse=True)[1]{more}"
        )
