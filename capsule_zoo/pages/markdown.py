"""Tables in Markdown files, filled in from the records: `python -m capsule_zoo.pages.markdown`.

The pages are the README, the pages on benchmarks, on serving and on the user's own pictures, and
the results of each model.

A block between the comments `<!-- record: part-whole/digits -->` and `<!-- end -->` is replaced by
the tables of that record's metrics, so that no number is typed by hand. Shell patterns after the
name choose among the metrics: `<!-- record: part-whole/guides elbo_* iwae_* -->`. A block that
begins with `<!-- ratios: benchmarks -->` becomes one table of all records of that folder that hold
ratios. In a line of text `<!-- value: part-whole/classify probe_parts --><!-- end -->` becomes one
number with its error, and

    <!-- verdict: part-whole/classify probe_parts higher than part-whole/classify probe_pixels -->
    <!-- verdict: matrix-capsules/at-length test_error_two_iterations lower than .0044 -->

become "better", "worse", "equal" or "undecided", with the difference in standard errors.
"""

import fnmatch
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from capsule_zoo.data.files import write_whole
from capsule_zoo.records import FOLDER, Metric, metric_title, read_record

_BLOCK = re.compile(
    r"(<!-- (?P<kind>record|ratios): (?P<name>\S+)(?P<patterns>[^>]*) -->\n)"
    r".*?(?P<end><!-- end -->)",
    flags=re.DOTALL,
)
_VALUE = re.compile(r"(<!-- value: (?P<name>\S+) (?P<metric>\S+) -->).*?(?P<end><!-- end -->)")
_VERDICT = re.compile(
    r"(<!-- verdict: (?P<name>\S+) (?P<metric>\S+) (?P<better>lower|higher) than "
    r"(?P<other>\S+(?: \S+)?) -->).*?(?P<end><!-- end -->)"
)
_PAGES = (
    *("README.md", "benchmarks/README.md", "docs/serving.md", "docs/your_own_pictures.md"),
    "results/*/README.md",
)


MOST_COLUMNS = 6  # a table with more columns than this, and than rows, is transposed


def fill(text: str, folder: str | Path = FOLDER) -> str:
    """Replace every block of a Markdown text by the table of its record.

    Raises:
        ValueError: a block names a record or a metric that does not exist.
    """
    text = _BLOCK.sub(lambda m: m[1] + _fill_block(m, folder) + m["end"], text)
    text = _VERDICT.sub(lambda m: m[1] + _verdict(m, folder) + m["end"], text)
    return _VALUE.sub(
        lambda m: m[1] + with_error(_metric(m["name"], m["metric"], folder)) + m["end"], text
    )


def _metric(name: str, metric: str, folder: str | Path) -> Metric:
    metrics = read_record(name, folder)["metrics"]
    if metric not in metrics:
        raise ValueError(f"the record {name!r} has no metric {metric!r}")
    return metrics[metric]


def _verdict(tag: re.Match[str], folder: str | Path) -> str:
    name, _, metric = tag["other"].partition(" ")
    number, _, error = name.partition("\N{PLUS-MINUS SIGN}")
    other = (
        _metric(name, metric, folder)
        if metric
        else Metric(value=float(number), se=float(error) if error else None, n=1)
    )
    return verdict(_metric(tag["name"], tag["metric"], folder), other, tag["better"] == "higher")


def verdict(ours: Metric, other: Metric, higher: bool) -> str:
    """Compare two numbers: "better", "worse", "equal" or "undecided", and by how many errors.

    A difference of less than two standard errors of both numbers is undecided, and so is a
    difference without a standard error. The verdict gives the difference in standard errors.

    Args:
        higher: True if higher numbers are better.
    """
    difference = ours["value"] - other["value"]
    if difference == 0:
        return "equal"
    errors = [metric["se"] for metric in (ours, other) if metric["se"]]
    if not errors:
        return "undecided (no standard error)"
    distance = abs(difference) / math.hypot(*errors)
    text = f"{distance:.1f}" if distance < 10 else f"{distance:,.0f}"
    word = "better" if (difference > 0) == higher else "worse"
    return f"{word if distance > 2 else 'undecided'} ({text} s.e.)"


