"""Digits asked for where no training image was: CapsNets beside plain decoders (Potapov 2018).

Every image is shown as it is and asked for under a transformation; two classes, 4 and 9, are asked
for in a smaller range than the others, or all are. What counts is the error on test images of these
two, where they were asked for in training (`inside`) and where not (`outside`).

All decoders share the encoder and the length of the code. Capsules move as the article has it, and
linearly with the request, which is ours. Errors are mean squared errors of pixels
in [-1, 1], as the article has them; `ratio` is outside over inside, and `to_blank` divides by the
error of a black image at the same requests, for a curve can be flat because it is bad everywhere.
Values are means over the seeds, each with its standard error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyro
import torch
import torch.nn.functional as F
from torch import Tensor

from capsule_zoo.data import Dataset, Requests, Rotations, Shifts, load_dataset
from capsule_zoo.experiments import Options, Result, experiment
from capsule_zoo.experiments.findings import by_quantity, mean_and_error, median_and_error
from capsule_zoo.experiments.training import side_by_side, train
from capsule_zoo.figures.curves import error_curves
from capsule_zoo.figures.grids import image_rows
from capsule_zoo.inference.posterior.transformations import Requested, infer_transformation
from capsule_zoo.records import Number, Numbers, Table
from capsule_zoo.registry import Entry, create, load, save

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Line = tuple[tuple[float, ...], ...]

RARE = (4, 9)  # the classes that are asked for in a range of their own
SEEDS = 3
STEPS = 3000  # of every run
IMAGES = 300  # test images of each rare class
INFERRED = 60  # images whose transformation is inferred
DIGIT = 28
CONCEPTS = ("autoencoder", "digit_capsules")  # whose codes are shown


@dataclass(frozen=True)
class Decoder:
    """What is trained: an entry under one of its guides."""

    entry: str
    guide: str = "deterministic"
    sizes: Mapping[str, Any] = field(default_factory=dict)


SMALL_ENCODER = dict(channels=32, hidden=256)
CONVOLUTIONAL = {"hidden": 256}
LINEAR = {"motion": "linear"}
DECODERS = {
    "autoencoder": Decoder("conditional-autoencoder", sizes=CONVOLUTIONAL),
    "vae": Decoder("conditional-autoencoder", "variational", CONVOLUTIONAL),
    "broadcast": Decoder("broadcast-autoencoder"),
    "digit_capsules": Decoder("generative-capsnet"),
    "continuous": Decoder("generative-capsnet-continuous"),
    "digit_capsules_linear": Decoder("generative-capsnet", sizes=LINEAR),
    "continuous_linear": Decoder("generative-capsnet-continuous", sizes=LINEAR),
}


@dataclass(frozen=True)
class Protocol:
    """What is asked for.

    Attributes:
        requests: the family of transformations.
        usual: smallest and largest parameter in training.
        rare: the same for the classes `RARE`.
        lines: requests at which test images are asked for; the first parameter runs along a line.
        border: blank pixels around the digit.
    """

    requests: Requests
    usual: tuple[float, float]
    rare: tuple[float, float]
    lines: Mapping[str, Line]
    border: int = 0

    @property
    def kind(self) -> str:
        """The family's name among an entry's sizes."""
        return type(self.requests).__name__.lower()

    def inside(self, line: Line) -> np.ndarray:
        """Which requests (points,) were seen in training with the rare classes."""
        low, high = self.rare
        points = np.array(line)
        return (((points >= low) & (points < high)) | (points == low)).all(1)


ANGLES: Line = tuple((float(a),) for a in range(-180, 180, 12))
SHIFTS: dict[str, Line] = {
    "diagonal": tuple((float(s), float(s)) for s in range(-20, 20, 2)),
    "antidiagonal": tuple((float(s), float(-s)) for s in range(-20, 20, 2)),
}
TURNED = Protocol(Rotations(), (-180, 180), (-45, 45), {"circle": ANGLES})
SHIFTED = Protocol(Shifts(20), (-20, 20), (-5, 5), SHIFTS, border=20)


@experiment("generative-capsnet/shift", data="mnist")
def shift(options: Options) -> Result:
    """All digits shifted by up to 20 pixels, 4 and 9 by up to 5 (200 core-minutes)."""
    return study(SHIFTED, options)


@experiment("generative-capsnet/shift-beyond", data="mnist")
def shift_beyond(options: Options) -> Result:
    """All digits shifted by up to 10 pixels, and asked for at up to 20 (200 core-minutes)."""
    return study(replace(SHIFTED, usual=(-10, 10), rare=(-10, 10)), options)


@experiment("generative-capsnet/rotate", data="mnist")
def rotate(options: Options) -> Result:
    """All digits at every angle, 4 and 9 within 45 degrees; angles inferred (85 core-minutes).

    The figures `concepts` are the article's: what one unit or kind of a code means at every angle.
    """
    return study(TURNED, options, infer=True)


@experiment("generative-capsnet/one-shot", data="mnist")
def one_shot(options: Options) -> Result:
    """All digits at every angle, 4 and 9 at 18 degrees only (85 core-minutes)."""
    line = tuple(sorted((*ANGLES, (18.0,))))
    return study(replace(TURNED, rare=(18, 18), lines={"circle": line}), options)


@experiment("generative-capsnet/rotate-beyond", data="mnist", role="comparison", lead="painted")
def rotate_beyond(options: Options) -> Result:
    """All digits within 90 degrees, and asked for on the whole circle (85 core-minutes)."""
    return study(replace(TURNED, usual=(-90, 90), rare=(-90, 90)), options)


@dataclass(frozen=True)
class Job:
    """What a process needs to train one decoder from one seed."""

    decoder: str
    protocol: Protocol
    options: Options
    folder: Path
    guide: str | None = None  # in place of the decoder's own


Errors = dict[str, np.ndarray]  # by line, (rare classes, points)


def study(protocol: Protocol, options: Options, infer: bool = False) -> Result:
    """Train every decoder from every seed, and measure all in the same way.

    `minutes` are those of all runs together; without them every run takes `STEPS` steps.

    Args:
        infer: also infer how test images of the other classes were turned, and show concepts.
    """
    options.refuse_run()
    with TemporaryDirectory() as folder:
        jobs = plan(protocol, options, Path(folder))
        found = side_by_side(learn, jobs)
        entries = {
            job.decoder: load(job.folder) for job in jobs if job.options.seed == options.seed
        }
    data = on_canvas(protocol, options)
    blank, errors = errors_of_rare(None, data, protocol), {}
    runs: dict[str, Numbers] = {}
    for name, entry in entries.items():
        own = [run for job, run in zip(jobs, found, strict=True) if job.decoder == name]
        errors[name] = {line: np.stack([run[1][line] for run in own]) for line in protocol.lines}
        runs[name] = {
            "steps": mean_and_error([float(run[0]) for run in own]),
            "parameters": (float(entry.model.num_parameters), None, 1),
        }
        if infer:
            options.say(f"Inferring by {name} how images were turned")
            runs[name]["inferred_degrees"] = inferred_angles(entry, data, options)
    tables = measured(errors, blank, protocol)
    training = Table(by_quantity(runs), names="{variant}_{quantity}")
    drawn = {line: curves(errors, blank, protocol, line) for line in protocol.lines}
    drawn["painted"] = painted(entries, data, protocol)
    if infer:
        for name in CONCEPTS:
            drawn[f"concepts_{name}"] = concepts(entries[name], data, protocol)
    metrics = {**tables, "training": training}
    return Result(metrics, drawn, as_table(tables), entries["digit_capsules"])


def plan(protocol: Protocol, options: Options, folder: Path) -> list[Job]:
    """A job for every decoder and seed."""
    runs = [(name, options.seed + i) for name in DECODERS for i in range(SEEDS)]
    options.say(f"Training {len(DECODERS)} decoders from {SEEDS} seeds each")
    return jobs_of(runs, protocol, options, folder)


def jobs_of(
    runs: Sequence[tuple[str, int]],
    protocol: Protocol,
    options: Options,
    folder: Path,
    guide: str | None = None,
) -> list[Job]:
    """A job for every decoder and seed of `runs`, which share the minutes equally."""
    minutes = options.minutes and options.minutes / len(runs)
    own = replace(options, minutes=minutes, progress=False)
    return [
        Job(name, protocol, replace(own, seed=seed), folder / f"{name}_{seed}", guide)
        for name, seed in runs
    ]


def on_canvas(protocol: Protocol, options: Options) -> Dataset:
    """MNIST with the border of the protocol."""
    data = load_dataset("mnist", root=options.data_root)
    return data.transformed(lambda images: F.pad(images, (protocol.border,) * 4))


def learn(job: Job) -> tuple[int, Errors]:
    """Train one decoder and save it; the number of steps, and its errors on the rare classes."""
    decoder, protocol = DECODERS[job.decoder], job.protocol
    data = on_canvas(protocol, job.options)
    pyro.set_rng_seed(job.options.seed)
    entry = create(
        decoder.entry,
        image_shape=data.image_shape,
        requests=protocol.kind,
        window=(DIGIT, DIGIT),
        guide_sizes=SMALL_ENCODER,
        **decoder.sizes,
    ).use_guide(job.guide or decoder.guide)
    classes = range(data.num_classes)
    ranges = [protocol.rare if label in RARE else protocol.usual for label in classes]
    asked = replace(entry, model=Requested(entry.model, protocol.requests, ranges))
    minutes = job.options.minutes
    limit: dict[str, Any] = {"minutes": minutes} if minutes else {"steps": STEPS}
    steps = train(asked, data, job.options, labels=True, **limit).steps
    save(entry, job.folder, data=data.name, seed=job.options.seed)
    return steps, errors_of_rare(entry, data, protocol)


@torch.no_grad()
def errors_of_rare(entry: Entry | None, data: Dataset, protocol: Protocol) -> Errors:
    """Errors along every line, of the rare classes' test images; those of black images for None."""
    found: dict[str, list] = {line: [] for line in protocol.lines}
    for digit in RARE:
        images = of_class(data, digit)
        latents = entry and entry.guide.expectations(images)
        for line, points in protocol.lines.items():
            errors = []
            for point in points:
                asked = images.new_tensor([point])
                error = protocol.requests.move(images, asked)
                if entry is not None:
                    numbers = protocol.requests.numbers(asked)
                    error = error - entry.model.mean_image(latents, numbers)
                errors.append(4 * error.square().mean().item())
            found[line].append(errors)
    return {line: np.array(errors) for line, errors in found.items()}


