"""The zoo's docstrings are translated into reStructuredText for Sphinx.

They are plain text with Markdown's habits: an indented block after a blank line is code, and a
name in single backticks is code, or a link if it is a public name of the zoo.
"""

import ast
import re
from contextlib import suppress
from functools import cache
from importlib import import_module
from textwrap import dedent
from typing import get_type_hints

import pages
from pygments.lexer import RegexLexer
from pygments.token import Comment, Keyword, Name, Operator, String, Text

_PROSE = re.compile(
    r"``.*?``|:`[^`]*`|\*\w+\*"  # is reStructuredText already: stays
    r"|`(?P<code>[^`]*)`|(?P<mark>[*|]|_(?!\w))"
)
PACKAGES = ("capsule_zoo", *(f"capsule_zoo.{p}" for p in ("models", "guides", "inference", "data")))


class StoryLexer(RegexLexer):
    """A lexer for the pseudo-code of a story: distributions, the names drawn from them, shapes."""

    name = "Generative story"
    aliases = ["story"]
    tokens = {
        "root": [
            (r"#.*$", Comment.Single),
            (r'"[^"\n]*"', String),
            (r"\b(for|factor|sum|over|where|with)\b", Keyword),
            (r"\b[A-Z]\w+(?=\()", Name.Class),
            (r"~|<-", Operator.Word),
            (r"\w+|\s+|.", Text),
        ]
    }


@cache
def public_names() -> dict[str, str]:
    """Return the place where each public name is documented, by its short and its full name."""
    full = [f"{p}.{name}" for p in PACKAGES for name in import_module(p).__all__]
    return {key: name for name in full for key in (name, name.rpartition(".")[2])}


def translate(
    app, object_type: str, name: str, thing: object, options: object, lines: list[str]
) -> None:
    """Rewrite a docstring's lines in place, before its Google sections are read."""
    lines[:] = to_restructured_text(lines)


def to_restructured_text(lines: list[str]) -> list[str]:
    """Return the lines with indented blocks as code and public names in backticks as links."""
    result, at = [], 0
    while at < len(lines):
        end = _code_ends(lines, at)
        if end > at:
            code = dedent("\n".join(lines[at:end])).rstrip().split("\n")
            margin = " " * _indent(lines[_text_before(lines, at)])
            result += [f"{margin}.. code-block:: {_language(code)}", ""]
            result += [f"{margin}   {line}".rstrip() for line in code] + [""]
            at = end
        else:
            result.append(
                lines[at] if lines[at].lstrip().startswith(">>>") else _link_names(lines[at])
            )
            at += 1
    return result


def _code_ends(lines: list[str], at: int) -> int:
    """Return the line where code that starts at a line ends; the line itself if none starts."""
    before = _text_before(lines, at)
    if not lines[at].strip() or before in (None, at - 1) or lines[before].endswith("::"):
        return at
    end, margin = at, _indent(lines[before])
    while end < len(lines) and (not lines[end].strip() or _indent(lines[end]) > margin):
        end += 1
    return end


def _text_before(lines: list[str], at: int) -> int | None:
    return next((i for i in range(at - 1, -1, -1) if lines[i].strip()), None)


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _language(code: list[str]) -> str:
    try:
        tree = ast.parse("\n".join(code))
    except SyntaxError:
        return "story"
    tells = (ast.FunctionDef, ast.ClassDef, ast.Attribute)
    return "python" if any(isinstance(node, tells) for node in ast.walk(tree)) else "story"


def _link_names(line: str) -> str:
    """Return a line of prose with public names as links and all other markup escaped."""

    def replace_match(match: re.Match[str]) -> str:
        if match["mark"]:
            return "\\" + match["mark"]
        name = (match["code"] or "").removesuffix("()")
        if name in pages.find_documented_modules():
            return f":py:obj:`{name}`"
        return f":py:obj:`~{public_names()[name]}`" if name in public_names() else match[0]

    return _PROSE.sub(replace_match, line)


def skip_tuple_fields(app, object_type: str, name: str, thing: object, skip: bool, options: object):
    """Skip the fields of a named tuple ("Alias for field number 0"): their class documents them."""
    return True if type(thing).__name__ == "_tuplegetter" else None


def resolve_hints(app, thing: object, bound_method: bool) -> None:
    """Replace the type hints of a constructor by classes, because a bare name may fit several."""
    with suppress(NameError, TypeError, AttributeError):
        thing.__annotations__.update(get_type_hints(thing))
