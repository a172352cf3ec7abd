"""Records: results of an experiment or a benchmark, with everything needed to reproduce them.

A record is `results/<model>/<name>.json` with its figures next to it as PNG. Tables in the README,
the cards of trained weights and pages are generated from records, never typed.
"""

import io
import json
import math
import os
import platform
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from capsule_zoo._version import __version__

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FOLDER = Path("results")
RESULTS = Path(__file__).resolve().parent / "results"  # the zoo's own records
if not RESULTS.is_dir():  # a checkout keeps them next to this folder
    RESULTS = RESULTS.parent.parent / "results"
REPRODUCED = Path("runs/reproduced")  # default folder of new records
FIELDS = ("experiment", "command", "seed", "data", "versions", "machine", "seconds", "metrics")
_PACKAGES = ("torch", "pyro-ppl", "numpy", "arviz", "scikit-learn")


Number = tuple[float, float | None, int]  # value, standard error (None: exact), count
Numbers = dict[str, Number]
Tables = dict[str, dict[str, dict[str, str]]]  # title, quantity and variant: name of a metric
_SPELLINGS = {
    "elbo": "ELBO", "iwae": "IWAE", "ess": "ESS", "map": "MAP objective", "cnn": "CNN",
    "vae": "VAE", "rbm": "RBM", "kl": "KL", "ais": "(AIS)", "raise": "(reverse AIS)",
    "fgsm": "FGSM", "em": "EM", "vb": "VB", "mnist": "MNIST", "affnist": "affNIST",
    "cifar10": "CIFAR-10", "neg": "negative", "pareto": "Pareto",
    "autonormal": "AutoNormal", "autodelta": "AutoDelta", "capsnet": "CapsNet",
    "ari": "ARI", "iou": "IoU", "ppca": "PPCA", "frechet": "Fréchet distance",
    "aligned": "at the best rotation",
}  # fmt: skip


class Metric(TypedDict):
    """A headline number with its standard error and sample size.

    Attributes:
        value: a finite number.
        se: its standard error, or None for an exact number.
        n: number of images, repeats or runs that it is computed from.
    """

    value: float
    se: float | None
    n: int


@dataclass(frozen=True)
class Table:
    """Numbers by quantity and variant, shown as one grid: a row a variant, a column a quantity.

    Attributes:
        numbers: by quantity, then by variant; a variant may lack some of the quantities.
        names: pattern of the flat names of the numbers, or one pattern for each quantity.
    """

    numbers: Mapping[str, Mapping[str, Number]]
    names: str | Mapping[str, str] = "{quantity}_{variant}"

    def name(self, quantity: str, variant: str) -> str:
        """Return the flat name of the number of a quantity and a variant."""
        pattern = self.names if isinstance(self.names, str) else self.names[quantity]
        return pattern.format(quantity=quantity, variant=variant)

    def __iter__(self) -> Iterator[tuple[str, str, Number]]:
        """Yield the quantity, variant and value of every number."""
        for quantity, variants in self.numbers.items():
            for variant, number in variants.items():
                yield quantity, variant, number


Metrics = Mapping[str, Number | Mapping[str, Number] | Table]
"""The results of an experiment: a number by its name, numbers of several variants by the name of
their quantity (these quantities share one grid), or a `Table` by its title (a grid of its own)."""


def flatten(metrics: Metrics) -> tuple[dict[str, Metric], Tables]:
    """Flatten metrics and tables: return the metrics by flat name, and the layout of the tables.

    Raises:
        ValueError: two numbers have one flat name.
    """
    result: dict[str, Metric] = {}
    tables: Tables = {}

    def add(name: str, number: Number) -> str:
        if name in result:
            raise ValueError(f"two metrics are named {name!r}; rename a quantity or a variant")
        value, error, count = number
        result[name] = Metric(value=value, se=error, n=count)
        return name

    for key, item in metrics.items():
        if isinstance(item, tuple):
            add(key, item)
            continue
        table, title = (item, key) if isinstance(item, Table) else (Table({key: item}), "")
        grid = tables.setdefault(title, {})
        for quantity, variant, number in table:
            grid.setdefault(quantity, {})[variant] = add(table.name(quantity, variant), number)
    return result, tables


