"""Part-whole capsules and transformed images: what carries over, and what augmentation costs.

The paper (Smith et al. 2020) finds that rotating the training images hurts on upright ones, and
blames parts that are affine copies of each other. `augment` measures it, and tries two ways out:
parts that share their templates, and a guide that turns each image to where the model, whose
objects may stand at any angle, explains it best.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pandas as pd
import pyro
import torch
from torch import Tensor
from torch.nn import functional as F

from capsule_zoo.accuracy_figures import accuracy_curves
from capsule_zoo.data import Dataset, Split, load_dataset, transforms
from capsule_zoo.entries.part_whole import GUIDE_SIZES
from capsule_zoo.experiments import Options, Result, experiment
from capsule_zoo.experiments.part_whole import WITH_POSES, pictures
from capsule_zoo.figures import image_rows
from capsule_zoo.guides.turns import best_turn, turned
from capsule_zoo.inference import fit
from capsule_zoo.inference.probe import Accuracy, fit_probe, latents
from capsule_zoo.registry import Entry, create, load, save

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Metrics = dict[str, tuple[float, float | None, int]]
PROBED = 10_000  # training images that a probe is fitted on
TURNS = 16  # that are tried at test time
BORDER = 6  # pixels around MNIST's 28x28, and the largest shift
# On 40x40 pixels the digits are as large as on 28x28, so the parts' bound shrinks in proportion;
# places must be known farther from the edge than the encoder sees; and digits do not stand still.
LARGE = {
    "guide_sizes": {**GUIDE_SIZES, "max_scale": 0.8 * 28 / 40, "coordinates": True},
    "sigma_place": 0.2,
}
CURVE, CURVE_IMAGES = tuple(range(0, 181, 15)), 1000  # degrees, and test images for each


class ObjectProbe:
    """A linear probe on the objects' presences and poses, fitted on training images alone."""

    def __init__(self, entry: Entry, train: Split) -> None:
        self.guide = entry.guide
        self.classifier = fit_probe(self._features(train.images), train.labels)

    def __call__(self, images: Tensor, labels: Tensor) -> Accuracy:
        value = float(self.classifier.score(self._features(images), labels.numpy()))
        return Accuracy(value, (value * (1 - value) / len(labels)) ** 0.5, len(labels))

    def _features(self, images: Tensor) -> np.ndarray:
        return latents(self.guide, images, WITH_POSES)


def learn(
    data: Dataset,
    options: Options,
    transform: Callable[..., Tensor],
    minutes: float,
    sizes: Mapping[str, Any],
) -> tuple[Entry, int]:
    """An entry trained on transformed images for so long, and how many steps that were."""
    pyro.set_rng_seed(options.seed)
    entry = create("part-whole", image_shape=data.image_shape, **sizes)
    run = fit(
        entry.model,
        entry.guide,
        data,
        objective=entry.objective,
        transform=transform,
        minutes=minutes,
        seed=options.seed,
        device=options.device,
        progress=options.progress,
        **entry.training,
    )
    entry.model.cpu()
    entry.guide.cpu()
    return entry, run.steps


def turned_best(entry: Entry, images: Tensor) -> Tensor:
    """Each image at the turn that the model explains best, were its objects free to stand so."""
    model = entry.model.sharing_parameters(rotations=TURNS)
    return torch.cat(
        [turned(few, best_turn(entry.guide, few, TURNS, model)) for few in images.split(500)]
    )


def bordered(images: Tensor) -> Tensor:
    """28x28 images in the middle of 40x40 pixels."""
    return F.pad(images, (BORDER,) * 4)