def _fill_block(block: re.Match[str], folder: str | Path) -> str:
    if block["kind"] == "ratios":
        return ratios(block["name"], folder)
    record, patterns = read_record(block["name"], folder), block["patterns"].split()
    for pattern in patterns:
        if not fnmatch.filter(record["metrics"], pattern):
            raise ValueError(f"the record {block['name']!r} has no metric that matches {pattern!r}")
    return table(record, patterns or ["*"])


def table(record: dict, patterns: Sequence[str] = ("*",)) -> str:
    """Return the metrics that match a pattern as Markdown tables, with their command below."""
    metrics = record["metrics"]
    selected = [n for n in metrics if any(fnmatch.fnmatch(n, pattern) for pattern in patterns)]
    grids, singles = grids_of(record, selected)
    cells = {name: with_error(metric) for name, metric in metrics.items()}
    parts = []
    for grid in grids:
        keys = [[grid.names.get((row, column), "") for column in grid.columns] for row in grid.rows]
        lines = [[cells.get(key, "") for key in row] for row in keys]
        rows = [[metric_title(name), *line] for name, line in zip(grid.rows, lines, strict=True)]
        rows.append(["*n*", *(_count(metrics, names) for names in zip(*keys, strict=True))])
        name = re.fullmatch(r"[\w:-]+", grid.title)  # of an entry, or of data
        title = metric_title(re.sub("[:-]", "_", grid.title)) if name else grid.title
        rows = [[title, *map(metric_title, grid.columns)], *rows]
        if len(grid.columns) > max(MOST_COLUMNS, len(grid.rows)):
            rows = [list(column) for column in zip(*rows, strict=True)]
        parts.append(_markdown(rows[0], rows[1:]))
    if singles:
        rows = [[metric_title(n), cells[n], f"{metrics[n]['n']:,}"] for n in singles]
        parts.append(_markdown(["quantity", "value", "n"], rows))
    conditions = (
        record["data"],
        seeds(record),
        f"{record['seconds'] / 60:.1f} minutes",
        record["machine"],
    )
    owed = f" Owed: {record['owed']}." if "owed" in record else ""
    commit = f" at commit {record['commit']}" if "commit" in record else ""
    made = f"`{record['command']}`{commit} on {', '.join(conditions)}.{owed}"
    return "\n".join([*parts, made, ""])


def _count(metrics: Mapping[str, Metric], names: Iterable[str]) -> str:
    """Return how many images or runs metrics are from: one number, or smallest and largest."""
    counts = [metrics[name]["n"] for name in names if name]
    return " to ".join(f"{n:,}" for n in sorted({min(counts), max(counts)}))


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]], label_columns: int = 1) -> str:
    """Return a Markdown table: text columns first, then right-aligned columns of numbers."""
    marks = [*["---"] * label_columns, *["--:"] * (len(head) - label_columns)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, marks, *rows))


def ratios(model: str, folder: str | Path = FOLDER) -> str:
    """Return a folder's ratios to every peer as a Markdown table, with commands below."""
    names = sorted(f"{model}/{path.stem}" for path in (Path(folder) / model).glob("*.json"))
    records = [record for name in names if peers(record := read_record(name, folder))]
    made = [f"- `{r['command']}`: {r['data']}. {r['machine']}." for r in records]
    return "\n".join([speeds(records), *made, ""])


def speeds(records: Iterable[dict]) -> str:
    """Return a Markdown table of the ratios to every peer in records of benchmarks."""
    rows = [
        [
            record["experiment"].partition("/")[2],
            peer,
            f"{time['value']:.2f}",
            "" if time["se"] is None else f"{time['se']:.2f}",
            f"{memory['value']:.2f}" if memory else "",
            str(time["n"]),
        ]
        for record in records
        for peer, (time, memory) in peers(record).items()
    ]
    head = "benchmark", "peer", "its time over ours", "standard error", "its memory over ours", "n"
    return _markdown(head, rows, label_columns=2)


