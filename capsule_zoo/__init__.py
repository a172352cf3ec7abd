"""Capsule Zoo: capsule models as joint distributions, their routings as guides and objectives.

>>> from capsule_zoo import create, list_models
>>> list_models()
['part-whole', ...]
>>> entry = create("part-whole", objects=8, parts=12)     # .model, .guide, .guides, .objective
"""

from pathlib import Path

__version__ = "0.1.0"

# In a checkout the sub-packages lie beside this folder (models/, guides/, ...), in an installation
# inside it. The checkout's root on __path__ lets a bare clone work before it is installed.
_ROOT = Path(__file__).resolve().parent.parent
if (_ROOT / "setup.cfg").is_file() and (_ROOT / "models").is_dir():
    __path__.append(str(_ROOT))

_FROM_REGISTRY = ("register", "list_models", "create", "load", "save", "Entry")
__all__ = ["__version__", *_FROM_REGISTRY]


def __getattr__(name: str):
    """Import the registry (and with it torch and every model) only when it is asked for."""
    if name in _FROM_REGISTRY:
        from capsule_zoo import registry

        return getattr(registry, name)
    raise AttributeError(f"module 'capsule_zoo' has no attribute {name!r}; it offers {__all__}")