@experiment("part-whole/generalise", data="affnist")
def generalise(options: Options) -> Result:
    """Trained on shifted digits: affine changes, rotations up to 180 degrees (30 minutes).

    MNIST on 40x40 pixels, without labels. The probe is fitted on objects inferred from shifted
    training images and asked about images of three kinds: `upright` in the middle, `affnist`, and
    `rotated` by angles uniform up to 180 degrees either way. "Turned" is the same probe when every
    image is first turned to where the model explains it best, one of 16 turns.
    """
    mnist = load_dataset("mnist", root=options.data_root).transformed(bordered)
    moved = load_dataset("affnist", root=options.data_root)
    rotated = load_dataset("rotated-mnist", root=options.data_root).test
    if options.run:
        entry = load(options.run)
    else:
        shift, minutes = transforms.Shift(BORDER), options.minutes or 30
        entry, _ = learn(mnist, options, shift, minutes, LARGE)
    pyro.set_rng_seed(options.seed)
    probe = ObjectProbe(entry, moved.train[:PROBED])
    asked = {
        "upright": mnist.test,
        "affnist": moved.test,
        "rotated": replace(rotated, images=bordered(rotated.images)),
    }
    metrics: Metrics = {}
    for name, split in asked.items():
        options.say(f"Asking about {len(split):,} {name} images")
        metrics[f"{name}_presence_pose"] = probe(split.images, split.labels)
        found = turned_best(entry, split.images)
        metrics[f"{name}_presence_pose_turned"] = probe(found, split.labels)
    curves = rotation_curves(entry, probe, mnist.test[:CURVE_IMAGES])
    for name, curve in curves.items():
        ending = "_turned" if "turned" in name else ""
        metrics |= {f"rotation_{degrees}{ending}": found for degrees, found in curve.items()}
    table = pd.DataFrame({n: {d: a.value for d, a in c.items()} for n, c in curves.items()})
    drawn = accuracy_curves(curves, "rotation of the test images (degrees)", 1 / mnist.num_classes)
    shown = {"rotations": drawn, **pictures(entry, moved.test.images)}
    return Result(metrics, shown, table, entry)


def rotation_curves(
    entry: Entry, probe: ObjectProbe, split: Split
) -> dict[str, dict[int, Accuracy]]:
    """The probe's accuracy on images rotated by each angle, as they are and turned best."""
    curves: dict[str, dict[int, Accuracy]] = {"as they are": {}, "turned best": {}}
    for degrees in CURVE:
        images = transforms.warp(split.images, transforms.motion(float(degrees))).clamp(0, 1)
        curves["as they are"][degrees] = probe(images, split.labels)
        curves["turned best"][degrees] = probe(turned_best(entry, images), split.labels)
    return curves


@dataclass(frozen=True)
class Variant:
    """One training run of `augment`.

    Attributes:
        degrees: training images are rotated by up to so much, either way.
        sizes: what differs from the entry's own.
        cost: of a step, beside the others'; its share of the time, so that all take as many.
    """

    degrees: float
    sizes: Mapping[str, Any] = field(default_factory=dict)
    cost: float = 1.0


TURNING = {"rotations": 24, "guide_sizes": {**GUIDE_SIZES, "turns": 4}}
VARIANTS = {
    "0": Variant(0),
    "45": Variant(45),
    "90": Variant(90),
    "180": Variant(180),
    "180_instances": Variant(180, {"instances": 2}),
    "180_canonical": Variant(180, TURNING, cost=2.0),
}


@experiment("part-whole/augment", data="mnist")
def augment(options: Options) -> Result:
    """The paradox: rotating the training images costs accuracy on upright ones (70 core-minutes).

    A model is trained for each range of rotations, and two more for the widest: one whose parts
    share templates in pairs, and one that is free to turn every image (`canonical`). `minutes` are
    those of all runs together, which go side by side where there are cores. Probes are fitted on
    training images alone and asked about upright test images (`probe_...`), and, fitted and asked
    anew, about images rotated as in training (`rotated_...`). At last the model that never saw a
    turned digit is shown digits rotated by up to 180 degrees, each turned to where it explains the
    image best, one of 16 turns (`rotated_presence_pose_0_turned`).

    Raises:
        ValueError: `run` is given; the experiment is about its own training runs.
    """
    if options.run:
        raise ValueError("part-whole/augment measures its own training runs; leave --run out")
    data = load_dataset("mnist", root=options.data_root)
    trained, metrics = train_variants(options)
    for name, entry in trained.items():
        options.say(f"Probing {name}")
        degrees = VARIANTS[name].degrees
        upright = ObjectProbe(entry, data.train[:PROBED])
        metrics[f"probe_presence_pose_{name}"] = upright(data.test.images, data.test.labels)
        if degrees:
            train, test = (rotated(s, degrees) for s in (data.train[:PROBED], data.test))
            among = ObjectProbe(entry, train)
            metrics[f"rotated_presence_pose_{name}"] = among(test.images, test.labels)
        else:
            for kind, split in (("probe", data.test), ("rotated", rotated(data.test, 180))):
                found = turned_best(entry, split.images)
                metrics[f"{kind}_presence_pose_{name}_turned"] = upright(found, split.labels)
    shown = {"": augmentation_figure(metrics, 1 / data.num_classes)}
    shown["canonical"] = turned_figure(trained["180_canonical"], rotated(data.test[:12], 180))
    return Result(metrics, shown, None, trained["180_canonical"])


