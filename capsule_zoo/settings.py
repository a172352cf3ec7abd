"""Settings of entries: dotted names of arguments of constructors, their types, and clear errors.

An entry's settings are the arguments of its model's constructor, its guide's as `guide.NAME` and
its objective's as `objective.NAME`. Where an argument is a dataclass of settings, such as
`PartWholeCapsules(painting=Painting())`, its fields are `painting.NAME`; where it is a class of
submodules, such as `PartWholeGuide(model, reader=PartReader)`, arguments of the class are
`reader.NAME`. Settings are listed in the signatures alone. The constructors check that numbers are
in range.

>>> configure(PartWholeCapsules, objects=8, **{"painting.template_size": 7})
PartWholeCapsules(objects=8, painting=Painting(template_size=7))

The last part of a name is enough where it is clear: `configure(PartWholeCapsules, template_size=7)`
makes an equal model. A mapping stands for several settings, and may choose another class by name:

>>> configure(MatrixCapsules, routing={"class": "VBRouting", "iterations": 3})
"""

import inspect
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from functools import partial
from numbers import Integral, Real
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

from capsule_zoo.data.registration import Settings, without_partials
from capsule_zoo.models.checks import unknown_name_message
from capsule_zoo.models.specification import CLASS, class_of, classes, is_submodule

IMAGE_SHAPE = (1, 28, 28)  # image shape for a model without a default
PARTS = ("guide", "guides", "objective")  # an entry's parts, other than the model, with settings
_REFERENCE = re.compile(r"(?:arguments? of|as for(?: every)?|see) `([\w-]+)`")
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True)
class Argument:
    """One argument of a constructor.

    Attributes:
        name: name of the argument.
        default: default value.
        hint: type annotation.
        description: its text in the docstring, or "".
        inner: the settings that the argument holds, by name, if it is a dataclass of settings, a
            class of submodules or a mapping.
    """

    name: str
    default: object
    hint: Any
    description: str = ""
    inner: "Mapping[str, Argument]" = field(default_factory=dict)

    @property
    def type(self) -> str:
        """The annotation as source text, such as `tuple[int, ...] | None`."""
        if isinstance(self.hint, type) and not get_args(self.hint):
            return self.hint.__name__
        return re.sub(r"\b(?:typing|collections\.abc|capsule_zoo(?:\.\w+)*)\.", "", str(self.hint))


def arguments_of(kind: Callable, leading: int = 0) -> dict[str, Argument]:
    """Return the arguments of a constructor or function that have a default, by name.

    Arguments of base classes follow where a constructor passes `**options` on. Fixed arguments of a
    `functools.partial` are the defaults. An `image_shape` without a default gets (1, 28, 28).

    Args:
        leading: number of leading arguments that are given by position, such as a guide's model.
    """
    if isinstance(kind, partial):
        fixed = kind.keywords
        schema = _arguments(kind.func, leading + len(kind.args), fixed)
        return {a.name: _with_default(a, fixed[a.name]) if a.name in fixed else a for a in schema}
    return {argument.name: argument for argument in _arguments(kind, leading, {})}


def _arguments(kind: Callable, leading: int, fixed: Mapping[str, Any]) -> Iterator[Argument]:
    """Yield the arguments with a default, of base classes too where `**options` pass them on."""
    names: set[str] = set()
    for owner, constructor in _constructors(kind):
        hints, described = _hints(constructor), _descriptions(owner)
        parameters = list(inspect.signature(constructor).parameters.values())
        parameters = parameters[(owner is not constructor) + leading :]
        leading = 0  # of the base classes
        for parameter in parameters:
            name, default = parameter.name, parameter.default
            if name == "image_shape" and default is parameter.empty:
                default = IMAGE_SHAPE
            if parameter.kind not in _BY_NAME or name in names:
                continue
            names.add(name)
            if default is not parameter.empty or name in fixed:
                description = _follow(described.get(name, ""), name, owner.__module__)
                yield Argument(name, default, hints.get(name, Any), description, _inner(default))
        rest = next((p.name for p in parameters if p.kind is p.VAR_KEYWORD), None)
        if rest is None:
            return
        if reference := _REFERENCE.match(described.get(rest, "")):  # arguments of `Scenes`
            other = vars(sys.modules[owner.__module__])[reference[1]]
            yield from (
                argument for argument in _arguments(other, 0, {}) if argument.name not in names
            )
            return


def _constructors(kind: Callable) -> Iterator[tuple[Any, Callable]]:
    """Yield each class with its own constructor; for a function, the function twice."""
    if not isinstance(kind, type):
        yield kind, kind
        return
    for base in kind.__mro__:
        if "__init__" in vars(base) and base is not object:
            yield base, vars(base)["__init__"]


def _with_default(argument: Argument, default: object) -> Argument:
    return replace(argument, default=default, inner=_inner(default))


