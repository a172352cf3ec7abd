"""The story of a model, read from the docstring of its module so that only one text exists.

The docstring of every model module has the same structure: a line with the name and the subject,
the story, the generative process in pseudo-code, further text, and the references.
"""

import inspect
import re
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True)
class Block:
    """A paragraph, or lines of code with their indentation."""

    text: str
    is_code: bool


@dataclass(frozen=True)
class Story:
    """The parts of a model module's docstring.

    Attributes:
        title, subtitle: name and subject of the model.
        opening: blocks up to and including the first pseudo-code (generative process or energy).
        more: the blocks that follow.
        references: the references as one paragraph.
    """

    title: str
    subtitle: str
    opening: tuple[Block, ...]
    more: tuple[Block, ...]
    references: str


def read_story(docstring: str | None) -> Story:
    """Return the parts of a module's docstring."""
    first, _, rest = inspect.cleandoc(docstring or "").partition("\n")
    title, _, subtitle = first.partition(": ")
    body, _, references = rest.partition("\nReferences:\n")
    blocks = tuple(_blocks(body.replace("\nStory. ", "\n", 1)))
    codes = [i for i, block in enumerate(blocks) if block.is_code]
    end = codes[0] + 1 if codes else len(blocks)
    return Story(
        title.rstrip("."),
        subtitle[:1].upper() + subtitle[1:],
        blocks[:end],
        blocks[end:],
        " ".join(references.split()),
    )


def first_line(docstring: str | None) -> str:
    """Return the first line of the docstring of a function or class."""
    return inspect.cleandoc(docstring or "").partition("\n")[0]


def remainder(docstring: str | None) -> list[str]:
    """Return the paragraphs after the first line, without arguments and errors."""
    _, _, rest = inspect.cleandoc(docstring or "").partition("\n")
    text = re.split(r"^(?:Args|Returns|Raises):$", rest, flags=re.MULTILINE)[0]
    return [block.text for block in _blocks(text) if not block.is_code]


def _blocks(text: str) -> list[Block]:
    """Split text into paragraphs, separated by blank lines, and indented pieces of code."""
    found = []
    lines = text.strip("\n").splitlines()
    for is_code, group in groupby(_kinds(lines), key=lambda pair: pair[0]):
        part = "\n".join(line for _, line in group)
        if is_code:
            found.append(Block(inspect.cleandoc(f"\n{part}").strip("\n"), True))
        else:
            found += [Block(" ".join(p.split()), False) for p in part.split("\n\n") if p.strip()]
    return found


def _kinds(lines: list[str]) -> list[tuple[bool, str]]:
    """Mark each line as code or text; a blank line has the kind of the line before it."""
    kinds, is_code = [], False
    for line in lines:
        is_code = line.startswith("    ") if line.strip() else is_code
        kinds.append((is_code, line))
    return kinds
