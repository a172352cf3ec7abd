"""The zoo's entries: a folder for each family, with its entry, figures and view."""

import pkgutil
from functools import cache
from importlib import import_module


@cache
def import_entries() -> None:
    """Import the entry module of every family, once; a module registers its entries."""
    for family in pkgutil.iter_modules(__path__):
        import_module(f"{__name__}.{family.name}" + ".entry" * family.ispkg)
