"""Tables in Markdown files, filled in from the records: `python -m capsule_zoo.report.markdown`.

The pages are the README, the page of the benchmarks, and the results page of each model.

A block between the comments `<!-- record: part-whole/digits -->` and `<!-- end -->` is replaced by
the table of that record's metrics, so that no number is typed by hand. Shell patterns after the
name choose among them: `<!-- record: part-whole/guides elbo_* iwae_* -->`. A block that begins with
`<!-- ratios: benchmarks -->` becomes one table of all records of that folder that hold ratios.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from pathlib import Path

from capsule_zoo.data.files import write_whole
from capsule_zoo.records import FOLDER, read_record

_BLOCK = re.compile(
    r"(<!-- (?P<kind>record|ratios): (?P<name>\S+)(?P<chosen>[^>]*) -->\n).*?(?P<end><!-- end -->)",
    flags=re.DOTALL,
)
_RATIO = "ratio_"
_PAGES = ("README.md", "benchmarks/README.md", "results/*/README.md")


def fill(text: str, folder: str | Path = FOLDER) -> str:
    """Return the text with every block replaced by the table of its record.

    Raises:
        ValueError: a block names a record or a metric that does not exist.
    """
    return _BLOCK.sub(lambda m: m[1] + _filled(m, folder) + m["end"], text)


def _filled(block: re.Match[str], folder: str | Path) -> str:
    if block["kind"] == "ratios":
        return ratios(block["name"], folder)
    record, patterns = read_record(block["name"], folder), block["chosen"].split()
    for pattern in patterns:
        if not fnmatch.filter(record["metrics"], pattern):
            raise ValueError(f"the record {block['name']!r} has no metric that matches {pattern!r}")
    return table(record, patterns or ["*"])


def table(record: dict, patterns: Sequence[str] = ("*",)) -> str:
    """Return the metrics that match a pattern as a Markdown table, with their command below."""
    rows = ["| metric | value | standard error | n |", "|---|---|---|---|"]
    for name, metric in record["metrics"].items():
        if not any(fnmatch.fnmatch(name, pattern) for pattern in patterns):
            continue
        error = "" if metric["se"] is None else _number(metric["se"])
        rows.append(f"| {name} | {_number(metric['value'])} | {error} | {metric['n']} |")
    minutes = record["seconds"] / 60
    made = f"`{record['command']}` on {record['data']}, {minutes:.1f} minutes, {record['machine']}."
    return "\n".join([*rows, "", made, ""])


def ratios(model: str, folder: str | Path = FOLDER) -> str:
    """Return every `ratio_<peer>` of one folder's records as a table, with commands below."""
    rows = [
        "| benchmark | peer | its time over ours | standard error | its memory over ours | n |",
        "|---|---|---|---|---|---|",
    ]
    made = []
    for path in sorted((Path(folder) / model).glob("*.json")):
        record = read_record(f"{model}/{path.stem}", folder)
        metrics = record["metrics"]
        found = [name for name in metrics if name.startswith(_RATIO)]
        for name in found:
            time, memory = metrics[name], metrics.get(f"memory_{name}")
            size = "" if memory is None else f"{memory['value']:.2f}"
            error = "" if time["se"] is None else f"{time['se']:.2f}"
            peer = name.removeprefix(_RATIO)
            cells = path.stem, peer, f"{time['value']:.2f}", error, size, str(time["n"])
            rows.append(f"| {' | '.join(cells)} |")
        if found:
            made.append(f"- `{record['command']}`: {record['data']}. {record['machine']}.")
    return "\n".join([*rows, "", *made, ""])


def _number(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 10 else f"{value:.1f}"


def pages(root: str | Path = ".") -> list[Path]:
    """Return the Markdown files of a checkout that show records."""
    return [path for pattern in _PAGES for path in sorted(Path(root).glob(pattern))]


def main() -> None:
    """Fill in the pages of the checkout that is the current folder."""
    for page in pages():
        write_whole(page, fill(page.read_text()).encode())


if __name__ == "__main__":
    main()
