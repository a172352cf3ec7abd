"""Part-whole capsules and transformed images: what carries over, and what augmentation costs.

The paper (Smith et al. 2020) finds that rotating the training images hurts on upright ones, and
blames parts that are affine copies of each other. `augment` measures it, and tries two ways out:
parts that share their templates, and a guide that turns each image to where the model, whose
objects may stand at any angle, explains it best.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyro
import torch
from torch import Tensor
from torch.nn import functional as F

from capsule_zoo.data import Dataset, Split, load_dataset, transforms
from capsule_zoo.entries.part_whole import GUIDE_SIZES
from capsule_zoo.experiments import Metrics, Options, Result, experiment
from capsule_zoo.experiments.findings import pictures
from capsule_zoo.experiments.part_whole import PROBED, WITH_POSES
from capsule_zoo.experiments.training import side_by_side, train
from capsule_zoo.figures.curves import accuracy_curves
from capsule_zoo.figures.grids import image_rows
from capsule_zoo.guides import PartWholeGuide
from capsule_zoo.guides.turns import best_turn, centred, turned
from capsule_zoo.inference.evaluation.probe import Accuracy, fit_probe, latents
from capsule_zoo.registry import Entry, create, load, save

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TURNS = 16  # that are tried at test time
BORDER = 6  # pixels around MNIST's 28x28, and the largest shift
# On 40x40 pixels the digits are as large as on 28x28, so the parts' bound shrinks in proportion;
# places must be known farther from the edge than the encoder sees; and digits do not stand still.
LARGE = {
    "guide_sizes": {
        **GUIDE_SIZES,
        "max_scale": 0.8 * 28 / 40,
        "coordinates": True,
        "centred": True,
    },
    "sigma_place": 0.2,
}
CURVE, CURVE_IMAGES = tuple(range(0, 181, 15)), 500  # degrees, and test images for each
TURNED_IMAGES = 2000  # that are tried at every turn, which takes as many parses as there are turns


class ObjectProbe:
    """A linear probe on the objects' presences and poses, fitted on training images alone.

    Of a guide that turns images it reads the poses in the turned image, and the angle.
    """

    def __init__(self, entry: Entry, train: Split) -> None:
        self.guide = entry.guide
        self.classifier = fit_probe(self._features(train.images), train.labels)

    def __call__(self, images: Tensor, labels: Tensor) -> Accuracy:
        answers = torch.from_numpy(self.classifier.predict(self._features(images)))
        return Accuracy.of(answers == labels)

    def _features(self, images: Tensor) -> np.ndarray:
        turns = self.guide.reader.turns
        if turns == 1:
            return latents(self.guide, images, WITH_POSES)
        angle = best_turns(self.guide, images, turns)
        seen = latents(self.guide.with_turns(1), turned(images, angle), WITH_POSES)
        return np.column_stack([seen, angle.cos(), angle.sin()])


def best_turns(guide: PartWholeGuide, images: Tensor, turns: int | None = None) -> Tensor:
    """The turn at which the model explains each image best, were its objects free to stand so."""
    turns = turns or TURNS
    model = guide.model.sharing_parameters(rotations=turns)
    return torch.cat([best_turn(guide, few, turns, model) for few in images.split(500)])


def held_best(guide: PartWholeGuide, images: Tensor) -> Tensor:
    """Each image with its ink in the middle, at the turn at which the model explains it best."""
    return turned(centred(images)[0], best_turns(guide, images))


def begin(data: Dataset, options: Options, sizes: Mapping[str, Any]) -> Entry:
    """An untrained entry for images of this size."""
    pyro.set_rng_seed(options.seed)
    return create("part-whole", image_shape=data.image_shape, **sizes)


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
    metrics: Metrics = {}
    if options.run:
        entry = load(options.run)
    else:
        entry = begin(mnist, options, LARGE)
        shift, minutes = transforms.Shift(BORDER), options.minutes or 30
        steps = train(entry, mnist, options, minutes, transform=shift).steps
        metrics["steps"] = (float(steps), None, 1)
    pyro.set_rng_seed(options.seed)
    probe = ObjectProbe(entry, moved.train)
    asked = {
        "upright": mnist.test,
        "affnist": moved.test,
        "rotated": replace(rotated, images=bordered(rotated.images)),
    }
    for name, split in asked.items():
        options.say(f"Asking about {len(split):,} {name} images")
        metrics[f"{name}_presence_pose"] = probe(split.images, split.labels)
        few = split[:TURNED_IMAGES]
        best = held_best(entry.guide, few.images)
        metrics[f"{name}_presence_pose_turned"] = probe(best, few.labels)
    curves = rotation_curves(probe, mnist.test[:CURVE_IMAGES])
    for name, curve in curves.items():
        ending = "_turned" if "turned" in name else ""
        metrics |= {f"rotation_{degrees}{ending}": found for degrees, found in curve.items()}
    table = pd.DataFrame({n: {d: a.value for d, a in c.items()} for n, c in curves.items()})
    drawn = accuracy_curves(curves, "rotation of the test images (degrees)", 1 / mnist.num_classes)
    shown = {"rotations": drawn, **pictures(entry, moved.test.images)}
    return Result(metrics, shown, table, entry)


def rotation_curves(probe: ObjectProbe, split: Split) -> dict[str, dict[float, Accuracy]]:
    """The probe's accuracy on images rotated by each angle, as they are and turned best."""
    curves: dict[str, dict[float, Accuracy]] = {"as they are": {}, "turned best": {}}
    for degrees in CURVE:
        images = transforms.warp_images(split.images, transforms.motion(float(degrees))).clamp(0, 1)
        curves["as they are"][degrees] = probe(images, split.labels)
        best = held_best(probe.guide, images)
        curves["turned best"][degrees] = probe(best, split.labels)
    return curves


