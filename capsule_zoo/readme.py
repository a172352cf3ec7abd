"""Tables in Markdown files, filled in from the records: `python -m capsule_zoo.readme`.

A block between the comments `<!-- record: part-whole/digits -->` and `<!-- end -->` is replaced by
the table of that record's metrics, so that no number is typed by hand.
"""

from __future__ import annotations

import re
from pathlib import Path

from capsule_zoo.inference.checkpoint import write_whole
from capsule_zoo.records import FOLDER, read_record

_BLOCK = re.compile(r"(<!-- record: (?P<name>\S+) -->\n).*?(<!-- end -->)", flags=re.DOTALL)


def fill(text: str, folder: str | Path = FOLDER) -> str:
    """The text with every block replaced by the table of its record.

    Raises:
        ValueError: a block names a record that is not there.
    """
    return _BLOCK.sub(lambda m: m[1] + table(read_record(m["name"], folder)) + m[3], text)


def table(record: dict) -> str:
    """A record as a Markdown table, with the command that makes it below."""
    rows = ["| metric | value | standard error | n |", "|---|---|---|---|"]
    for name, metric in record["metrics"].items():
        error = "exact" if metric["se"] is None else _number(metric["se"])
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
