"""Transformations beyond training: CapsNets compared with plain decoders (Potapov 2018).

The encoder sees each image untransformed, and the decoder must draw it under a given
transformation. Digits 4 and 9 are trained on a narrower range of transformations than the other
classes; with `...-beyond` all classes are. The numbers are the errors on test images of 4 and 9, at
requests within the range of training (`inside`) and beyond it (`outside`).

All decoders have one encoder and one length of the code. Capsules move as in the article, or
linearly with the request, which is our variant. `autoencoder_linear` has a hidden layer that is
linear in the request and no capsules: it shows what linearity alone gives. Errors are mean squared
errors of pixels in [-1, 1], as in the article. `ratio` is outside over inside. `to_blank` divides
by the error of a black image at equal requests, because a curve can be flat when it is bad
everywhere. Values are means over the seeds, each with its standard error. The article trains for
100,000 updates.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor

from capsule_zoo.data import Dataset, Requests, Rotations, Shifts, load_dataset
from capsule_zoo.experiments import Job, Options, Result, Study, create_untrained, experiment, train
from capsule_zoo.experiments.common.findings import group_by_quantity, mean_and_error, single
from capsule_zoo.figures.curves import error_curves
from capsule_zoo.figures.grids import image_rows
from capsule_zoo.inference import Inputs
from capsule_zoo.inference.transformations import Requested
from capsule_zoo.records import Numbers, Table
from capsule_zoo.registry import Entry, load, save_entry

Line = tuple[tuple[float, ...], ...]
Errors = dict[str, np.ndarray]  # by line: (rare classes, points), or (seeds, rare classes, points)
RARE = (4, 9)  # classes that are trained on a separate range of requests
STEPS = 20_000  # updates of every run, unless minutes are given
IMAGES = 300  # test images of each rare class
DIGIT = 28


@dataclass(frozen=True)
class Protocol:
    """The ranges of requests in an experiment.

    Attributes:
        requests: the family of transformations.
        usual: smallest and largest parameter in training.
        rare: smallest and largest parameter in training for the classes `RARE`.
        lines: requests for test images; along a line the first parameter changes.
        border: blank pixels around the digit.
    """

    requests: Requests
    usual: tuple[float, float]
    rare: tuple[float, float]
    lines: Mapping[str, Line]
    border: int = 0

    def inside(self, line: Line) -> np.ndarray:
        """Return whether requests lie in the training range of the rare classes, (points,)."""
        low, high = self.rare
        points = np.array(line)
        return (((points >= low) & (points < high)) | (points == low)).all(1)


ANGLES: Line = tuple((float(a),) for a in range(-180, 180, 12))
SHIFTS: dict[str, Line] = {
    "diagonal": tuple((float(s), float(s)) for s in range(-20, 20, 2)),
    "antidiagonal": tuple((float(s), float(-s)) for s in range(-20, 20, 2)),
}
ROTATED = Protocol(Rotations(), (-180, 180), (-45, 45), {"circle": ANGLES})
SHIFTED = Protocol(Shifts(20), (-20, 20), (-5, 5), SHIFTS, border=20)
PROTOCOLS: dict[str, Protocol] = {
    "shift": SHIFTED,
    "rotate": ROTATED,
    "one-shot": replace(
        ROTATED, rare=(18, 18), lines={"circle": tuple(sorted((*ANGLES, (18.0,))))}
    ),
    "rotate-beyond": replace(ROTATED, usual=(-90, 90), rare=(-90, 90)),
}


@dataclass(frozen=True)
class Decoder:
    """An entry, or a preset of it, with settings, and the first learning rate of long runs."""

    entry: str
    sizes: Mapping[str, Any] = field(default_factory=dict)
    preset: str | None = None
    lr: float = 3e-3

    def preset_for(self, requests: Requests) -> str | None:
        """Return the settings of the preset for requests; by default entries render rotations."""
        shifts = "shifts" if isinstance(requests, Shifts) else None
        return "-".join(filter(None, [self.preset, shifts])) or None


CONVOLUTIONAL = {"hidden": 256}
LINEAR = {"motion": "linear"}
CONTINUOUS: dict[str, Any] = dict(preset="continuous", lr=1e-3)  # at .003 images stay blank
DECODERS = {
    "autoencoder": Decoder("conditional-autoencoder", CONVOLUTIONAL),
    "autoencoder_linear": Decoder(
        "conditional-autoencoder", {**CONVOLUTIONAL, "decoder": "linear"}
    ),
    "digit_capsules": Decoder("generative-capsnet"),
    "continuous": Decoder("generative-capsnet", **CONTINUOUS),
    "digit_capsules_linear": Decoder("generative-capsnet", LINEAR),
    "continuous_linear": Decoder("generative-capsnet", LINEAR, **CONTINUOUS),
}
ENCODER: dict[str, Any] = dict(channels=32, hidden=256)


@dataclass(frozen=True)
class Task:
    """The training of one decoder for some updates, unless minutes are given.

    `fitting` replaces the entry's own arguments of `fit`.
    """

    decoder: str
    protocol: Protocol
    steps: int
    guide: str = "deterministic"
    fitting: Mapping[str, Any] = field(default_factory=dict)


@experiment("generative-capsnet/at-length", data="mnist")
def run_long(options: Options, *, seeds: int = 1) -> Result:
    """Rotate digits beyond training in three ways, after 20,000 updates (120 core-minutes).

    Args:
        seeds: number of seeds for each decoder.
    """
    protocols = "rotate", "one-shot", "rotate-beyond"
    return compare_decoders(options, protocols, [*DECODERS], seeds)


@experiment("generative-capsnet/shift-at-length", data="mnist")
def shift_at_length(options: Options, *, seeds: int = 1) -> Result:
    """Shift 4 and 9 beyond training, after 20,000 updates (100 core-minutes).

    Args:
        seeds: number of seeds for each decoder.
    """
    decoders = [name for name in DECODERS if name != "continuous_linear"]
    return compare_decoders(options, ("shift",), decoders, seeds)


def compare_decoders(
    options: Options, protocols: Sequence[str], decoders: Sequence[str], seeds: int
) -> Result:
    """Train every decoder on every protocol from every seed, and measure their errors."""
    tasks = {
        f"{name}-{decoder}": Task(
            decoder,
            PROTOCOLS[name],
            STEPS,
            fitting={"lr": DECODERS[decoder].lr, "batch_size": 32},  # the fastest training
        )
        for name in protocols
        for decoder in decoders
    }
    study = Study(tasks, seeds)
    outcomes = study.run(learn, options)
    entries = {key: load(folder) for key, folder in study.folders(options).items()}
    metrics: dict[str, Table] = {}
    training: dict[str, Numbers] = {}
    figures: dict[str, Figure] = {}
    for name in protocols:
        protocol, prefix = PROTOCOLS[name], name.replace("-", "_")
        data = load_on_canvas(protocol, options)
        blank = errors_of_rare(None, data, protocol)
        errors: dict[str, Errors] = {}
        for decoder in decoders:
            runs = outcomes[f"{name}-{decoder}"]
            errors[decoder] = {
                line: np.stack([run["errors"][line] for run in runs]) for line in protocol.lines
            }
            training[f"{prefix}_{decoder}"] = {
                "steps": mean_and_error([float(run["steps"]) for run in runs]),
                "parameters": single(entries[f"{name}-{decoder}"].model.num_parameters),
            }
        for title, table in error_tables(errors, blank, protocol, prefix).items():
            metrics[f"{name}, {title}"] = table
        figures[prefix] = plot_errors(errors, blank, protocol)
        decoder_entries = {decoder: entries[f"{name}-{decoder}"] for decoder in decoders}
        figures[f"{prefix}_painted"] = plot_paintings(decoder_entries, data, protocol)
    metrics["training"] = Table(group_by_quantity(training), names="{variant}_{quantity}")
    return Result(metrics, figures, None, next(iter(entries.values())))


def learn(job: Job[Task]) -> dict[str, Any]:
    """Train one decoder and save it; return its steps, and its errors on the rare classes."""
    task, options = job.variant, job.options
    decoder, protocol = DECODERS[task.decoder], task.protocol
    data = load_on_canvas(protocol, options)
    entry = create_untrained(
        decoder.entry,
        data,
        options,
        preset=decoder.preset_for(protocol.requests),
        guide={"window": (DIGIT, DIGIT), **ENCODER},
        **decoder.sizes,
    ).use_guide(task.guide)
    ranges = [protocol.rare if c in RARE else protocol.usual for c in range(data.num_classes)]
    requested = replace(entry, model=Requested(entry.model, protocol.requests, ranges))
    arguments: dict[str, Any] = {**task.fitting, **options.limit(task.steps)}
    inputs = Inputs(labels=True)
    steps = train(requested, data, options, name="run", inputs=inputs, **arguments).steps
    if options.runs:
        save_entry(entry, options.runs, data=data.name, seed=options.seed)
    errors = errors_of_rare(entry, data, protocol)
    return {"steps": steps, "errors": {line: values.tolist() for line, values in errors.items()}}


def load_on_canvas(protocol: Protocol, options: Options) -> Dataset:
    """Load MNIST with the border of the protocol."""
    data = load_dataset("mnist", root=options.data_root)
    return data.transform_images(lambda images: F.pad(images, (protocol.border,) * 4))


@torch.no_grad()
def errors_of_rare(entry: Entry | None, data: Dataset, protocol: Protocol) -> Errors:
    """Measure errors on test images of the rare classes, along every line of requests.

    Without an entry the errors are of black images.
    """
    results: dict[str, list] = {line: [] for line in protocol.lines}
    for digit in RARE:
        digits = data.test.images[data.test.labels == digit][:IMAGES]
        latents = entry and entry.guide.expectations(digits)
        for line, points in protocol.lines.items():
            errors = []
            for point in points:
                request = digits.new_tensor([point])
                error = protocol.requests.move(digits, request)
                if entry is not None:
                    numbers = protocol.requests.numbers(request)
                    error = error - entry.model.mean_image(latents, numbers)
                errors.append(4 * error.square().mean().item())
            results[line].append(errors)
    return {line: np.array(errors) for line, errors in results.items()}


def error_tables(
    errors: Mapping[str, Errors], blank: Errors, protocol: Protocol, prefix: str
) -> dict[str, Table]:
    """Return tables of errors for every rare class and line: absolute ones, and "to blank".

    Args:
        errors: by decoder and line, (seeds, rare classes, points).
        blank: by line, (rare classes, points).
        prefix: start of every metric's name.
    """
    tables: dict[str, Table] = {}
    for line, points in protocol.lines.items():
        inside = protocol.inside(points)
        is_first = line == next(iter(protocol.lines))
        suffix, title = ("", "") if is_first else (f"_{line}", f", {line}")
        for i, digit in enumerate(RARE):
            of_digit = {name: by_line[line][:, i] for name, by_line in errors.items()}
            absolute, relative = inside_and_outside(of_digit, blank[line][i], inside)
            names = f"{prefix}_{{variant}}_digit{digit}_{{quantity}}{suffix}"
            tables[f"digit {digit}{title}"] = Table(absolute, names)
            tables[f"digit {digit}{title}, to blank"] = Table(relative, f"{names}_to_blank")
    return tables


def inside_and_outside(
    errors: Mapping[str, np.ndarray], blank: np.ndarray, inside: np.ndarray
) -> tuple[dict[str, Numbers], dict[str, Numbers]]:
    """Return errors inside and outside, their ratio, and errors relative to a black image's.

    Args:
        errors: errors by decoder, (seeds, points).
        blank: errors of a black image, (points,).
        inside: True for requests of training, (points,).
    """
    absolute, relative = dict[str, Numbers](), dict[str, Numbers]()
    for where, points in (("inside", inside), ("outside", ~inside)):
        black = blank[points].mean()
        means = {name: error[:, points].mean(1) for name, error in errors.items()}
        absolute[where] = {"blank": single(black)}
        absolute[where] |= {name: mean_and_error(error) for name, error in means.items()}
        relative[where] = {name: mean_and_error(error / black) for name, error in means.items()}
    absolute["ratio"] = {
        name: mean_and_error(error[:, ~inside].mean(1) / error[:, inside].mean(1))
        for name, error in errors.items()
    }
    return absolute, relative


def plot_errors(errors: Mapping[str, Errors], blank: Errors, protocol: Protocol) -> Figure:
    """Plot the errors along the first line, with a panel for each rare class."""
    line, points = next(iter(protocol.lines.items()))
    units = "degrees" if isinstance(protocol.requests, Rotations) else "pixels"
    titles = {f"digit {digit}": i for i, digit in enumerate(RARE)}
    return error_curves(
        {title: {n: e[line][:, i] for n, e in errors.items()} for title, i in titles.items()},
        [point[0] for point in points],
        protocol.rare,
        {title: blank[line][i] for title, i in titles.items()},
        f"request ({units})",
    )


def sample_requests(data: Dataset, protocol: Protocol) -> Tensor:
    """Return about ten requests along the first line, (points, parameters)."""
    line = next(iter(protocol.lines.values()))
    return data.test.images.new_tensor(line[:: max(1, len(line) // 10)])


@torch.no_grad()
def plot_paintings(entries: Mapping[str, Entry], data: Dataset, protocol: Protocol) -> Figure:
    """Plot a digit 4: requested transformations in row 1, one row per decoder below."""
    requests = sample_requests(data, protocol)
    four = data.test.images[data.test.labels == RARE[0]][:1]
    images = four.expand(len(requests), -1, -1, -1)
    numbers = protocol.requests.numbers(requests)
    rows = {"requested": protocol.requests.move(images, requests)}
    for name, entry in entries.items():
        rows[name] = entry.model.mean_image(entry.guide.expectations(images), numbers)
    return image_rows(rows, "A four of the test images, at each request")