def _inner(default: object) -> dict[str, Argument]:
    """Return the settings inside a default value, with the values as defaults."""
    if is_submodule(default):
        return arguments_of(cast(Any, default))
    if not _is_settings(default):
        return {}
    fields = arguments_of(type(default))
    return {
        name: _with_default(argument, getattr(default, name)) for name, argument in fields.items()
    }


def _is_settings(value: object) -> bool:
    return isinstance(value, Settings) and is_dataclass(value)


def configure(kind: Callable, *arguments: Any, **settings: Any) -> Any:
    """Make an object of a class from settings by name.

    Args:
        kind: the class, a function, or a partial of a class or function.
        arguments: leading arguments of its constructor.
        settings: further arguments; names may be dotted, see the top of this module.

    Raises:
        ValueError: an unknown setting (with the nearest ones), or a value of another type.
    """
    parameters = inspect.signature(kind).parameters.values()
    required = {p.name for p in parameters if p.default is p.empty and p.kind in _BY_NAME}
    required_values = {name: settings.pop(name) for name in required & settings.keys()}
    schema = arguments_of(kind, len(arguments))
    return kind(*arguments, **required_values, **values_of(settings, schema, name_of(kind)))


def name_of(kind: Callable) -> str:
    """Return the name of a class or function, also of a partial."""
    return without_partials(kind).__name__


def values_of(
    settings: Mapping[str, Any], schema: Mapping[str, Argument], owner: str
) -> dict[str, Any]:
    """Return the values of a constructor's arguments for given settings, by name.

    Args:
        schema: the arguments that may be set.
        owner: name of the entry or class that takes the settings, for messages.
    """
    return {
        name: _value(schema[name], value, f"{owner}'s {name}", owner)
        for name, value in nest_settings(settings, schema, owner).items()
    }


def nest_settings(
    settings: Mapping[str, Any], schema: Mapping[str, Argument], owner: str
) -> dict[str, Any]:
    """Nest settings with dotted or shortened names into mappings, by the first part of the name."""
    held: dict[str, Any] = {}
    for key, value in settings.items():
        name, dot, rest = key.partition(".")
        if name not in schema:
            name, dot, rest = _owner_of(key, schema, owner), ".", key
        value = {rest: value} if dot else value
        if isinstance(value, Mapping) and isinstance(held.get(name), Mapping):
            value = {**held[name], **value}
        held[name] = value
    return held


def _owner_of(key: str, schema: Mapping[str, Argument], owner: str) -> str:
    """Return the name of the model's argument that holds the setting `key`."""
    last = key.partition(".")[0]
    every = [name for name, argument in schema.items() if _holds(argument, last)]
    holders = [name for name in every if name not in PARTS]
    if len(holders) == 1:
        return holders[0]
    if holders:
        raise ValueError(
            f"{key!r} is a setting of several arguments of {owner}; say which: "
            f"{' or '.join(f'{name}.{key}' for name in holders)}"
        )
    if every:
        raise ValueError(
            f"{key!r} is not a setting of {owner} itself but of its {every[0]}; give "
            f"{every[0]}.{key}, in Python {every[0]}={{{key!r}: ...}}"
        )
    raise ValueError(unknown_name_message(f"setting of {owner}", key, list(schema)))


def _holds(argument: Argument, name: str) -> bool:
    return name in argument.inner or any(_holds(child, name) for child in argument.inner.values())


def _value(argument: Argument, value: Any, owner: str, outer: str) -> Any:
    """Check and convert an argument's value; a mapping or a class's name becomes its settings."""
    default = argument.default
    if isinstance(value, list):
        value = as_tuple(value)
    if isinstance(value, str) and _takes_settings(argument) and value in classes():
        value = {CLASS: value}
    if isinstance(value, Mapping) and CLASS in value:
        kind = class_of(value[CLASS])
        value = {k: item for k, item in value.items() if k != CLASS}
        if is_submodule(kind):
            value = partial(kind, **values_of(value, arguments_of(kind), kind.__name__))
        else:
            value = configure(kind, **value)
    elif isinstance(value, Mapping) and argument.inner and not isinstance(default, Mapping):
        change = partial if is_submodule(default) else replace
        value = change(cast(Any, default), **values_of(value, argument.inner, owner))
    elif isinstance(value, Mapping) and argument.inner:
        values_of(value, argument.inner, owner)  # checked here, used when the part is made
    if not fits(value, argument.hint):
        note = "" if default is None or argument.inner else f"; its default is {default!r}"
        raise ValueError(
            f"{argument.name} of {outer} must be {describe_hint(argument.hint)}, not "
            f"{value!r}{note}"
        )
    return value


def _takes_settings(argument: Argument) -> bool:
    """Return whether an argument is a dataclass of settings, by its default or its type."""
    hints = get_args(argument.hint) or (argument.hint,)
    return bool(argument.inner) or any(
        isinstance(hint, type) and issubclass(hint, Settings) for hint in hints
    )


