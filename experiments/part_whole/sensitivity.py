"""How much part-whole capsules depend on their settings, on their start, and on a third level."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from capsule_zoo.data import Dataset, load_dataset
from capsule_zoo.experiments import Job, Options, Result, Study, begun, choose, experiment, train
from capsule_zoo.experiments.common.findings import by_quantity, held_out_bounds
from capsule_zoo.experiments.part_whole.headline import PROBED, WITH_POSES, probes, tighten
from capsule_zoo.figures.curves import number_curves
from capsule_zoo.inference import Check, Checks, latents, linear_probe
from capsule_zoo.records import Numbers, write_json


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
        steps: updates of every variant in a full run.
        tightening: further updates, for a guide with a density.
        batch_size: images of an update. Small batches learn faster for their time.
        images: number of held-out images of the bounds.
        particles: number of draws of the IWAE bound.
        points: number of times that the probe is measured during training.
        probed: training images, and test images, of these probes.
    """

    variants: tuple[str, ...] = tuple(VARIANTS)
    steps: int = 3000
    tightening: int = 600
    batch_size: int = 32
    images: int = 1000
    particles: int = 50
    points: int = 8
    probed: int = 2000


@experiment("part-whole/sensitivity", data="mnist", minutes=40)
def sensitivity(options: Options, chosen: Settings) -> Result:
    """Try other temperatures, deviations and starts, and a third level (40 core-minutes).

    All variants take equally many updates, with points as poses, and then with normal laws, the
    model frozen. `sampled` has normal laws from the first update to the last. `three_levels` has
    16 objects, 24 groups and 16 parts. The figure shows a linear probe on presences and poses of
    objects as training goes on.
    """
    steps, more = (options.shortened(number) for number in (chosen.steps, chosen.tightening))
    chosen = replace(chosen, steps=steps, tightening=more)
    study = Study(choose("variant", chosen.variants, VARIANTS))
    options.say(f"Training {len(study.variants)} variants for {steps + more} updates")
    found = study.run(learn, replace(options, minutes=None), chosen=chosen)
    numbers = {name: run["numbers"] for name, (run,) in found.items()}
    curves = {
        name: {f"{updates:g}": (value, se, chosen.probed) for updates, value, se in run["curve"]}
        for name, (run,) in found.items()
    }
    figure = number_curves({"accuracy of a linear probe": curves}, "updates")
    return Result(by_quantity(numbers), {"": figure})


def learn(job: Job[Variant], *, chosen: Settings) -> dict[str, Any]:
    """Train one variant; return what is measured, and its probes as training went on."""
    variant, options = job.variant, job.options
    data = load_dataset("mnist", root=options.data_root)
    entry = begun("part-whole", data, options, **variant.sizes)
    steps = chosen.steps
    if variant.sampled:
        entry = entry.use_guide("normal")
        steps += chosen.tightening
    curve = ProbesInTraining(data, chosen.probed, job.folder and job.folder / "curve.json")
    how: dict[str, Any] = dict(
        checks=Checks(callbacks=[curve], every=max(1, steps // chosen.points))
    )
    few_at_once: dict[str, Any] = dict(batch_size=chosen.batch_size)
    train(entry, data, options, steps=steps, **how, **few_at_once)
    normal = entry
    if not variant.sampled:
        limit: dict[str, Any] = dict(name="tightened", steps=chosen.tightening)
        normal = tighten(entry, data, options, **limit, **few_at_once)
    few = data.test[: chosen.images]
    numbers: Numbers = {
        **probes(entry, data, min(PROBED, len(data.train))),
        **held_out_bounds(normal, few, chosen.particles, options.seed),
    }
    return {"numbers": numbers, "curve": curve.found}


class ProbesInTraining:
    """A callback that probes the objects at every check, and keeps the accuracies in a file.

    Args:
        data: the data set; the probe is fitted on its first training images.
        probed: number of training and of test images.
        path: the file, from which an interrupted run goes on; None to keep nothing.
    """

    def __init__(self, data: Dataset, probed: int, path: Path | None) -> None:
        self.splits = data.train[:probed], data.test[:probed]
        self.path = path
        self.found: list[list[float]] = []
        if path is not None and path.is_file():
            self.found = json.loads(path.read_text())["found"]

    def __call__(self, check: Check) -> None:
        """Probe the guide; keep the number of updates, the accuracy and its error."""
        if self.found and check.step <= self.found[-1][0]:
            return  # an interrupted run comes here again
        train, test = self.splits
        given, asked = (latents(check.guide, split.images, WITH_POSES) for split in self.splits)
        accuracy = linear_probe(given, train.labels, asked, test.labels)
        self.found.append([float(check.step), accuracy.value, accuracy.se])
        if self.path is not None:
            write_json(self.path, {"found": self.found})