def of_class(data: Dataset, digit: int) -> Tensor:
    """Test images of one class."""
    return data.test.images[data.test.labels == digit][:IMAGES]


def measured(errors: Mapping[str, Errors], blank: Errors, protocol: Protocol) -> dict[str, Table]:
    """Return tables of errors for every rare class and line: absolute ones, and "to blank".

    Args:
        errors: by decoder and line, (seeds, rare classes, points).
        blank: by line, (rare classes, points).
    """
    tables: dict[str, Table] = {}
    for line, points in protocol.lines.items():
        inside = protocol.inside(points)
        is_first = line == next(iter(protocol.lines))
        suffix, words = ("", "") if is_first else (f"_{line}", f", {line}")
        for i, digit in enumerate(RARE):
            own = {name: found[line][:, i] for name, found in errors.items()}
            absolute, relative = inside_and_outside(own, blank[line][i], inside)
            names = f"{{variant}}_digit{digit}_{{quantity}}{suffix}"
            tables[f"digit {digit}{words}"] = Table(absolute, names)
            tables[f"digit {digit}{words}, to blank"] = Table(relative, f"{names}_to_blank")
    return tables


def inside_and_outside(
    errors: Mapping[str, np.ndarray], blank: np.ndarray, inside: np.ndarray
) -> tuple[dict[str, Numbers], dict[str, Numbers]]:
    """Return errors inside and outside and their ratio, and errors relative to a black image's.

    Args:
        errors: by decoder, (seeds, points).
        blank: of a black image, (points,).
        inside: True for requests that were seen in training, (points,).
    """
    absolute: dict[str, Numbers] = {}
    relative: dict[str, Numbers] = {}
    for where, chosen in (("inside", inside), ("outside", ~inside)):
        black = blank[chosen].mean()
        means = {name: error[:, chosen].mean(1) for name, error in errors.items()}
        absolute[where] = {"blank": (float(black), None, 1)}
        absolute[where] |= {name: mean_and_error(error) for name, error in means.items()}
        relative[where] = {name: mean_and_error(error / black) for name, error in means.items()}
    absolute["ratio"] = {
        name: mean_and_error(error[:, ~inside].mean(1) / error[:, inside].mean(1))
        for name, error in errors.items()
    }
    return absolute, relative


