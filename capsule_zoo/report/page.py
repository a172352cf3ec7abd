"""The report page, rendered from the gallery with the template `page.html`."""

import re
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markdown_it import MarkdownIt
from markupsafe import Markup

from capsule_zoo._version import __version__
from capsule_zoo.data.files import write_whole
from capsule_zoo.discovery import history
from capsule_zoo.report.gallery import Gallery, gather
from capsule_zoo.report.published import lines

_MARKDOWN = MarkdownIt("commonmark").enable("table")
_CHANGES = {  # of its HTML: tables scroll and can be sorted, and cells have the values of numbers
    "<table>": '<div class="scroll"><table class="sortable">',
    "</table>": "</table></div>",
    r"<tr>\n<td>(.*?)</td>": r'<tr>\n<th scope="row">\1</th>',
    ' style="text-align:right"': ' class="number"',
    "<td([^>]*)><data ([^>]*)>(.*?)</data></td>": r"<td\1 \2>\3</td>",
    "<pre>": '<pre tabindex="0">',
}


def write_page(path: str | Path, folder: str | Path) -> Path:
    """Write the report on the records in a folder, whole or not at all.

    Raises:
        ValueError: the folder has no records, or a file that is not a record.
    """
    path = Path(path)
    write_whole(path, render(gather(Path(folder).resolve())).encode())
    return path


def render(gallery: Gallery) -> str:
    """Return the page as HTML."""
    environment = Environment(
        loader=PackageLoader("capsule_zoo.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"html": html, "words": words, "history": history, "lines": lines}
    return environment.get_template("page.html").render(zoo=gallery, version=__version__)


def html(text: str) -> Markup:
    """Return Markdown as HTML, with arXiv numbers as links."""
    text = re.sub(r"arXiv (\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", text)
    found = _MARKDOWN.render(text)
    for old, new in _CHANGES.items():
        found = re.sub(old, new, found)
    return Markup(found)


def words(text: str) -> Markup:
    """Return a line of Markdown as HTML without a paragraph around it."""
    return Markup(_MARKDOWN.renderInline(text))
