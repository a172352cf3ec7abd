"""Objects that store the arguments of their constructors, so that they can be rebuilt.

Modules and settings of the zoo derive from `Remembering`, `Submodule` or `Settings`.
`models.specification` writes them as JSON and builds them again.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar

C = TypeVar("C", bound=Callable[..., None])


class Remembering:
    """The base class of objects that store the arguments of their constructor.

    Attributes:
        arguments: every argument by name, defaults included, so that a later change of a default
            changes no saved object. Variable keywords are entries, too.
        changes: attributes in which a copy differs that are no arguments; see `note_changes`.
    """

    arguments: Mapping[str, Any] = {}
    changes: Mapping[str, Any] = {}

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if "__init__" in vars(cls):
            cls.__init__ = _remembering(cls.__init__)  # type: ignore[method-assign]


class Submodule:
    """The base class of modules that a guide makes from its model.

    An argument of the guide is the class, or a `functools.partial` of it with settings:

    >>> PartWholeGuide(model, above=partial(SetTransformers, width=48))

    The guide gives the model, and what else has no default. All settings are keywords.
    `model_class` is the class of models that it serves.
    """

    model_class: type = object


def note_changes(module: Remembering, attributes: Mapping[str, Any]) -> None:
    """Record changed attributes of a copy in its stored arguments and changes, in place.

    An attribute `_name` holds the argument `name` in a tuple of one, where that is a module which
    is no part of the object.
    """
    arguments, changes = dict(module.arguments), dict(module.changes)
    for name, value in attributes.items():
        outside = name.removeprefix("_")
        if name in arguments:
            arguments[name] = value
        elif outside in arguments and isinstance(value, tuple) and len(value) == 1:
            arguments[outside] = value[0]
        else:
            changes[name] = value
    module.__dict__.update(arguments=arguments, changes=changes)


def _remembering(init: C) -> C:
    """Wrap a constructor so that it stores its arguments; the outermost class writes last."""
    signature = inspect.signature(init)
    keywords = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), "")

    @wraps(init)
    def remember(self: Any, *args: Any, **options: Any) -> None:
        init(self, *args, **options)  # first, because it raises Python's error for wrong arguments
        bound = signature.bind(self, *args, **options)
        bound.apply_defaults()
        arguments = dict(list(bound.arguments.items())[1:])
        arguments |= arguments.pop(keywords, {})
        self.__dict__["arguments"] = arguments

    return remember  # type: ignore[return-value]
