"""Sizes of entries: their names and types, and clear errors for wrong sizes.

A factory has sizes in its signature, and passes further ones (`**sizes`, or a mapping such as
`guide`) to constructors. Its registration names these constructors:

    @register("vae", takes={"sizes": Takes(VariationalAutoencoder)})
    def vae(image_shape: tuple[int, int, int] = (1, 28, 28), **sizes: Any) -> Entry: ...

All sizes are read from the signatures and their annotations, so there is only one list of them. The
constructors check that numbers are in range. Where an argument is a frozen dataclass with defaults,
such as `PartWholeCapsules(painting=Painting())`, its fields are sizes, and `sized` puts them in. A
routing is one size.
"""

import inspect
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from numbers import Integral, Real
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from capsule_zoo.models.checks import unknown
from capsule_zoo.models.routing.parent_law import Routing

_REFERRED = re.compile(r"(?:arguments? of|as for(?: every)?|see) `([\w-]+)`")
T = TypeVar("T")
_OWN = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True)
class Takes:
    """The constructor to which a factory passes further sizes.

    Attributes:
        kind: the class; if its constructor has `**options`, the base class's arguments follow.
        without: arguments that the factory sets itself, in addition to those without a default.
        defaults: values of the factory that replace the constructor's own defaults.
        options: False leaves out the base class's arguments.
    """

    kind: type
    without: tuple[str, ...] = ()
    defaults: Mapping[str, object] = field(default_factory=dict)
    options: bool = True


@dataclass(frozen=True)
class Size:
    """The description of one argument of `create`.

    Attributes:
        name: name of the argument.
        default: default value.
        hint: type annotation.
        what: description in the docstring, or "".
        inner: for a mapping, the sizes that it may hold, by name.
    """

    name: str
    default: object
    hint: Any
    what: str = ""
    inner: "Mapping[str, Size]" = field(default_factory=dict)

    @property
    def type(self) -> str:
        """The annotation as source text, such as `tuple[int, ...] | None`."""
        if isinstance(self.hint, type) and not get_args(self.hint):
            return self.hint.__name__
        return re.sub(r"\b(?:typing|collections\.abc)\.", "", str(self.hint))


def known_sizes(factory: Callable, takes: Mapping[str, Takes]) -> dict[str, Size]:
    """Return the sizes of a factory by name: its own, then the sizes that it passes on.

    Args:
        takes: by parameter of the factory, the constructor to which that parameter is passed.
    """
    hints, described = _hints(factory), _words_of_all(factory)
    own, further = dict[str, Size](), dict[str, Size]()
    for name, parameter in inspect.signature(factory).parameters.items():
        inner = constructor_sizes(takes[name]) if name in takes else {}
        if parameter.kind is parameter.VAR_KEYWORD:
            further = inner
        elif parameter.default is not parameter.empty:
            hint = hints.get(name, Any)
            what = _followed(described.get(name, ""), name, factory.__module__)
            own[name] = Size(name, parameter.default, hint, what, inner)
    for name in own.keys() & further.keys():
        if further[name].what:  # the factory's docstring refers to the constructor's
            own[name] = replace(own[name], what=further[name].what)
    return own | {name: size for name, size in further.items() if name not in own}


def sized(kind: type[T], *arguments: Any, **sizes: Any) -> T:
    """Return a new object of a class from sizes by name.

    >>> sized(PartWholeCapsules, objects=8, template_size=7)
    PartWholeCapsules(objects=8, painting=Painting(template_size=7))

    Args:
        arguments, sizes: of its constructor; sizes may be fields of arguments that are dataclasses.
    """
    for parameter in inspect.signature(kind).parameters.values():
        default = parameter.default
        if _holds_sizes(default):
            own = {f.name: sizes.pop(f.name) for f in fields(default) if f.name in sizes}
            if own:
                sizes[parameter.name] = replace(sizes.get(parameter.name, default), **own)
    return kind(*arguments, **sizes)


def is_open(factory: Callable, takes: Mapping[str, Takes]) -> bool:
    """Return True if a factory takes further sizes with unknown names."""
    parameters = inspect.signature(factory).parameters.values()
    return any(p.kind is p.VAR_KEYWORD and p.name not in takes for p in parameters)


def check_sizes(
    entry: str, given: Mapping[str, object], known: Mapping[str, Size], open_ended: bool = False
) -> None:
    """Raise ValueError unless every size is known and of its type.

    Args:
        entry: description of the entry that takes the sizes.
        open_ended: let unknown names pass.
    """
    for name, value in given.items():
        if name in known:
            _check_size(entry, known[name], value)
        elif not open_ended:
            raise ValueError(_unknown_size(entry, name, known))


def _check_size(entry: str, size: Size, value: object) -> None:
    if not fits(value, size.hint):
        default = "" if size.default is None or size.inner else f"; its default is {size.default!r}"
        raise ValueError(
            f"{size.name} of {entry} must be {in_words(size.hint)}, not {value!r}{default}"
        )
    if size.inner and isinstance(value, Mapping):
        check_sizes(f"{entry}'s {size.name}", value, size.inner)


