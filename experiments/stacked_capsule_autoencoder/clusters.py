"""Stacked capsule autoencoders on MNIST, next to part-whole capsules, and without its terms."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from pyro import poutine
from torch import Tensor

from capsule_zoo.data import Dataset, load_dataset, transforms
from capsule_zoo.experiments import Job, Options, Result, Study, begun, experiment, train
from capsule_zoo.experiments.common.findings import (
    by_quantity,
    over_seeds,
    pictures,
    single,
    snake_case,
    squared_error,
)
from capsule_zoo.experiments.part_whole.transformations import (
    DEGREES,
    FEATURES,
    LARGE,
    ObjectProbe,
    rotated,
)
from capsule_zoo.experiments.shape_codes.affnist import in_the_middle
from capsule_zoo.experiments.training import photographs
from capsule_zoo.inference import Checks, cluster_accuracy, latents, linear_probe, reconstruct
from capsule_zoo.inference.objectives.stacked_capsules import drawn_capsules
from capsule_zoo.models.common.modes import in_eval_mode, seeded
from capsule_zoo.records import Metrics, Numbers, Table
from capsule_zoo.registry import Entry, load, read_recipe

ENTRIES = ("stacked-capsule-autoencoder", "part-whole")
SITES = {
    "presence": ["object_presence"],
    "presence_pose": ["object_presence", "object_pose"],
    "part_presence_pose": ["part_presence", "part_pose"],
}
BATCH_SIZE = 32  # of both models; larger ones learn less in equal time
# By data set and entry; on 40x40 pixels digits are as large as on 28x28.
SIZES: Mapping[tuple[str, str], Mapping[str, Any]] = {
    ("affnist", ENTRIES[0]): {"reader": dict(max_scale=0.8 * 28 / 40, coordinates=True)},
    ("affnist", ENTRIES[1]): LARGE,
    ("cifar10", ENTRIES[1]): {"background": "learned"},
}
MOVED = transforms.Affine(degrees=20, shear=0.2, scale=(0.8, 1.2), shift=2)  # as in affNIST


def explained(entry: Entry, images: Tensor, batch_size: int = 500) -> np.ndarray:
    """Return the share of the parts that each object explains, (N, objects), without noise."""
    guide, found = entry.guide, []
    quiet = guide.with_switches(noise="none") if hasattr(guide, "with_switches") else guide
    with torch.no_grad(), in_eval_mode(guide), seeded(0):
        for batch in images.split(batch_size):
            trace = poutine.trace(quiet).get_trace(batch)
            objects, parts = (drawn_capsules(trace, level.name) for level in entry.model.levels)
            found.append(entry.model.responsibilities(objects, parts)[..., 1:].mean(-2))
    return torch.cat(found).cpu().numpy()


def features(entry: Entry, images: Tensor) -> dict[str, np.ndarray]:
    """Return what probes and clusters read: presences, poses, and what objects explain."""
    found = {name: latents(entry.guide, images, sites) for name, sites in SITES.items()}
    if entry.name == ENTRIES[0]:
        found["explained"] = explained(entry, images)
    return found


def measure(entry: Entry, data: Dataset, probed: int, tested: int) -> Numbers:
    """Return probes and matched clusters on latents, and the squared error of reconstructions."""
    train_images, labels = data.train.images[:probed], data.train.labels[:probed]
    images, answers = data.test.images[:tested], data.test.labels[:tested]
    seen, unseen = features(entry, train_images), features(entry, images)
    found: Numbers = {}
    for name, known in seen.items():
        found[f"probe_{name}"] = linear_probe(known, labels, unseen[name], answers)
        if name in ("presence", "explained"):
            found[f"clusters_{name}"] = cluster_accuracy(known, labels, unseen[name], answers)
    painted = reconstruct(entry.model, entry.guide, images)
    return {**found, "squared_error": squared_error(painted, images)}


def generalization(
    entry: Entry, data: Dataset, probed: int, curved: int
) -> tuple[Numbers, Numbers]:
    """Return the accuracy of an upright probe on moved test images, and on turned ones by angle."""
    probe = ObjectProbe(entry, data.train[:probed], FEATURES["presence_pose"])
    moved = MOVED(data.test.images, generator=torch.Generator().manual_seed(4)).clamp(0, 1)
    turned: Numbers = {f"{a:g}": probe(rotated(data.test[:curved], a)) for a in DEGREES}
    return {"moved_presence_pose": probe(replace(data.test, images=moved))}, turned


@dataclass(frozen=True)
class Settings:
    """The settings of `mnist`, `affnist` and `cifar10`.

    Args:
        probed: number of training images that probes and clusters are fitted on.
        tested: number of test images.
        curved: number of test images at each rotation.
        sizes: sizes of each entry that replace the experiment's.
        seeds: number of seeds; they share the minutes.
    """

    probed: int = 10_000
    tested: int = 10_000
    curved: int = 500
    sizes: Mapping[str, Mapping[str, Any]] | None = None
    seeds: int = 1


@experiment("stacked-capsule-autoencoder/affnist", data="affnist", minutes=120)
def affnist(options: Options, chosen: Settings) -> Result:
    """Train both on shifted digits, and read digits under affine maps (two hours).

    Images have 40x40 pixels, and every image is seen with its ink in the middle. Models, probes
    and clusters see shifted training digits only. See `mnist`.
    """
    found, _, entry = trained_both("affnist", options, chosen)
    drawn = pictures(entry, read("affnist", options).test.images[:12])
    return Result(by_quantity(found), drawn, None, entry)


def read(name: str, options: Options) -> Dataset:
    """Return a data set: "affnist" with all ink in the middle, "cifar10" as `photographs` does."""
    if name == "cifar10":
        return photographs(name, options)
    data = load_dataset(name, root=options.data_root)
    return data.transformed(in_the_middle) if name == "affnist" else data


def trained_both(
    data: str, options: Options, settings: Settings
) -> tuple[dict[str, Numbers], dict[str, Numbers], Entry]:
    """Train and measure both entries.

    Returns:
        Numbers and curves of rotations by entry, and the stacked capsule autoencoder of the first
        seed.
    """
    timed = replace(options, minutes=options.budget)
    study = Study(dict.fromkeys(ENTRIES), settings.seeds)
    outcomes = study.run(learn, timed, source=data, chosen=settings)
    found: dict[str, Numbers] = {}
    curves: dict[str, Numbers] = {}
    for name in ENTRIES:
        numbers, of_angles = zip(*outcomes[name], strict=True)
        found[snake_case(name)] = over_seeds(numbers)
        curves[snake_case(name)] = over_seeds(of_angles)
    return found, curves, load(study.folders(timed)[ENTRIES[0]])


def learn(job: Job, *, source: str, chosen: Settings) -> tuple[Numbers, Numbers]:
    """Train the entry of the job's name and measure it, also on turned digits."""
    name, options = job.name, job.options
    data = read(source, options)
    data = replace(data, test=data.test[: chosen.tested])
    sizes = {**SIZES.get((source, name), {}), **(chosen.sizes or {}).get(name, {})}
    entry = begun(name, data, options, **sizes)
    length: dict[str, Any] = dict(minutes=options.budget, checks=Checks(clock="processor"))
    run = train(entry, data, options, in_stages=True, batch_size=BATCH_SIZE, **length)
    numbers: Numbers = {
        **measure(entry, data, chosen.probed, chosen.tested),
        "steps": single(run.steps),
        "core_minutes": single(run.seconds / 60),
    }
    curve: Numbers = {}
    if source == "mnist":
        moved, curve = generalization(entry, data, chosen.probed, chosen.curved)
        numbers |= moved
    return numbers, curve


