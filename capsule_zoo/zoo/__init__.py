"""The zoo's entries: a file, or a folder with entry, figures and view, for each family."""

import pkgutil
from functools import cache
from importlib import import_module


@cache
def import_entries() -> None:
    """Import the entry of every family, which registers it; the folders are looked through once."""
    for family in pkgutil.iter_modules(__path__):
        import_module(f"{__name__}.{family.name}" + ".entry" * family.ispkg)
