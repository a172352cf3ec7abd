"""Time to quality: how long training takes until digits are read, and until samples look right."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from capsule_zoo.data import Split, load_dataset
from capsule_zoo.experiments import Job, Options, Result, Study, begun, choose, experiment, train
from capsule_zoo.experiments.common.findings import by_quantity, single, snake_case
from capsule_zoo.experiments.part_whole.headline import WITH_POSES
from capsule_zoo.experiments.part_whole.prior import looks
from capsule_zoo.experiments.shape_codes.headline import ObjectSettings, read_objects
from capsule_zoo.figures.curves import qualities_in_time
from capsule_zoo.inference import latents, linear_probe, mean_images, train_classifier
from capsule_zoo.records import Number, Numbers, Table
from capsule_zoo.registry import Entry, load, save
from capsule_zoo.zoo.shape_codes.entry import part_sets

LENGTHS: Mapping[str, tuple[float, ...]] = {
    "shape-codes": (0.5, 1, 2, 4, 8),
    "part-whole": (8,),
    "stacked-capsule-autoencoder": (8,),
    "vae": (1, 2, 4),
}
GOALS = {"probe": (0.95, 0.97), "frechet": (60.0, 40.0)}


@dataclass(frozen=True)
class Settings:
    """The settings of the experiment.

    Args:
        lengths: minutes of the training runs of each entry, by default those of `LENGTHS`; they
            shrink with the minutes.
        probed: training images that probes are fitted on.
        samples: samples of the prior, and test images that they are compared with.
        epochs: epochs of the classifier whose features are compared.
        sizes: sizes of each entry that replace the zoo's own.
    """

    lengths: Mapping[str, Sequence[float]] | None = None
    probed: int = 10_000
    samples: int = 5000
    epochs: int = 3
    sizes: Mapping[str, Mapping[str, Any]] | None = None


@experiment("shape-codes/time-to-quality", data="mnist", minutes=40)
def time_to_quality(options: Options, chosen: Settings) -> Result:
    """Measure the time until probes and samples of the prior are good (40 core-minutes).

    Every point is a training run of its own, from scratch, on one thread, as `capsule-zoo train
    <entry> --minutes M` makes it, with its learning rate falling to the end. `core_minutes` is the
    processor time of the whole training, with the parses and closed forms between its stages.

    `probe` is a linear classifier on the objects of shape codes (see `shape-codes/objects`), on
    presences and poses of other objects, and on the means of a VAE's code.
    `frechet` compares samples of the prior with test images. `minutes_to_...` is the time of the
    first run that reaches a goal, if one does.
    """
    lengths_of = LENGTHS if chosen.lengths is None else chosen.lengths
    choose("entry", tuple(lengths_of), LENGTHS)
    pairs = [(entry, minutes) for entry, lengths in lengths_of.items() for minutes in lengths]
    timed = replace(options, minutes=options.budget)
    options.say(f"Training {len(pairs)} models in {options.budget:.3g} minutes")
    costs = {f"{entry}-{minutes:g}": float(minutes) for entry, minutes in pairs}
    study = Study({f"{entry}-{minutes:g}": entry for entry, minutes in pairs}, costs=costs)
    runs = study.run(learn, timed, chosen=chosen)
    options.say("Comparing samples with test images")
    distances = distances_of(study.folders(timed), chosen, options)
    found: dict[str, dict[str, Numbers]] = {
        entry: {
            f"{m:g}".replace(".", "_"): {
                **runs[f"{entry}-{m:g}"][0],
                "frechet": distances[f"{entry}-{m:g}"],
            }
            for m in lengths
        }
        for entry, lengths in lengths_of.items()
    }
    tables = {
        f"minutes of {entry}": Table(
            by_quantity(rows), f"{{quantity}}_{snake_case(entry)}_{{variant}}"
        )
        for entry, rows in found.items()
    }
    goals = by_quantity({snake_case(e): first_times([*rows.values()]) for e, rows in found.items()})
    shown = {"": qualities_in_time({e: list(rows.values()) for e, rows in found.items()}, GOALS)}
    return Result({**tables, "goals": Table(goals)}, shown)


def first_times(rows: Sequence[Mapping[str, Sequence]]) -> Numbers:
    """Return the core-minutes of the shortest run that reaches each goal, of those that do."""
    found: Numbers = {}
    for quality, goals in GOALS.items():
        sign = 1 if quality == "probe" else -1
        for goal in goals:
            good = [r["core_minutes"][0] for r in rows if sign * r[quality][0] >= sign * goal]
            if good:
                name = f"minutes_to_{quality}_{goal:g}".replace(".", "")
                found[name] = single(min(good))
    return found


def learn(job: Job[str], *, chosen: Settings) -> dict[str, Number]:
    """Train one entry for the minutes of the job, measure it, and save it in the job's folder.

    Nothing is saved before the end: an interrupted run starts again, because its processor time
    would be lost.
    """
    name, options = job.variant, job.options
    data = load_dataset("mnist", root=options.data_root)
    entry = begun(name, data, options, **(chosen.sizes or {}).get(name, {}))
    began = time.process_time()
    run = train(entry, data, replace(options, runs=None), options.budget, in_stages=True)
    spent = (time.process_time() - began) / 60
    if job.folder:
        save(entry, job.folder, data=data.name, seed=options.seed)
    few = data.train[: chosen.probed]
    penalty = ObjectSettings().penalty if name == "shape-codes" else 1.0
    given, asked = (features(entry, split) for split in (few, data.test))
    return {
        "core_minutes": single(spent),
        "updates": single(run.steps),
        "probe": linear_probe(given, few.labels, asked, data.test.labels, penalty),
    }


def features(entry: Entry, split: Split) -> np.ndarray:
    """Return what the probe reads of images, (N, features)."""
    if entry.name == "shape-codes":
        sets = part_sets(entry.guide.with_scope("parts"), split).images
        return read_objects(entry.guide, sets, ObjectSettings().temperature).features()
    sites = list(entry.guide.covers) if entry.name == "vae" else WITH_POSES
    return latents(entry.guide, split.images, sites)


def distances_of(folders: Mapping[str, Path], chosen: Settings, options: Options) -> Numbers:
    """Return the Frechet distance to test images of samples of each saved entry's prior."""
    data = load_dataset("mnist", root=options.data_root)
    how = dict(epochs=chosen.epochs, seed=options.seed)
    classifier = train_classifier(data.train, data.num_classes, **how)
    real = classifier.read(data.test.images[: chosen.samples])
    found: Numbers = {}
    for name, folder in folders.items():
        samples = mean_images(load(folder).model, len(real.features), seed=options.seed)
        found[name] = looks(classifier.read(samples), real)["frechet"]
    return found
