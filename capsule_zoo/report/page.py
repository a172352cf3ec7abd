"""The report page, rendered from the gallery with the template `page.html`."""

import re
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from capsule_zoo._version import __version__
from capsule_zoo.data.files import write_whole
from capsule_zoo.report.gallery import Gallery, gather
from capsule_zoo.report.markdown import duration, in_words, rounded, seeds


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
    environment.filters |= {
        "words": in_words,
        "rounded": rounded,
        "duration": duration,
        "seeds": seeds,
        "marked": marked,
        "linked": linked,
    }
    return environment.get_template("page.html").render(zoo=gallery, version=__version__)


def marked(text: str) -> Markup:
    """Return text in which everything between backticks is marked as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def linked(text: str) -> Markup:
    """Return references with arXiv numbers as links."""
    link = r'<a href="https://arxiv.org/abs/\1">arXiv \1</a>'
    return Markup(re.sub(r"arXiv (\d{4}\.\d{5})", link, str(marked(text))))