def peers(record: dict) -> dict[str, tuple[Metric, Metric | None]]:
    """Return each peer's time and memory (or None), divided by the zoo's."""
    metrics, speeds = record["metrics"], record["tables"].get("", {})
    sizes = speeds.get("memory_ratio", {})
    return {
        peer: (metrics[name], metrics[sizes[peer]] if peer in sizes else None)
        for peer, name in speeds.get("ratio", {}).items()
    }


def pages(root: str | Path = ".") -> list[Path]:
    """Return the Markdown files of a checkout that show records."""
    return [path for pattern in _PAGES for path in sorted(Path(root).glob(pattern))]


def main() -> None:
    """Fill in the pages of the checkout in the current folder."""
    for page in pages():
        write_whole(page, fill(page.read_text("utf-8")).encode())


def round_metric(value: float, se: float | None = None) -> tuple[str, str]:
    """Round a value and its error to two digits of the error, or a value alone to four digits.

    A value of a billion or more has three digits and an exponent.
    """
    if se:
        decimals = 1 - math.floor(math.log10(float(f"{se:.1e}")))
        texts = [f"{round(x, decimals):,.{max(decimals, 0)}f}" for x in (value, se)]
    elif abs(value) >= 1e9:
        texts = [f"{value:.2e}", ""]
    elif float(value).is_integer() or abs(value) >= 10_000:
        texts = [f"{value:,.0f}", ""]
    else:
        digits = 3 - math.floor(math.log10(float(f"{abs(value):.3e}")))
        texts = [f"{value:,.{max(0, digits)}f}", ""]
    return texts[0].replace("-", "\N{MINUS SIGN}"), texts[1]


def with_error(metric: Metric) -> str:
    """Format a number with its standard error, if known, after a plus-minus sign."""
    return " \N{PLUS-MINUS SIGN} ".join(filter(None, round_metric(metric["value"], metric["se"])))


def duration(seconds: float) -> str:
    """Format a wall time in a suitable unit."""
    for unit, length in (("hours", 3600), ("minutes", 60)):
        if seconds >= 1.5 * length:
            return f"{seconds / length:.{1 if seconds < 10 * length else 0}f} {unit}"
    return f"{seconds:.0f} seconds"


def seeds(record: dict) -> str:
    """Return the seeds of a record as text: "3 seeds", "one seed", or "seed 0" by default."""
    number = record.get("settings", {}).get("seeds")
    if number is None:
        return f"seed {record['seed']}"
    return "one seed" if number == 1 else f"{number} seeds"


class Grid(NamedTuple):
    """A table of metrics, by quantity and variant.

    Attributes:
        title: the title of the table, or "".
        columns, rows: the quantities and the variants.
        names: name of the metric in each cell that is present, by (row, column).
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    names: dict[tuple[str, str], str]


def grids_of(
    record: dict, metric_names: Collection[str] | None = None
) -> tuple[list[Grid], list[str]]:
    """Return the grids of a record, and the names of its metrics outside of the grids.

    Args:
        metric_names: names of the metrics to show; by default all of them. A row or column
            without any of them is left out.
    """
    rest = [name for name in record["metrics"] if metric_names is None or name in metric_names]
    grids = []
    for title, quantities in record["tables"].items():
        names = {
            (variant, quantity): name
            for quantity, variants in quantities.items()
            for variant, name in variants.items()
            if name in rest
        }
        rows, columns = (tuple(dict.fromkeys(key[side] for key in names)) for side in (0, 1))
        grids += [Grid(title, columns, rows, names)] * bool(names)
        rest = [name for name in rest if name not in names.values()]
    return grids, rest


if __name__ == "__main__":
    main()
