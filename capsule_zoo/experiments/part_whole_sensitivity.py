"""How much part-whole capsules depend on their settings, on their start, and on a third level."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyro

from capsule_zoo.data import Dataset, load_dataset
from capsule_zoo.experiments import Options, Result, experiment
from capsule_zoo.experiments.findings import by_quantity, held_out_bounds
from capsule_zoo.experiments.part_whole import PROBED, WITH_POSES, probes, tighten
from capsule_zoo.experiments.study import Job, Study, choose
from capsule_zoo.experiments.training import train
from capsule_zoo.figures.curves import accuracies_in_time
from capsule_zoo.inference.evaluation.probe import latents, linear_probe
from capsule_zoo.inference.training.callbacks import Check
from capsule_zoo.records import Numbers, write_json
from capsule_zoo.registry import create

TIGHTENING = 0.2  # share of a variant's time, for a guide with a density


@dataclass(frozen=True)
class Variant:
    """One training run.

    Attributes:
        sizes: sizes of the entry that replace its own.
        sampled: draw poses from normal laws from the first update, in place of points first.
    """

    sizes: Mapping[str, Any] = field(default_factory=dict)
    sampled: bool = False


VARIANTS = {
    "default": Variant(),
    "temperature_025": Variant({"temperature": 0.25}),
    "temperature_1": Variant({"temperature": 1.0}),
    "sigma_min_001": Variant({"sigma_min": 0.01}),
    "sigma_min_005": Variant({"sigma_min": 0.05}),
    "three_levels": Variant({"layers": (16, 24, 16)}),
    "sampled": Variant(sampled=True),
}


@dataclass(frozen=True)
class Settings:
    """The settings of the experiment.

    Args:
        variants: names of the variants.
        images: number of held-out images of the bounds.
        particles: number of draws of the IWAE bound.
        points: number of times at which the probe is measured during training.
        probed: training images, and test images, of these probes.
    """

    variants: tuple[str, ...] = tuple(VARIANTS)
    images: int = 1000
    particles: int = 50
    points: int = 8
    probed: int = 2000


@dataclass(frozen=True)
class Task:
    """The training of one variant, and the settings of all."""

    variant: Variant
    settings: Settings


@experiment("part-whole/sensitivity", data="mnist", minutes=105, takes=Settings)
def sensitivity(options: Options, **settings: Any) -> Result:
    """Try other temperatures, deviations and starts, and a third level (105 core-minutes).

    All runs share the minutes. Each is trained with points as poses, and then with normal laws,
    the model frozen. `sampled` has normal laws from the first update. `three_levels` has 16
    objects, 24 groups and 16 parts. The figure shows a linear probe on presences and poses of
    objects as training goes on.
    """
    options.refuse_run()
    chosen = Settings(**settings)
    variants = choose("variant", chosen.variants, VARIANTS)
    study = Study({name: Task(each, chosen) for name, each in variants.items()})
    options.say(f"Training {len(variants)} variants in {options.budget:.3g} core-minutes")
    runs = study.run(learn, replace(options, minutes=options.budget))
    found = {name: runs[name, options.seed] for name in variants}
    numbers = {name: run["numbers"] for name, run in found.items()}
    curves = {name: run["curve"] for name, run in found.items()}
    return Result(by_quantity(numbers), {"": accuracies_in_time(curves)})


def learn(job: Job[Task]) -> dict[str, Any]:
    """Train one variant; return what is measured, and its probes as training went on."""
    variant, chosen, options = job.variant.variant, job.variant.settings, job.options
    data = load_dataset("mnist", root=options.data_root)
    pyro.set_rng_seed(options.seed)
    entry = create("part-whole", image_shape=data.image_shape, **variant.sizes)
    if variant.sampled:
        entry = entry.use_guide("normal")
    minutes = options.budget * (1 if variant.sampled else 1 - TIGHTENING)
    every = 60 * minutes / chosen.points
    curve = ProbesInTime(data, chosen.probed, every, job.folder and job.folder / "curve.json")
    run = train(entry, data, options, minutes, name="run", callbacks=[curve])
    normal = entry
    if not variant.sampled:
        limit = TIGHTENING * options.budget
        normal = tighten(entry, data, options, name="tightened", minutes=limit)
    few = data.test[: chosen.images]
    numbers: Numbers = {
        "steps": (float(run.steps), None, 1),
        **probes(entry, data, min(PROBED, len(data.train))),
        **held_out_bounds(normal, few, chosen.particles, options.seed),
    }
    return {"numbers": numbers, "curve": curve.found}


class ProbesInTime:
    """A callback that probes the objects at equal times, and keeps the accuracies in a file.

    Args:
        data: the data set; the probe is fitted on its first training images.
        probed: number of training and of test images.
        every: seconds between two probes.
        path: the file, from which an interrupted run goes on; None to keep nothing.
    """

    def __init__(self, data: Dataset, probed: int, every: float, path: Path | None) -> None:
        self.splits = data.train[:probed], data.test[:probed]
        self.every = every
        self.path = path
        self.found: list[list[float]] = []
        if path is not None and path.is_file():
            self.found = json.loads(path.read_text())["found"]

    def __call__(self, check: Check) -> None:
        """Probe the guide, if the time has come; keep minutes, accuracy and its error."""
        if check.seconds < self.every * (len(self.found) + 1):
            return
        train, test = self.splits
        given, asked = (latents(check.guide, split.images, WITH_POSES) for split in self.splits)
        accuracy = linear_probe(given, train.labels, asked, test.labels)
        self.found.append([check.seconds / 60, accuracy.value, accuracy.se])
        if self.path is not None:
            write_json(self.path, {"found": self.found})