def inferred_angles(entry: Entry, data: Dataset, options: Options) -> Number:
    """Median error, in degrees, of the angles inferred from turned test images of usual classes."""
    usual = torch.isin(data.test.labels, torch.tensor(RARE), invert=True)
    _, angles, found = turned(entry, data.test.images[usual][:INFERRED], options.seed)
    error = ((found - angles + 180) % 360 - 180).abs()
    return median_and_error(error.squeeze(1), seed=options.seed)


def turned(entry: Entry, images: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Images at random angles, these angles (B, 1), and those inferred by an entry, in degrees."""
    generator = torch.Generator().manual_seed(seed)
    angles = 360 * torch.rand(len(images), 1, generator=generator) - 180
    requests = Rotations()
    moved = requests.move(images, angles)
    grid = torch.arange(-180.0, 180.0, 15.0)
    found = infer_transformation(entry.model, entry.guide, moved, requests, grid=grid)
    return moved, angles, found.best


def as_table(tables: Mapping[str, Table]) -> pd.DataFrame:
    """Return errors inside and outside, and their ratio, with a row for each decoder."""
    columns = {
        f"digit{digit}_{quantity}": {name: number[0] for name, number in numbers.items()}
        for digit in RARE
        for quantity, numbers in tables[f"digit {digit}"].numbers.items()
    }
    return pd.DataFrame(columns).loc[list(DECODERS)]


def curves(errors: Mapping[str, Errors], blank: Errors, protocol: Protocol, line: str) -> Figure:
    """Errors along one line, a panel for each rare class."""
    units = "degrees" if isinstance(protocol.requests, Rotations) else "pixels"
    titles = {f"digit {digit}": i for i, digit in enumerate(RARE)}
    return error_curves(
        {title: {n: e[line][:, i] for n, e in errors.items()} for title, i in titles.items()},
        [point[0] for point in protocol.lines[line]],
        protocol.rare,
        {title: blank[line][i] for title, i in titles.items()},
        f"request ({units})",
    )


def some_requests(data: Dataset, protocol: Protocol) -> Tensor:
    """About ten requests along the first line, (points, parameters)."""
    line = next(iter(protocol.lines.values()))
    return data.test.images.new_tensor(line[:: max(1, len(line) // 10)])


@torch.no_grad()
def painted(entries: Mapping[str, Entry], data: Dataset, protocol: Protocol) -> Figure:
    """One digit 4 as requested along the first line, and as every decoder paints it."""
    asked = some_requests(data, protocol)
    images = of_class(data, RARE[0])[:1].expand(len(asked), -1, -1, -1)
    numbers = protocol.requests.numbers(asked)
    rows = {"requested": protocol.requests.move(images, asked)}
    for name, entry in entries.items():
        rows[name] = entry.model.mean_image(entry.guide.expectations(images), numbers)
    return image_rows(rows, "A test digit of a rare class, as requested")


@torch.no_grad()
def concepts(entry: Entry, data: Dataset, protocol: Protocol) -> Figure:
    """The first ten codes with a single unit, or a single kind, painted along the first line.

    A unit is as large as it gets on test images; a kind is sure, and its pose is zero.
    """
    numbers = protocol.requests.numbers(some_requests(data, protocol))
    codes = entry.guide.expectations(data.test.images[:1000])
    latents = {name: torch.zeros_like(code[: len(numbers)]) for name, code in codes.items()}
    first, units = next(iter(codes.items()))
    kinds, count = "object_kind" in codes, units.shape[1]
    rows = {}
    for i in range(min(10, count)):
        one = F.one_hot(torch.tensor([i]), count)
        code = one.log() if kinds else one * units.abs().amax(0)
        latents[first] = code.expand(len(numbers), -1)
        rows[f"{'kind' if kinds else 'unit'} {i}"] = entry.model.mean_image(latents, numbers)
    return image_rows(rows, "One unit of the code at a time, as requested")
