"""Tables in Markdown files, filled in from the records: `python -m capsule_zoo.readme`.

A block between the comments `<!-- record: part-whole/digits -->` and `<!-- end -->` is replaced by
the table of that record's metrics, so that no number is typed by hand. Shell patterns after the
name choose among them: `<!-- record: part-whole/guides elbo_* iwae_* -->`.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from pathlib import Path

from capsule_zoo.inference.checkpoint import write_whole
from capsule_zoo.records import FOLDER, read_record

_BLOCK = re.compile(
    r"(<!-- record: (?P<name>\S+)(?P<chosen>[^>]*) -->\n).*?(?P<end><!-- end -->)", flags=re.DOTALL
)


def fill(text: str, folder: str | Path = FOLDER) -> str:
    """The text with every block replaced by the table of its record.

    Raises:
        ValueError: a block names a record, or a metric, that is not there.
    """
    return _BLOCK.sub(lambda m: m[1] + _filled(m, folder) + m["end"], text)


def _filled(block: re.Match[str], folder: str | Path) -> str:
    record, patterns = read_record(block["name"], folder), block["chosen"].split()
    for pattern in patterns:
        if not fnmatch.filter(record["metrics"], pattern):
            raise ValueError(f"the record {block['name']!r} has no metric that matches {pattern!r}")
    return table(record, patterns or ["*"])


def table(record: dict, patterns: Sequence[str] = ("*",)) -> str:
    """The metrics that match a pattern as a Markdown table, the command that makes them below."""
    rows = ["| metric | value | standard error | n |", "|---|---|---|---|"]
    for name, metric in record["metrics"].items():
        if not any(fnmatch.fnmatch(name, pattern) for pattern in patterns):
            continue
        error = "" if metric["se"] is None else _number(metric["se"])
        rows.append(f"| {name} | {_number(metric['value'])} | {error} | {metric['n']} |")
    minutes = record["seconds"] / 60
    made = f"`{record['command']}` on {record['data']}, {minutes:.1f} minutes, {record['machine']}."
    return "\n".join([*rows, "", made, ""])


def _number(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 10 else f"{value:.1f}"


def main(path: str | Path = "README.md") -> None:
    """Fill in the README of the checkout that is the current folder."""
    file = Path(path)
    write_whole(file, fill(file.read_text()).encode())


if __name__ == "__main__":
    main()
