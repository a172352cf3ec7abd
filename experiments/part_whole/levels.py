"""Part-whole capsules of three levels, trained level by level: classes and samples of the top."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import torch
from torch import Tensor

from capsule_zoo.data import Dataset, Split, load_dataset
from capsule_zoo.experiments import Job, Options, Result, Study, experiment, load_or_train, train
from capsule_zoo.experiments.common.findings import group_by_quantity, looks, means_of
from capsule_zoo.experiments.part_whole.classification import WITH_POSES
from capsule_zoo.figures.grids import image_rows
from capsule_zoo.guides import PartWholeGuide
from capsule_zoo.inference import infer, mean_images
from capsule_zoo.inference.probes import latents, linear_probe
from capsule_zoo.inference.sample_quality import train_classifier
from capsule_zoo.models import ObjectPose
from capsule_zoo.records import Metrics, Numbers, Table
from capsule_zoo.registry import Entry, load

BATCH_SIZE = 32
RATES = {"model": 7.5e-3, "guide": 3e-3}


@dataclass(frozen=True)
class Settings:
    """Settings of the experiment on a third level.

    Args:
        objects: numbers of new objects, one for each model.
        seeds: number of seeds for each model.
        steps: updates of the new level in a full run.
        sigma_top: standard deviation of a new object's pose. Poses of the trained objects differ by
            a few hundredths between images, and wider new objects would copy them.
        trained: number of training images whose objects the new level is trained on.
        probed: number of training images that probes are fitted on.
        samples: number of images in every Frechet distance.
        epochs: epochs of the classifier whose features are compared.
    """

    objects: tuple[int, ...] = (32,)
    seeds: int = 3
    steps: int = 1500
    sigma_top: float = 0.01
    trained: int = 20_000
    probed: int = 10_000
    samples: int = 5000
    epochs: int = 3


@experiment("part-whole/levels", data="mnist", minutes=60, of_runs=True)
def levels(options: Options, settings: Settings) -> Result:
    """Train a third level on the objects of a trained model (20 minutes, and 60 without a run).

    The objects of the trained model become the groups of a deeper model. Its new objects learn from
    the inferred groups, while the levels below are frozen. Linear probes compare the classes in the
    groups, in the new objects, and in the new objects before training (`..._untrained`). They use
    probabilities of presences, alone and with poses, or one sample of the presences (`drawn`).

    Samples of two and three levels are compared with test images. So are digits that are drawn
    again from their groups ("groups kept") or from their new objects ("top kept").
    """
    data = load_dataset("mnist", root=options.data_root)
    lower = load_or_train("part-whole", data, options)
    guide, number = lower.guide_of(PartWholeGuide), max(settings.trained, settings.probed)
    options.say(f"Encoding {min(number, len(data.train)):,} training images and the test images")
    groups = [
        Split(guide.reads(split.images, level=0), split.labels, "groups of mnist")
        for split in (data.train[:number], data.test)
    ]
    study = Study({str(objects): objects for objects in settings.objects}, settings.seeds)
    source = options.run or str(Path(options.runs or ".") / "trained")
    arguments: dict[str, Any] = dict(source=source, groups=groups, settings=settings)
    steps, untimed = options.shorten_steps(settings.steps), replace(options, minutes=None)
    numbers = means_of(study.run(learn_level, untimed, steps=steps, **arguments))
    numbers["groups"] = probe([read_groups(split) for split in groups], groups, settings.probed)
    deepest = load(study.folders(untimed)[str(max(settings.objects))])
    images = draw_images(guide, deepest, data, settings.samples, options.seed)
    options.say("Training a classifier on the digits, for its features")
    training = dict(epochs=settings.epochs, seed=options.seed)
    classifier = train_classifier(data.train, data.num_classes, **training)
    real = classifier.read(data.test.images[: settings.samples])
    judged = {name: looks(classifier.read(drawn), real) for name, drawn in images.items()}
    metrics: Metrics = {**group_by_quantity(numbers), "samples": Table(group_by_quantity(judged))}
    rows = {name.replace("_", " "): drawn[:12] for name, drawn in images.items()}
    figure = image_rows(rows, "Digits, samples of two and of three levels, and digits drawn again")
    return Result(metrics, {"": figure}, None, deepest)


def learn_level(
    job: Job[int], *, source: str, groups: Sequence[Split], steps: int, settings: Settings
) -> Numbers:
    """Train a level of new objects on top of a trained entry, and probe it."""
    lower, options = load(source), job.options
    pyro.set_rng_seed(options.seed)
    prior = ObjectPose(sigma_top=settings.sigma_top)
    guide = lower.guide_of(PartWholeGuide).with_level_on_top(job.variant, prior)
    scoped = guide.with_scope("objects")
    entry, trained = replace(lower, model=scoped.model, guide=scoped), groups[0][: settings.trained]
    with torch.no_grad():  # running statistics of the groups
        for batch in trained.images[:10_000].split(100):
            scoped.train()(batch)
    before = probe_objects(scoped, groups, settings.probed)
    limits: dict[str, Any] = dict(steps=steps, batch_size=BATCH_SIZE, lr=RATES)
    train(entry, trained, options, **limits)
    after = probe_objects(scoped, groups, settings.probed)
    return {**after, **{f"{name}_untrained": accuracy for name, accuracy in before.items()}}


def probe_objects(guide: PartWholeGuide, groups: Sequence[Split], probed: int) -> Numbers:
    """Return the accuracies of linear probes on new objects, inferred from groups."""
    return probe([latents(guide, split.images, WITH_POSES) for split in groups], groups, probed)


def probe(rows: Sequence[np.ndarray], splits: Sequence[Split], probed: int) -> Numbers:
    """Return the accuracies of probes on presences (and poses), and on samples of presences.

    Args:
        rows: features of training and test images, (N, 7 capsules) each: probabilities of
            presences, then poses.
        splits: training and test split, for their labels.
        probed: number of training images that probes are fitted on.
    """
    random = np.random.default_rng(0)
    presences = [row[:, : row.shape[1] // 7] for row in rows]
    features = {
        "probe_presence": presences,
        "probe_presence_pose": rows,
        "probe_drawn": [1.0 * (random.random(p.shape) < p) for p in presences],
    }
    labels = [split.labels for split in splits]
    return {
        name: linear_probe(fitted[:probed], labels[0][:probed], tested, labels[1])
        for name, (fitted, tested) in features.items()
    }


def read_groups(split: Split) -> np.ndarray:
    """Return probabilities of presences, and poses, of groups, (N, 7 groups)."""
    presence, pose = split.images.squeeze(1).split([1, 6], dim=-1)
    return torch.cat([presence.sigmoid().flatten(1), pose.flatten(1)], dim=1).numpy()


def draw_images(
    lower: PartWholeGuide, deepest: Entry, data: Dataset, number: int, seed: int
) -> dict[str, Tensor]:
    """Return digits, samples, and digits drawn again from capsules of two levels, by name."""
    images = data.train.images[:number]
    guide = deepest.guide_of(PartWholeGuide).with_scope("scene")
    groups = infer(lower, images, WITH_POSES, seed)
    top = infer(guide, images, WITH_POSES, seed)
    return {
        "digits": images,
        "two_levels": mean_images(lower.model, number, seed=seed),
        "three_levels": mean_images(guide.model, number, seed=seed),
        "groups_kept": mean_images(lower.model, number, groups, seed),
        "top_kept": mean_images(guide.model, number, top, seed),
    }
