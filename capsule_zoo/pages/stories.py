"""The story of a model, taken from its module's docstring, so that only one text exists.

The docstring of every model module has one structure: a line with the name and the subject,
the story, the generative process in pseudo-code, further text, and the references. Its text is
Markdown, in which indented lines are code.
"""

import inspect
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Story:
    """The parts of a model module's docstring, in Markdown.

    Attributes:
        title, subtitle: name and subject of the model.
        opening: the text up to and including the first pseudo-code (generative process or energy).
        more: the text that follows.
        references: the references as one paragraph.
    """

    title: str
    subtitle: str
    opening: str
    more: str
    references: str


def read_story(docstring: str | None) -> Story:
    """Split the docstring of a model's module into its parts."""
    first, _, rest = inspect.cleandoc(docstring or "").partition("\n")
    title, _, subtitle = first.partition(": ")
    body, _, references = rest.partition("\nReferences:\n")
    body = body.replace("\nStory. ", "\n", 1).strip("\n")
    code = re.search(r"(?:^ {4}.*\n*)+", body, re.MULTILINE)
    end = code.end() if code else len(body)
    return Story(
        title.rstrip("."),
        subtitle[:1].upper() + subtitle[1:],
        body[:end].rstrip(),
        body[end:],
        " ".join(references.split()),
    )


def first_line(docstring: str | None) -> str:
    """Return the first line of the docstring of a function or class."""
    return inspect.cleandoc(docstring or "").partition("\n")[0]


def remainder(docstring: str | None) -> str:
    """Return a docstring's text after the first line, without guides, arguments and errors."""
    _, _, rest = inspect.cleandoc(docstring or "").partition("\n")
    sections = r"^(?:Args|Attributes|Guides|Returns|Raises):$"
    return re.split(sections, rest, flags=re.MULTILINE)[0].strip("\n")
