"""Digits requested where no training image was: CapsNets and plain decoders (Potapov 2018).

The encoder sees each image untransformed, and the decoder must draw it under a given
transformation. Digits 4 and 9 are trained on a narrower range of transformations than the other
classes; in two experiments all classes are. The numbers are the errors on test images of 4 and 9,
at requests within the range of training (`inside`) and beyond it (`outside`).

All decoders share the encoder and the length of the code. Capsules move as in the article, and
linearly with the request, which is ours. `autoencoder_linear` has a hidden layer that is linear in
the request and no capsules: it shows what linearity alone gives. Errors are mean squared errors of
pixels in [-1, 1], as in the article. `ratio` is outside over inside. `to_blank` divides by the
error of a black image at the same requests, because a curve can be flat when it is bad everywhere.
Values are means over the seeds, each with its standard error.

The article trains for 100,000 updates, and most records here for hundreds. Those `at-length` have
one seed of each decoder and thousands of updates, and say how much of a difference to the article
is the length alone. `variants` has what the article also tried: a code of 128 numbers, and learned
addresses, its first attempt, which failed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor

from capsule_zoo.data import Dataset, Rotations
from capsule_zoo.experiments import Job, Options, Result, Study, begun, choose, experiment, train
from capsule_zoo.experiments.common.findings import (
    by_quantity,
    mean_and_error,
    median_and_error,
    single,
)
from capsule_zoo.experiments.generative_capsnet.requests import (
    DECODERS,
    KNOWN,
    PROTOCOLS,
    RARE,
    Decoder,
    Protocol,
    of_class,
    on_canvas,
    some_requests,
)
from capsule_zoo.figures.curves import error_curves
from capsule_zoo.figures.grids import image_rows
from capsule_zoo.inference import Inputs, Requested, infer_transformation
from capsule_zoo.records import Number, Numbers, Table
from capsule_zoo.registry import Entry, load, save_entry

DIGIT = 28
CONCEPTS = ("autoencoder", "digit_capsules")  # decoders whose codes are shown
SMALL_ENCODER: Mapping[str, Any] = dict(channels=32, hidden=256)


@dataclass(frozen=True)
class Trainings:
    """The settings of an experiment on requests.

    Args:
        decoders: names of the decoders that are trained.
        seeds: number of seeds for each decoder.
        steps: updates of every run, unless minutes are given; these are shared by all runs.
        images: number of test images of each rare class.
        inferred: number of images whose transformation is inferred.
        encoder: sizes of the encoder that replace 32 channels and 256 hidden units.
        capsules: sizes of the capsule networks that replace the entries' own.
        plain: sizes of the other decoders that replace the entries' own.
        fitting: arguments of `fit` that replace the entries' own.
    """

    decoders: tuple[str, ...] = tuple(DECODERS)
    seeds: int = 3
    steps: int = 3000
    images: int = 300
    inferred: int = 60
    encoder: Mapping[str, Any] | None = None
    capsules: Mapping[str, Any] | None = None
    plain: Mapping[str, Any] | None = None
    fitting: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        choose("decoder", self.decoders, KNOWN)

    def sizes(self, decoder: Decoder) -> dict[str, Any]:
        """Return the sizes of a decoder."""
        own = self.capsules if decoder.entry.startswith("generative-capsnet") else self.plain
        return {**decoder.sizes, **(own or {})}

    def repeated(self, name: str) -> dict[str, str]:
        """Return the protocols of an experiment, each with the first words of its numbers."""
        return {name: ""}

    def fit(self, decoder: str) -> dict[str, Any]:
        """Return the arguments of `fit` for one decoder that replace the entry's own."""
        return dict(self.fitting or {})


FAST: Mapping[str, Any] = dict(lr=3e-3, batch_size=32)
RATES = {"continuous": 1e-3, "continuous_linear": 1e-3}  # at .003 they draw nothing any more
SHIFTED_AT_LENGTH = (
    "autoencoder",
    "autoencoder_linear",
    "digit_capsules",
    "continuous",
    "digit_capsules_linear",
)