def write_record(
    experiment: str,
    metrics: Mapping[str, Metric],
    *,
    command: str,
    seed: int,
    data: str,
    seconds: float,
    figures: Mapping[str, "Figure"] = {},
    folder: str | Path = FOLDER,
    tables: Tables | None = None,
    **more: object,
) -> Path:
    """Write a record after its figures; no file is ever left half written.

    Args:
        experiment: `<model>/<name>`, which is also the path in `folder`.
        metrics: headline numbers by name (lower case, digits, underscores).
        command: the command that reproduces the numbers.
        seed, data, seconds: seed, data set and wall time of the run.
        figures: by name, saved as `<name>_<figure>.png`; one without a name as `<name>.png`.
        tables: the grids that the metrics are shown in, see `flatten`.
        more: further fields, which JSON must be able to hold. A field `owed`, written by hand, says
            what should be run again, or at greater length; the pages print it.

    Returns:
        The path of the record.

    Raises:
        ValueError: a name that is not of the form, a number that is not finite, a table that names
            an unknown metric, or a further field with the name of a required one.
    """
    check_experiment_name(experiment)
    for name, metric in metrics.items():
        _check_metric(name, metric)
    _check_tables(tables or {}, metrics)
    if taken := sorted({*FIELDS, "tables"} & more.keys()):
        raise ValueError(f"{', '.join(taken)} cannot be a further field of a record; rename it")
    if not (math.isfinite(seconds) and seconds >= 0):
        raise ValueError(f"seconds must be finite and 0 or more, not {seconds!r}")
    for name in filter(None, figures):
        _check_name("figure", name)
    record = {
        "experiment": experiment,
        "command": command,
        "seed": seed,
        "data": data,
        "versions": versions(),
        "machine": machine(),
        "seconds": round(seconds, 3),
        **more,
        "metrics": metrics,
        "tables": tables or {},
    }
    path = Path(folder) / f"{experiment}.json"
    for name, figure in figures.items():
        save_figure(figure, path.with_name(f"{path.stem}_{name}".rstrip("_") + ".png"))
    write_json(path, record)
    return path


def read_record(experiment: str, folder: str | Path = FOLDER) -> dict:
    """Read the record `<model>/<name>`; `tables` is empty if the record has no tables.

    Raises:
        ValueError: the file does not exist or is not a record.
    """
    check_experiment_name(experiment)
    path = Path(folder) / f"{experiment}.json"
    if not path.is_file():
        raise ValueError(
            f"there is no record {path}; write it with: capsule-zoo reproduce {experiment} --out "
            f"{folder}"
        )
    try:
        record = json.loads(path.read_text())
        if missing := [name for name in FIELDS if name not in record]:
            raise ValueError(f"it lacks {', '.join(missing)}")
        for name, metric in record["metrics"].items():
            _check_metric(name, metric)
        _check_tables(record.setdefault("tables", {}), record["metrics"])
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a record: {error}") from error
    return record


def read_records(folder: str | Path) -> dict[str, dict]:
    """Read every record below a folder, by name.

    Raises:
        ValueError: there are none, or a file is not a record.
    """
    paths = Path(folder).glob("*/*.json")
    names = sorted(path.relative_to(folder).with_suffix("") for path in paths)
    if not names:
        raise ValueError(
            f"there are no records in {folder}; leave --results out for the zoo's own, name "
            "another folder, or make one: capsule-zoo reproduce"
        )
    return {name.as_posix(): read_record(name.as_posix(), folder) for name in names}


def figures_of(experiment: str, folder: str | Path = FOLDER) -> list[Path]:
    """Return the files of a record's figures, the figure without a name first."""
    stem = Path(folder) / experiment
    plain = stem.with_name(f"{stem.name}.png")
    return [*([plain] if plain.is_file() else []), *sorted(stem.parent.glob(f"{stem.name}_*.png"))]


def check_experiment_name(name: str) -> None:
    """Raise ValueError unless `name` has the form `<model>/<name>` in lower case."""
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*/[a-z0-9]+([-_][a-z0-9]+)*", name):
        raise ValueError(
            f"an experiment is named <model>/<name>, in lower case with hyphens, not {name!r}"
        )


