"""Capsule Zoo: capsule models as joint distributions, their routings as guides and objectives.

>>> from capsule_zoo import create, describe, list_models, load
>>> list_models()
['part-whole', ...]
>>> describe("part-whole")                                # settings, guides, sites, weights, ...
>>> entry = create("part-whole", objects=8, parts=12)     # .model, .guide, .guides, .objective
>>> load("part-whole-mnist")                              # trained; see list_weights()
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from capsule_zoo._version import __version__ as __version__

# In a checkout models/, guides/, inference/, data/ and weights/ are symbolic links to the folders
# next to this one. If links could not be made (some clones on Windows), the folders are found by
# the checkout's root on __path__.
_HERE = Path(__file__).resolve().parent
if not (_HERE / "models").is_dir() and (_HERE.parent / "models").is_dir():
    __path__.append(str(_HERE.parent))

if TYPE_CHECKING:  # for type checkers and editors; at run time these are imported when used
    from capsule_zoo.discovery import describe as describe
    from capsule_zoo.discovery import list_weights as list_weights
    from capsule_zoo.registry import Entry as Entry
    from capsule_zoo.registry import create as create
    from capsule_zoo.registry import list_models as list_models
    from capsule_zoo.registry import load as load
    from capsule_zoo.registry import register as register
    from capsule_zoo.registry import register_guide as register_guide
    from capsule_zoo.registry import save as save
    from capsule_zoo.runs.recipe import Recipe as Recipe

_REGISTRY = ("Entry", "create", "list_models", "load", "register", "register_guide", "save")
_LAZY = {
    **dict.fromkeys(_REGISTRY, "registry"),
    **dict.fromkeys(("describe", "list_weights"), "discovery"),
    "Recipe": "runs.recipe",
}
__all__ = sorted([*_LAZY, "__version__"])


def __getattr__(name: str) -> Any:
    """Import a name (and with it torch and every model) only when it is used."""
    if name in _LAZY:
        return getattr(import_module(f"capsule_zoo.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'capsule_zoo' has no attribute {name!r}; it offers {__all__}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