@dataclass(frozen=True)
class Lengths(Trainings):
    """The settings of the runs at length: `Trainings`, and the experiments that they repeat.

    Args:
        protocols: names of the experiments on requests.
        inferred: not used here.
        fitting: arguments of `fit` that replace batches of 32 and a rate of .003, with which errors
            fall fastest; the rate of continuous capsules is .001.
    """

    protocols: tuple[str, ...] = ("rotate", "one-shot", "rotate-beyond")
    decoders: tuple[str, ...] = tuple(name for name in DECODERS if name not in ("vae", "broadcast"))
    seeds: int = 1
    steps: int = 20_000

    def __post_init__(self) -> None:
        super().__post_init__()
        choose("protocol", self.protocols, PROTOCOLS)

    def repeated(self, name: str) -> dict[str, str]:
        """Return the protocols, whose names begin the names of their numbers."""
        return {own: f"{own}_".replace("-", "_") for own in self.protocols}

    def fit(self, decoder: str) -> dict[str, Any]:
        """Return the arguments of `fit` for one decoder that replace the entry's own."""
        own = {"lr": RATES[decoder]} if decoder in RATES else {}
        return {**FAST, **own, **super().fit(decoder)}


def _register(
    name: str, words: str, takes: type[Trainings] = Trainings, **shown: Any
) -> Callable[..., Result]:
    """Register an experiment on requests, with `words` as its description."""

    def requests(options: Options, chosen: Trainings) -> Result:
        return on_request(name, chosen, options)

    requests.__annotations__["chosen"], requests.__doc__ = takes, words
    return experiment(f"generative-capsnet/{name}", data="mnist", **shown)(requests)


_register(
    "at-length",
    "Turn digits beyond training in three ways, after 20,000 updates (120 core-minutes).",
    Lengths,
)
_register(
    "shift-at-length",
    "Shift 4 and 9 beyond training, after 20,000 updates (100 core-minutes).",
    Lengths,
    defaults=dict(protocols=("shift",), decoders=SHIFTED_AT_LENGTH),
)
_register(
    "shift-beyond-at-length",
    "Shift all digits by up to 10 pixels, request up to 20, 20,000 updates (100 core-minutes).",
    Lengths,
    defaults=dict(protocols=("shift-beyond",), decoders=SHIFTED_AT_LENGTH),
)


@dataclass(frozen=True)
class Task:
    """The training of one decoder: the requests, the settings, a guide if not its usual one.

    `split` names the images that it is measured on.
    """

    decoder: str
    protocol: Protocol
    settings: Trainings
    guide: str | None = None
    split: str = "test"


Errors = dict[str, np.ndarray]  # by line: (rare classes, points), or (seeds, rare classes, points)