def rotated(split: Split, degrees: float) -> Split:
    """Images rotated by angles uniform up to `degrees` either way, the same on every call."""
    generator = torch.Generator().manual_seed(4)
    images = [transforms.Rotate(degrees)(s, generator=generator) for s in split.images.split(2000)]
    return replace(split, images=torch.cat(images))


@dataclass(frozen=True)
class Job:
    """What a process needs to train one variant."""

    variant: Variant
    minutes: float
    options: Options
    folder: Path


def train_variant(job: Job) -> int:
    """Train one variant and save it into the job's folder; returns the number of steps."""
    data = load_dataset("mnist", root=job.options.data_root)
    rotate = transforms.Rotate(job.variant.degrees)
    entry, steps = learn(data, job.options, rotate, job.minutes, job.variant.sizes)
    save(entry, job.folder, data=data.name, seed=job.options.seed)
    return steps


def train_variants(options: Options) -> tuple[dict[str, Entry], Metrics]:
    """Every variant's trained entry, and how many steps each took."""
    costs = sum(variant.cost for variant in VARIANTS.values())
    minutes = (options.minutes or 10 * costs) / costs
    names = sorted(VARIANTS, key=lambda name: -VARIANTS[name].cost)  # longest first
    options.say(f"Training {len(names)} models, {minutes:.3g} minutes or twice that for each")
    with TemporaryDirectory() as folder:
        quiet = replace(options, progress=False)
        jobs = [
            Job(VARIANTS[name], minutes * VARIANTS[name].cost, quiet, Path(folder) / name)
            for name in names
        ]
        steps = dict(zip(names, side_by_side(train_variant, jobs), strict=True))
        entries = {name: load(Path(folder) / name) for name in VARIANTS}
    return entries, {f"steps_{name}": (float(steps[name]), None, 1) for name in VARIANTS}


_Job, _Found = TypeVar("_Job"), TypeVar("_Found")


def side_by_side(task: Callable[[_Job], _Found], jobs: Iterable[_Job]) -> list[_Found]:
    """The task of every job, each on one thread of its own process, as many as torch has threads.

    Two models of this size train faster side by side than one after the other on two threads.
    """
    context = get_context("spawn")  # a fork would inherit torch's threads, which do not survive it
    with ProcessPoolExecutor(
        torch.get_num_threads(), context, torch.set_num_threads, (1,)
    ) as processes:
        return list(processes.map(task, jobs))


def augmentation_figure(metrics: Metrics, chance: float) -> Figure:
    """Accuracy against the range of rotations in training."""
    kinds = {"probe": "upright", "rotated": "rotated as in training"}
    curves: dict[str, dict[float, Accuracy]] = {}
    for name, variant in VARIANTS.items():
        _, _, extra = name.partition("_")
        for kind, words in kinds.items():
            found = metrics.get(f"{kind}_presence_pose_{name}")
            if found is not None:
                label = f"{words}, {extra}" if extra else words
                curves.setdefault(label, {})[variant.degrees] = Accuracy(*found)
    return accuracy_curves(curves, "rotation of the training images (degrees, up to)", chance)


def turned_figure(entry: Entry, split: Split) -> Figure:
    """Digits rotated at random, and the turns at which the guide parses them."""
    angle = best_turn(entry.guide, split.images, entry.guide.options["turns"])
    return image_rows({"image": split.images, "as parsed": turned(split.images, angle)})