WEIGHTS = "stacked-capsule-autoencoder-mnist"
RUNS = (WEIGHTS, f"runs/{WEIGHTS}-1", f"runs/{WEIGHTS}-2")


@experiment("stacked-capsule-autoencoder/seeds", data="mnist")
def seeds(
    options: Options,
    *,
    runs: tuple[str, ...] = RUNS,
    probed: int = Settings.probed,
    tested: int = Settings.tested,
) -> Result:
    """Measure the published weights and runs from other seeds (2 minutes).

    They are measured as in `mnist`. The other runs are trained first, each by the command on the
    card of the weights with another seed: `capsule-zoo train stacked-capsule-autoencoder --data
    mnist --batch-size 32 --steps 60000 --seed 1`. Rows are seeds; `mean` is over the seeds, with
    the standard error of the mean. The pictures are of the first run.

    Args:
        runs: names of weights, or run folders.
        probed: number of training images that probes and clusters are fitted on.
        tested: number of test images.
    """
    data = load_dataset("mnist", root=options.data_root)
    found: dict[str, Numbers] = {}
    for run in runs:
        options.say(f"Measuring {run}")
        found[f"seed_{read_recipe(run)['seed']}"] = measure(load(run), data, probed, tested)
    rows = {**found, "mean": over_seeds(list(found.values()))}
    metrics: Metrics = {"weights": Table(by_quantity(rows))}
    return Result(metrics, pictures(load(runs[0]), data.test.images[:12]))