def on_request(name: str, settings: Trainings, options: Options) -> Result:
    """Train every decoder on every protocol from every seed, and measure all in the same way.

    `rotate` also infers how test images of the other classes were turned, and shows concepts.
    """
    study = study_of({each: PROTOCOLS[each] for each in settings.repeated(name)}, settings)
    found = study.run(learn, options)
    entries = {key: load(folder) for key, folder in study.folders(options).items()}
    metrics: dict[str, Table] = {}
    training: dict[str, Numbers] = {}
    figures: dict[str, Figure] = {}
    for own, words in settings.repeated(name).items():
        protocol, title = PROTOCOLS[own], f"{own}, " if words else ""
        data = on_canvas(protocol, options)
        blank = errors_of_rare(None, data, protocol, settings.images)
        drawn = {each: entries[f"{own}-{each}"] for each in settings.decoders}
        errors: dict[str, Errors] = {}
        for decoder, entry in drawn.items():
            runs = found[f"{own}-{decoder}"]
            errors[decoder] = {
                line: np.stack([run["errors"][line] for run in runs]) for line in protocol.lines
            }
            training[f"{words}{decoder}"] = {
                "steps": mean_and_error([float(run["steps"]) for run in runs]),
                "parameters": single(entry.model.num_parameters),
            }
            if name == "rotate":
                options.say(f"Inferring by {decoder} how images were turned")
                angles = inferred_angles(entry, data, options, settings.inferred)
                training[decoder]["inferred_degrees"] = angles
        for digits, table in measured(errors, blank, protocol, words).items():
            metrics[f"{title}{digits}"] = table
        for line in [*protocol.lines][: 1 if words else None]:
            figures[words.rstrip("_") or line] = curves(errors, blank, protocol, line)
        figures[f"{words}painted"] = painted(drawn, data, protocol)
        for decoder in CONCEPTS if name == "rotate" else ():
            if decoder in drawn:
                figures[f"concepts_{decoder}"] = concepts(drawn[decoder], data, protocol)
    metrics["training"] = Table(by_quantity(training), names="{variant}_{quantity}")
    kept = entries.get(f"{name}-digit_capsules", next(iter(entries.values())))
    return Result(metrics, figures, None, kept)


def study_of(
    protocols: Mapping[str, Protocol], settings: Trainings, guide: str | None = None
) -> Study[Task]:
    """Return the training runs of every decoder on every protocol from every seed."""
    tasks = {
        f"{name}-{decoder}": Task(decoder, protocol, settings, guide)
        for name, protocol in protocols.items()
        for decoder in settings.decoders
    }
    return Study(tasks, settings.seeds)


def learn(job: Job[Task]) -> dict[str, Any]:
    """Train one decoder and save it; return its steps, and its errors on the rare classes."""
    task, options = job.variant, job.options
    decoder, protocol, settings = KNOWN[task.decoder], task.protocol, task.settings
    data = on_canvas(protocol, options)
    entry = begun(
        decoder.entry,
        data,
        options,
        requests=protocol.kind,
        window=(DIGIT, DIGIT),
        guide={**SMALL_ENCODER, **(settings.encoder or {})},
        **settings.sizes(decoder),
    ).use_guide(task.guide or decoder.guide)
    ranges = [protocol.rare if c in RARE else protocol.usual for c in range(data.num_classes)]
    requested = replace(entry, model=Requested(entry.model, protocol.requests, ranges))
    how: dict[str, Any] = {**settings.fit(task.decoder), **options.limit(settings.steps)}
    steps = train(requested, data, options, name="run", inputs=Inputs(labels=True), **how).steps
    if options.runs:
        save_entry(entry, options.runs, data=data.name, seed=options.seed)
    measured_on = replace(data, test=getattr(data, task.split))
    errors = errors_of_rare(entry, measured_on, protocol, settings.images)
    return {"steps": steps, "errors": {line: found.tolist() for line, found in errors.items()}}


@torch.no_grad()
def errors_of_rare(entry: Entry | None, data: Dataset, protocol: Protocol, images: int) -> Errors:
    """Return errors along every line, of test images of the rare classes.

    Args:
        entry: the entry that draws the images; None for black images.
        images: number of images of each class.
    """
    found: dict[str, list] = {line: [] for line in protocol.lines}
    for digit in RARE:
        shown = of_class(data, digit)[:images]
        latents = entry and entry.guide.expectations(shown)
        for line, points in protocol.lines.items():
            errors = []
            for point in points:
                request = shown.new_tensor([point])
                error = protocol.requests.move(shown, request)
                if entry is not None:
                    numbers = protocol.requests.numbers(request)
                    error = error - entry.model.mean_image(latents, numbers)
                errors.append(4 * error.square().mean().item())
            found[line].append(errors)
    return {line: np.array(errors) for line, errors in found.items()}