def as_tuple(value: Any) -> Any:
    """Convert the lists of a JSON value to tuples, nested lists too."""
    return tuple(map(as_tuple, value)) if isinstance(value, list) else value


def flat(settings: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Flatten nested mappings into one mapping with dotted names."""
    merged: dict[str, Any] = {}
    for name, value in settings.items():
        inner = isinstance(value, Mapping) and value
        merged |= flat(value, f"{before}{name}.") if inner else {f"{before}{name}": value}
    return merged


def flat_arguments(schema: Mapping[str, Argument], before: str = "") -> dict[str, Argument]:
    """Return the innermost arguments by dotted name."""
    merged: dict[str, Argument] = {}
    for name, argument in schema.items():
        if argument.inner:
            merged |= flat_arguments(argument.inner, f"{before}{name}.")
        else:
            merged[f"{before}{name}"] = argument
    return merged


def fits(value: object, hint: Any) -> bool:
    """Return whether a value fits an annotation; a list may stand for a tuple."""
    if hint is Any or hint is inspect.Parameter.empty:
        return True
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(fits(value, annotation) for annotation in inner)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            return False
        annotation = inner[:1] * len(value) if inner[-1] is Ellipsis else inner
        return len(value) == len(annotation) and all(map(fits, value, annotation))
    if hint in (int, float):
        number = Integral if hint is int else Real
        return isinstance(value, number) and not isinstance(value, bool)
    if made := _submodule_of(hint):
        return is_submodule(value) and issubclass(without_partials(value), made)
    kind = origin or hint
    return not isinstance(kind, type) or isinstance(value, kind)


def _submodule_of(hint: Any) -> type | None:
    """Return the class S from an annotation `Callable[..., S]` of a submodule's class."""
    made = get_args(hint)[-1:] if get_origin(hint) is Callable else ()
    return made[0] if made and is_submodule(made[0]) else None


def describe_hint(hint: Any) -> str:
    """Describe the values that an annotation allows."""
    names = {int: "a whole number", float: "a number", str: "a word", bool: "True or False"}
    if made := _submodule_of(hint):
        return f"a class such as {made.__name__}, or its settings"
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(map(describe_hint, inner))
    if origin is tuple:
        count = "several" if inner[-1] is Ellipsis else str(len(inner))
        return f"{count} {_plural(describe_hint(inner[0]))} such as {_example(inner)}"
    if hint is types.NoneType:
        return "None"
    if (origin or hint) in (Mapping, dict):
        return "a mapping from names to values"
    return names.get(hint, getattr(hint, "__name__", str(hint)))


def _plural(noun: str) -> str:
    if noun.startswith(("a ", "an ")):
        return noun.partition(" ")[2] + "s"
    return f"times {noun}"


def _example(inner: tuple[Any, ...]) -> str:
    examples = {int: 8, float: 0.5, str: "x"}
    count = 2 if inner[-1] is Ellipsis else len(inner)
    values = [examples.get(inner[0], (8, 8))] * count
    return str(tuple(values))


def words_of(docstring: str | None, section: str = "Args") -> dict[str, str]:
    """Return the description of each name in a section of a docstring, such as `Args:`."""
    _, _, section = inspect.cleandoc(docstring or "").partition(f"\n{section}:\n")
    descriptions: dict[str, str] = {}
    names: list[str] = []
    for line in section.splitlines():
        if line and not line.startswith(" "):
            break  # the next section
        if head := re.match(r" {4}([\w-]+(?:, [\w-]+)*): (.*)", line):
            names = head[1].split(", ")
            descriptions |= dict.fromkeys(names, head[2])
        elif names and line.strip():
            descriptions |= dict.fromkeys(names, f"{descriptions[names[0]]} {line.strip()}")
    return descriptions


def _descriptions(kind: type | Callable) -> dict[str, str]:
    """Return the descriptions of arguments; for a dataclass also the fields of its bases."""
    descriptions: dict[str, str] = {}
    for described in reversed(getattr(kind, "__mro__", (kind,))):
        descriptions |= words_of(described.__doc__, "Attributes") if is_dataclass(described) else {}
        descriptions |= words_of(described.__doc__)
    return descriptions


def _follow(description: str, name: str, module: str) -> str:
    """Follow a description that refers to another class or function; else return it unchanged."""
    reference = _REFERENCE.match(description)
    kind = vars(sys.modules[module]).get(reference[1].replace("-", "_")) if reference else None
    if kind is None or name not in (described := _descriptions(kind)):
        return description
    return _follow(described[name], name, kind.__module__)


def _hints(function: Callable) -> dict[str, Any]:
    """Return resolved annotations; none if one exists for type checkers only."""
    try:
        return get_type_hints(function)
    except NameError:
        return {}