def _unknown_size(entry: str, name: str, known: Mapping[str, Size]) -> str:
    for outer in known.values():
        if name in outer.inner:
            return (
                f"{name!r} is not a size of {entry} itself but one of its {outer.name}; "
                f"give {outer.name}={{{name!r}: ...}}"
            )
    return unknown(f"size of {entry}", name, list(known))


def fits(value: object, hint: Any) -> bool:
    """Return True if a value fits an annotation; a list may represent a tuple."""
    if hint is Any or hint is inspect.Parameter.empty:
        return True
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(fits(value, each) for each in inner)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            return False
        each = inner[:1] * len(value) if inner[-1] is Ellipsis else inner
        return len(value) == len(each) and all(map(fits, value, each))
    if hint in (int, float):
        number = Integral if hint is int else Real
        return isinstance(value, number) and not isinstance(value, bool)
    kind = origin or hint
    return not isinstance(kind, type) or isinstance(value, kind)


def in_words(hint: Any) -> str:
    """Return a description of the values that an annotation allows."""
    names = {int: "a whole number", float: "a number", str: "a word", bool: "True or False"}
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(map(in_words, inner))
    if origin is tuple:
        count = "several" if inner[-1] is Ellipsis else str(len(inner))
        return f"{count} {_plural(in_words(inner[0]))} such as {_example(inner)}"
    if hint is types.NoneType:
        return "None"
    if (origin or hint) in (Mapping, dict):
        return "a mapping from names to values"
    return names.get(hint, getattr(hint, "__name__", str(hint)))


def _plural(words: str) -> str:
    if words.startswith(("a ", "an ")):
        return words.partition(" ")[2] + "s"
    return f"times {words}"


def _example(inner: tuple[Any, ...]) -> str:
    examples = {int: 8, float: 0.5, str: "x"}
    count = 2 if inner[-1] is Ellipsis else len(inner)
    values = [examples.get(inner[0], (8, 8))] * count
    return str(tuple(values))


def words_of(docstring: str | None, section: str = "Args") -> dict[str, str]:
    """Return the description of each name in a section of a docstring, such as `Args:`."""
    _, _, section = inspect.cleandoc(docstring or "").partition(f"\n{section}:\n")
    found: dict[str, str] = {}
    names: list[str] = []
    for line in section.splitlines():
        if line and not line.startswith(" "):
            break  # the next section
        if head := re.match(r" {4}([\w-]+(?:, [\w-]+)*): (.*)", line):
            names = head[1].split(", ")
            found |= dict.fromkeys(names, head[2])
        elif names and line.strip():
            found |= dict.fromkeys(names, f"{found[names[0]]} {line.strip()}")
    return found


def _words_of_all(kind: type | Callable) -> dict[str, str]:
    """Return the descriptions of arguments; a dataclass has the fields of its bases."""
    words: dict[str, str] = {}
    for described in reversed(getattr(kind, "__mro__", (kind,))):
        words |= words_of(described.__doc__)
    return words


def _followed(what: str, name: str, module: str) -> str:
    """Return the words of the class or factory that a description refers to, or else itself."""
    referred = _REFERRED.match(what)
    known = vars(sys.modules[module])
    kind = known.get(referred[1].replace("-", "_")) if referred else None
    if kind is None or name not in (described := _words_of_all(kind)):
        return what
    return _followed(described[name], name, kind.__module__)


def constructor_sizes(takes: Takes) -> dict[str, Size]:
    """Return the sizes of a constructor by name: its arguments that have a default."""
    sizes: dict[str, Size] = {}
    for size in _arguments(takes.kind, takes.options):
        name = size.name
        if name not in (*sizes, *takes.without) and size.default is not inspect.Parameter.empty:
            sizes[name] = replace(size, default=takes.defaults.get(name, size.default))
    return sizes


def _holds_sizes(default: object) -> bool:
    """Return True for a frozen dataclass, whose fields are sizes; a routing is one size."""
    return is_dataclass(default) and not isinstance(default, type | Routing)


def _arguments(kind: type, options: bool = True) -> Iterator[Size]:
    """Yield the arguments of constructors, up to the first class without options."""
    for base in kind.__mro__:
        if "__init__" not in vars(base):
            continue
        constructor: Callable = vars(base)["__init__"]
        hints = _hints(constructor)
        described = _words_of_all(base)
        parameters = list(inspect.signature(constructor).parameters.values())[1:]  # not self
        for parameter in parameters:
            name, default = parameter.name, parameter.default
            if _holds_sizes(default):
                for inner in _arguments(type(default)):
                    yield replace(inner, default=getattr(default, inner.name))
            elif parameter.kind in _OWN:
                what = _followed(described.get(name, ""), name, base.__module__)
                yield Size(name, default, hints.get(name, Any), what)
        if not (options and any(p.kind is p.VAR_KEYWORD for p in parameters)):
            return


def _hints(function: Callable) -> dict[str, Any]:
    """Return resolved annotations, or none if one is known to type checkers alone."""
    try:
        return get_type_hints(function)
    except NameError:
        return {}
