"""Names that modules outside the zoo register: entries, guides, data sets and experiments.

The decorators `register`, `register_guide`, `register_dataset` and `experiment` add the names when
their module is imported, by its user or by `capsule-zoo --import my_module`.
"""

import os
import sys
from functools import partial
from importlib import import_module
from typing import Any


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
    """Return the name of the module that defines a function or class; of a name, the name."""
    return thing if isinstance(thing, str) else getattr(without_partials(thing), "__module__", "")


def modules_outside(*objects: object) -> list[str]:
    """Return the names of the modules outside the zoo in which functions or classes are defined.

    A script that is run as a program has no name by which it could be imported, and is left out.
    """
    names = {*map(module_of, objects)}
    return sorted(n for n in names if n.partition(".")[0] not in ("", "capsule_zoo", "__main__"))


def runs_again(*objects: object) -> bool:
    """Return True if all are defined in a notebook, where a cell may run again and replace one."""
    return all(module_of(item) == "__main__" for item in objects)


def refuse_taken(category: str, name: str, holder: object, new: object) -> None:
    """Raise ValueError if a name has a holder, unless the new one is its notebook's, run again.

    Args:
        category: what is registered, such as "an entry".
        holder: what has the name, a function, a class or a module; None for a free name.
    """
    if holder is not None and not runs_again(holder, new):
        raise ValueError(
            f"{category} named {name!r} is registered already, by {module_of(holder)}; choose "
            "another name"
        )


def without_partials(function: Any) -> Any:
    """Return the function or class of which partials fix arguments."""
    while isinstance(function, partial):
        function = function.func
    return function