@dataclass(frozen=True)
class Variant:
    """One training run of `augment`.

    Attributes:
        degrees: training images are rotated by up to so much, either way.
        sizes: what differs from the entry's own.
        upright: share of its time that goes to upright images, before any other.
        cost: of a step, beside the others'; its share of the time, so that all take as many.
    """

    degrees: float
    sizes: Mapping[str, Any] = field(default_factory=dict)
    upright: float = 0.0
    cost: float = 1.0


# Half of its steps are on upright images, for which there is no need to turn; the others take
# three times as long.
TURNING = {"rotations": 24, "guide_sizes": {**GUIDE_SIZES, "turns": 4}}
VARIANTS = {
    "0": Variant(0),
    "45": Variant(45),
    "90": Variant(90),
    "180": Variant(180),
    "180_instances": Variant(180, {"instances": 2}),
    "180_canonical": Variant(180, TURNING, upright=0.25, cost=2.0),
}


@experiment("part-whole/augment", data="mnist")
def augment(options: Options) -> Result:
    """The paradox: rotating the training images costs accuracy on upright ones (70 core-minutes).

    A model is trained for each range of rotations, and two more for the widest: one whose parts
    share templates in pairs, and one that learns upright digits first and then turns every image to
    where it explains it best (`canonical`). `minutes` are those of all runs together, which go side
    by side where there are cores, and for about as many steps each. Probes are fitted on
    training images alone and asked about upright test images (`probe_...`), and, fitted and asked
    anew, about images rotated as in training (`rotated_...`). At last the model that never saw a
    turned digit is shown digits rotated by up to 180 degrees, each turned to where it explains the
    image best, one of 16 turns (`rotated_presence_pose_0_turned`).
    """
    options.refuse_run()
    data = load_dataset("mnist", root=options.data_root)
    trained, steps = train_variants(options)
    found: dict[str, Accuracy] = {}
    for name, entry in trained.items():
        options.say(f"Probing {name}")
        if (turns := entry.guide.reader.turns) > 1:
            entry = replace(entry, guide=entry.guide.with_turns(2 * turns))
        degrees = VARIANTS[name].degrees
        upright = ObjectProbe(entry, data.train[:PROBED])
        found[f"probe_presence_pose_{name}"] = upright(data.test.images, data.test.labels)
        if degrees:
            train, test = (rotated(s, degrees) for s in (data.train[:PROBED], data.test))
            among = ObjectProbe(entry, train)
            found[f"rotated_presence_pose_{name}"] = among(test.images, test.labels)
        else:
            few = data.test[:TURNED_IMAGES]
            for kind, split in (("probe", few), ("rotated", rotated(few, 180))):
                images = held_best(entry.guide, split.images)
                found[f"{kind}_presence_pose_{name}_turned"] = upright(images, split.labels)
    shown = {"": augmentation_figure(found, 1 / data.num_classes)}
    shown["canonical"] = turned_figure(trained["180_canonical"], rotated(data.test[:12], 180))
    taken: Metrics = {f"steps_{name}": (float(number), None, 1) for name, number in steps.items()}
    return Result({**found, **taken}, shown, None, trained["180_canonical"])


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
    entry = begin(data, job.options, job.variant.sizes)
    first, steps = job.minutes * job.variant.upright, 0
    if first:
        steps += train(entry, data, job.options, first, guide=entry.guide.with_turns(1)).steps
    rotate = transforms.Rotate(job.variant.degrees)
    steps += train(entry, data, job.options, job.minutes - first, transform=rotate).steps
    save(entry, job.folder, data=data.name, seed=job.options.seed)
    return steps


def train_variants(options: Options) -> tuple[dict[str, Entry], dict[str, int]]:
    """Every variant's trained entry, and how many steps each took."""
    costs = sum(variant.cost for variant in VARIANTS.values())
    minutes = (options.minutes or 10 * costs) / costs
    names = sorted(VARIANTS, key=lambda name: -VARIANTS[name].cost)  # longest first
    options.say(f"Training {len(names)} models, {minutes:.3g} minutes or more for each")
    with TemporaryDirectory() as folder:
        quiet = replace(options, progress=False)
        jobs = [
            Job(VARIANTS[name], minutes * VARIANTS[name].cost, quiet, Path(folder) / name)
            for name in names
        ]
        steps = dict(zip(names, side_by_side(train_variant, jobs), strict=True))
        entries = {name: load(Path(folder) / name) for name in VARIANTS}
    return entries, steps


def augmentation_figure(found: Mapping[str, Accuracy], chance: float) -> Figure:
    """Accuracy against the range of rotations in training."""
    kinds = {"probe": "upright", "rotated": "rotated as in training"}
    curves: dict[str, dict[float, Accuracy]] = {}
    for name, variant in VARIANTS.items():
        _, _, extra = name.partition("_")
        for kind, words in kinds.items():
            accuracy = found.get(f"{kind}_presence_pose_{name}")
            if accuracy is not None:
                label = f"{words}, {extra}" if extra else words
                curves.setdefault(label, {})[variant.degrees] = accuracy
    return accuracy_curves(curves, "rotation of the training images (degrees, up to)", chance)


def turned_figure(entry: Entry, split: Split) -> Figure:
    """Digits rotated at random, and the turns at which the model explains them best."""
    best = held_best(entry.guide, split.images)
    return image_rows({"image": split.images, "as explained best": best})
