"""Registration of names by modules outside the zoo: entries, guides, data sets, experiments.

The decorators `register`, `register_guide`, `register_dataset` and `experiment` add the names when
their module is imported, by its user or by `capsule-zoo --import my_module`.
"""

import os
import sys
from functools import partial
from importlib import import_module
from typing import Any


class Settings:
    """The base class of dataclasses of settings that are arguments of modules."""


def import_by_name(module: str) -> None:
    """Import a module of the current folder or of an installed package.

    Raises:
        ValueError: there is no such module, or it cannot be imported.
    """
    if not all(part.isidentifier() for part in module.split(".")):
        raise ValueError(
            f"--import takes the name of a module, such as my_module or my_package.capsules, not "
            f"{module!r}"
        )
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())
    try:
        import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise _import_error(module, error) from error
        raise ValueError(
            f"--import found no module {module!r}, neither installed nor in the current folder "
            f"{os.getcwd()}; install its package, or change to its folder"
        ) from error
    except Exception as error:
        raise _import_error(module, error) from error


def _import_error(module: str, error: Exception) -> ValueError:
    return ValueError(
        f"--import {module} failed ({type(error).__name__}: {error}); to see where, run: "
        f"python -c 'import {module}'"
    )


def module_of(thing: object) -> str:
    """Return the name of the module that defines a function or class; a text is returned as is."""
    return thing if isinstance(thing, str) else getattr(without_partials(thing), "__module__", "")


def modules_outside(*objects: object) -> list[str]:
    """Return the names of the modules outside the zoo that define functions or classes.

    A script that runs as a program is left out, because it cannot be imported by name.
    """
    names = {*map(module_of, objects)}
    return sorted(n for n in names if n.partition(".")[0] not in ("", "capsule_zoo", "__main__"))


def runs_again(*objects: object) -> bool:
    """Return whether all objects are defined in a notebook, whose cells may run again."""
    return all(module_of(item) == "__main__" for item in objects)


def refuse_taken(category: str, name: str, holder: object, new: object) -> None:
    """Raise ValueError if a name is taken, unless a cell of a notebook registers it again.

    Args:
        category: the noun of the registered object, such as "an entry".
        holder: the function, class or module that has the name; None for a free name.
    """
    if holder is not None and not runs_again(holder, new):
        raise ValueError(
            f"{category} named {name!r} is registered already, by {module_of(holder)}; choose "
            "another name"
        )


def without_partials(function: Any) -> Any:
    """Return the function or class inside of any partials."""
    while isinstance(function, partial):
        function = function.func
    return function