def measured(
    errors: Mapping[str, Errors], blank: Errors, protocol: Protocol, prefix: str = ""
) -> dict[str, Table]:
    """Return tables of errors for every rare class and line: absolute ones, and "to blank".

    Args:
        errors: by decoder and line, (seeds, rare classes, points).
        blank: by line, (rare classes, points).
        prefix: the first words of every metric's name.
    """
    tables: dict[str, Table] = {}
    for line, points in protocol.lines.items():
        inside = protocol.inside(points)
        is_first = line == next(iter(protocol.lines))
        suffix, words = ("", "") if is_first else (f"_{line}", f", {line}")
        for i, digit in enumerate(RARE):
            own = {name: found[line][:, i] for name, found in errors.items()}
            absolute, relative = inside_and_outside(own, blank[line][i], inside)
            names = f"{prefix}{{variant}}_digit{digit}_{{quantity}}{suffix}"
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
    absolute, relative = dict[str, Numbers](), dict[str, Numbers]()
    for where, chosen in (("inside", inside), ("outside", ~inside)):
        black = blank[chosen].mean()
        means = {name: error[:, chosen].mean(1) for name, error in errors.items()}
        absolute[where] = {"blank": single(black)}
        absolute[where] |= {name: mean_and_error(error) for name, error in means.items()}
        relative[where] = {name: mean_and_error(error / black) for name, error in means.items()}
    absolute["ratio"] = {
        name: mean_and_error(error[:, ~inside].mean(1) / error[:, inside].mean(1))
        for name, error in errors.items()
    }
    return absolute, relative


def inferred_angles(entry: Entry, data: Dataset, options: Options, number: int) -> Number:
    """Return the median error, in degrees, of the angles inferred from turned test images.

    Args:
        number: number of images, which are of the usual classes.
    """
    usual = torch.isin(data.test.labels, torch.tensor(RARE), invert=True)
    _, angles, found = turned(entry, data.test.images[usual][:number], options.seed)
    error = ((found - angles + 180) % 360 - 180).abs()
    return median_and_error(error.squeeze(1), seed=options.seed)


def turned(entry: Entry, images: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return images at random angles, the angles (B, 1), and the inferred angles, in degrees."""
    generator = torch.Generator().manual_seed(seed)
    angles = 360 * torch.rand(len(images), 1, generator=generator) - 180
    moved, grid = Rotations().move(images, angles), torch.arange(-180.0, 180.0, 15.0)
    found = infer_transformation(entry.model, entry.guide, moved, Rotations(), grid=grid)
    return moved, angles, found.best


def curves(errors: Mapping[str, Errors], blank: Errors, protocol: Protocol, line: str) -> Figure:
    """Draw the errors along one line, with a panel for each rare class."""
    units = "degrees" if isinstance(protocol.requests, Rotations) else "pixels"
    titles = {f"digit {digit}": i for i, digit in enumerate(RARE)}
    return error_curves(
        {title: {n: e[line][:, i] for n, e in errors.items()} for title, i in titles.items()},
        [point[0] for point in protocol.lines[line]],
        protocol.rare,
        {title: blank[line][i] for title, i in titles.items()},
        f"request ({units})",
    )


@torch.no_grad()
def painted(entries: Mapping[str, Entry], data: Dataset, protocol: Protocol) -> Figure:
    """Draw a digit 4 as requested along the first line, and as every decoder renders it."""
    requests = some_requests(data, protocol)
    images = of_class(data, RARE[0])[:1].expand(len(requests), -1, -1, -1)
    numbers = protocol.requests.numbers(requests)
    rows = {"requested": protocol.requests.move(images, requests)}
    for name, entry in entries.items():
        rows[name] = entry.model.mean_image(entry.guide.expectations(images), numbers)
    return image_rows(rows, "A test digit of a rare class, as requested")


@torch.no_grad()
def concepts(entry: Entry, data: Dataset, protocol: Protocol) -> Figure:
    """Draw the first ten codes with a single unit, or a single kind, along the first line.

    A unit has its largest value on test images; a kind is certain, and its pose is zero.
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
