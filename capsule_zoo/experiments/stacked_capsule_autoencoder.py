"""Stacked capsule autoencoders on MNIST, next to part-whole capsules, and without its terms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyro
import torch
from pyro import poutine
from torch import Tensor

from capsule_zoo.data import Dataset, Split, load_dataset, transforms
from capsule_zoo.experiments import Options, Result, experiment
from capsule_zoo.experiments.findings import by_quantity, pictures, squared_error
from capsule_zoo.experiments.study import Job, Study
from capsule_zoo.experiments.training import train, train_stages
from capsule_zoo.figures.curves import accuracy_curves
from capsule_zoo.inference import (
    cluster_accuracy,
    latents,
    linear_probe,
    reconstruct,
)
from capsule_zoo.inference.evaluation.probe import Accuracy, fit_probe
from capsule_zoo.inference.objectives.stacked_capsules import TERMS, drawn_capsules
from capsule_zoo.models.blocks.modes import in_eval_mode, seeded
from capsule_zoo.records import Metrics, Numbers, Table
from capsule_zoo.registry import Entry, create

ENTRIES = ("stacked-capsule-autoencoder", "part-whole")
SITES = {
    "presence": ["object_presence"],
    "presence_pose": ["object_presence", "object_pose"],
    "part_presence_pose": ["part_presence", "part_pose"],
}
DEGREES = tuple(range(0, 181, 15))
MOVED = transforms.Affine(degrees=20, shear=0.2, scale=(0.8, 1.2), shift=2)  # as in affNIST
WITHOUT = {f"no_{name}": {name: 0.0} for name in TERMS if name not in ("image", "parts")}
ABLATIONS: Mapping[str, Mapping[str, Any]] = {
    "all": {},
    **WITHOUT,
    "no_sparsity": {name: 0.0 for name in TERMS if name.startswith(("prior", "posterior"))},
    "no_noise": {"noise": "none"},
    "no_stop_inputs": {"stop_inputs": False},
    "no_stop_targets": {"stop_targets": False},
    "normalized": {"normalized": True},
}


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
) -> tuple[Numbers, dict[float, Accuracy]]:
    """Return the accuracy of an upright probe on moved test images, and on turned ones by angle."""

    def read(images: Tensor) -> np.ndarray:
        return latents(entry.guide, images, SITES["presence_pose"])

    def right(split: Split) -> Accuracy:
        answers = torch.from_numpy(probe.predict(read(split.images)))
        return Accuracy.of(answers == split.labels)

    few = data.train[:probed]
    probe = fit_probe(read(few.images), few.labels)
    moved = MOVED(data.test.images, generator=torch.Generator().manual_seed(4)).clamp(0, 1)
    turned: dict[float, Accuracy] = {}
    for angle in DEGREES:
        split = data.test[:curved]
        images = transforms.warp_images(split.images, transforms.motion(float(angle))).clamp(0, 1)
        turned[float(angle)] = right(replace(split, images=images))
    return {"moved_presence_pose": right(replace(data.test, images=moved))}, turned


@experiment(
    "stacked-capsule-autoencoder/mnist",
    data="mnist",
    minutes=60,
    role="comparison",
    lead="reconstructions",
)
def mnist(
    options: Options, *, probed: int = 10_000, tested: int = 10_000, curved: int = 500
) -> Result:
    """Train it and part-whole capsules on MNIST for equal times, and read the class (an hour).

    The two are trained one after the other. Probes are linear; clusters are found by k-means and
    named one to one. `moved_presence_pose` and the curve of rotations are of a probe on objects of
    upright training images, and test images that are turned, sheared, scaled and shifted a little,
    or turned alone.

    Args:
        probed: number of training images that probes and clusters are fitted on.
        tested: number of test images.
        curved: number of test images at each rotation.
    """
    options.refuse_run()
    data = load_dataset("mnist", root=options.data_root)
    data = replace(data, test=data.test[:tested])
    found: dict[str, Numbers] = {}
    curves: dict[str, dict[float, Accuracy]] = {}
    drawn: dict = {}
    first: Entry | None = None
    for name in ENTRIES:
        minutes = options.budget / len(ENTRIES)
        options.say(f"Training {name} on {len(data.train):,} images, {minutes:.3g} minutes")
        pyro.set_rng_seed(options.seed)
        entry = create(name, image_shape=data.image_shape)
        run = train_stages(entry, data, options, name=entry.name, minutes=minutes)
        options.say(f"Measuring {name}")
        key = name.replace("-", "_")
        moved, curves[key] = generalization(entry, data, probed, curved)
        steps = float(len(run.history)), None, 1
        found[key] = {**measure(entry, data, probed, tested), **moved, "steps": steps}
        if first is None:
            drawn |= pictures(entry, data.test.images[:12])
            first = entry
    turned = {
        name: {f"{angle:.0f}": value for angle, value in curve.items()}
        for name, curve in curves.items()
    }
    metrics: Metrics = {
        **by_quantity(found),
        "accuracy at degrees": Table(turned, "rotation_{quantity}_{variant}"),
    }
    label = "rotation of the test images (degrees)"
    drawn["rotations"] = accuracy_curves(curves, label, 1 / data.num_classes)
    return Result(metrics, drawn, None, first)


@dataclass(frozen=True)
class Ablation:
    """A training run with some terms or switches of the objective changed.

    Attributes:
        data: name of the data set.
        loss: arguments of `StackedCapsuleObjective`.
        steps: number of updates.
        batch_size: images of an update.
        probed, tested: see `mnist`.
        sizes: further arguments of `create`.
    """

    data: str
    loss: Mapping[str, Any]
    steps: int
    batch_size: int
    probed: int
    tested: int
    sizes: Mapping[str, Any] = field(default_factory=dict)


@experiment("stacked-capsule-autoencoder/ablations", data="mnist", minutes=60)
def ablations(
    options: Options,
    *,
    data: str = "mnist",
    steps: int = 1000,
    batch_size: int = 64,
    probed: int = 5000,
    tested: int = 2000,
    seeds: int = 1,
    sizes: Mapping[str, Any] = {},  # read only
) -> Result:
    """Train without each term, stop-gradient and noise, for equal numbers of updates (an hour).

    `loss_<term>` is the term on test images at the end, without its weight.

    Args:
        data: name of the data set.
        steps: updates of every run; they shrink with minutes.
        batch_size: images of an update.
        probed: number of training images that probes and clusters are fitted on.
        tested: number of test images.
        seeds: number of seeds.
        sizes: further arguments of `create`.
    """
    options.refuse_run()
    steps = options.shortened(steps)
    numbers: dict[str, Any] = dict(batch_size=batch_size, probed=probed, tested=tested, sizes=sizes)
    variants = {name: Ablation(data, loss, steps, **numbers) for name, loss in ABLATIONS.items()}
    options.say(f"Training {len(variants) * seeds} variants on {data}, {steps} steps each")
    outcomes = Study(variants, seeds).run(ablate, options)
    found: dict[str, Numbers] = {}
    for name in variants:
        rows = [outcome for (variant, _), outcome in outcomes.items() if variant == name]
        found[name] = {
            quantity: (float(np.mean([row[quantity][0] for row in rows])), *rows[0][quantity][1:])
            for quantity in rows[0]
        }
    return Result(by_quantity(found))


def ablate(job: Job[Ablation]) -> dict[str, list]:
    """Train one variant, and return its measures and the terms of its loss."""
    variant, options = job.variant, job.options
    pyro.set_rng_seed(options.seed)
    data = load_dataset(variant.data, root=options.data_root)
    sizes = {"image_shape": data.image_shape, **variant.sizes}
    entry = create(ENTRIES[0], **{**sizes, "loss": dict(variant.loss)})
    limits: dict[str, Any] = dict(steps=variant.steps, batch_size=variant.batch_size)
    train(entry, data, options, name=job.name, **limits)
    found: dict[str, Any] = measure(entry, data, variant.probed, variant.tested)
    with torch.no_grad(), seeded(0):
        few = data.test.images[: min(500, variant.tested)]
        terms = entry.objective.terms(entry.model, entry.guide, few)
    found |= {f"loss_{name}": (term.item(), None, len(few)) for name, term in terms.items()}
    return {name: list(number) for name, number in found.items()}