def versions() -> dict[str, str]:
    """Return the versions of the zoo, Python and the packages that may affect numbers."""
    result = {"capsule-zoo": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            result[package] = version(package)
        except PackageNotFoundError:
            continue
    return result


def machine() -> str:
    """Describe this machine: the cores that the process may use, memory, accelerators."""
    import torch

    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    text = f"{cores} core{'s' if cores > 1 else ''}"
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not available everywhere
        return text
    accelerators = map(torch.cuda.get_device_name, range(torch.cuda.device_count()))
    return ", ".join([f"{text}, {memory / 2**30:.0f} GiB memory", *accelerators])


def save_figure(figure: "Figure", path: str | Path) -> None:
    """Write a figure as a PNG file and close it; see `with_few_colors`."""
    import matplotlib.pyplot as plt

    from capsule_zoo.data.files import write_whole

    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    write_whole(path, with_few_colors(buffer.getvalue()))
    plt.close(figure)


def with_few_colors(png: bytes) -> bytes:
    """Return a PNG file reduced to 256 colors, a third of its size, if it looks alike.

    A picture of up to 256 colors keeps every pixel. With more colors, as in photographs, the PNG is
    unchanged if a pixel would differ by more than 12/255. A transparent PNG is unchanged, too.
    """
    import numpy as np
    from PIL import Image, ImageChops

    original = Image.open(io.BytesIO(png))
    whole = original.convert("RGB")
    palette_image = whole.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    apart = np.asarray(ImageChops.difference(whole, palette_image.convert("RGB")))
    if apart.max() > 12 or np.asarray(original.convert("RGBA"))[..., 3].min() < 255:
        return png
    buffer = io.BytesIO()
    palette_image.save(buffer, "PNG", optimize=True, dpi=original.info.get("dpi"))
    return buffer.getvalue()


def plain(value: Any) -> Any:
    """Convert a value to JSON-compatible types; numbers that are not finite become None."""
    value = vars(value) if is_dataclass(value) and not isinstance(value, type) else value
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_json(path: str | Path, content: dict) -> None:
    """Write a JSON file; raise ValueError for a number that is not finite."""
    from capsule_zoo.data.files import write_whole

    write_whole(path, (json.dumps(content, indent=2, allow_nan=False) + "\n").encode())


def _check_name(kind: str, name: str) -> None:
    if not re.fullmatch(r"[a-z0-9]+(_[a-z0-9]+)*", name):
        raise ValueError(f"a {kind} is named in lower case with underscores, not {name!r}")


def _check_metric(name: str, metric: Metric) -> None:
    _check_name("metric", name)
    if set(metric) != {"value", "se", "n"}:
        raise ValueError(f"metric {name} needs value, se and n, not {sorted(metric)}")
    value, error, count = metric["value"], metric["se"], metric["n"]
    if not _is_finite(value):
        raise ValueError(f"the value of metric {name} must be a finite number, not {value!r}")
    if error is not None and not (_is_finite(error) and error >= 0):
        raise ValueError(f"the se of metric {name} must be None or 0 or more, not {error!r}")
    if not (isinstance(count, int) and count >= 1):
        raise ValueError(f"the n of metric {name} must be a whole number above 0, not {count!r}")


def _check_tables(tables: Tables, metrics: Mapping[str, Metric]) -> None:
    named = [name for grid in tables.values() for row in grid.values() for name in row.values()]
    if unknown := sorted(set(named) - set(metrics)):
        raise ValueError(f"a table names metrics that do not exist: {', '.join(unknown)}")
    if len(named) > len(set(named)):
        raise ValueError("a metric is in two cells of its tables; each may be in one")


def _is_finite(number: object) -> bool:
    return (
        isinstance(number, (int, float)) and not isinstance(number, bool) and math.isfinite(number)
    )


def metric_title(name: str) -> str:
    """Return a metric's name for readers: `iwae_100_low_rank` as "IWAE-100 low rank"."""
    if name == "draw":  # the model
        return "DRAW"
    name = re.sub(r"(?<![^_])0_?(\d+)(?![^_])", r"0.\1", name)  # a decimal
    parts = re.sub(r"(?<=iwae)_(?=\d)", "-", name).split("_")
    return " ".join(re.sub(r"^[a-z0-9]+", lambda m: _SPELLINGS.get(m[0], m[0]), w) for w in parts)
