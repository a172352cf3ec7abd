"""Part-whole capsules and transformed images: generalization, and the cost of augmentation.

The paper (Smith et al. 2020) finds that rotating the training images hurts on upright ones, and
attributes it to parts that are affine copies of each other. `augment` measures the effect, and
tries two remedies: parts that share their templates, and a guide that turns each image to the angle
at which the model explains it best. The objects of that model may have any angle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyro
import torch
from torch import Tensor
from torch.nn import functional as F

from capsule_zoo.data import Dataset, Split, load_dataset, transforms
from capsule_zoo.entries.part_whole import GUIDE_SIZES
from capsule_zoo.experiments import Options, Result, experiment
from capsule_zoo.experiments.findings import by_quantity, pictures
from capsule_zoo.experiments.part_whole import PROBED, WITH_POSES
from capsule_zoo.experiments.study import Job, Study, choose
from capsule_zoo.experiments.training import train
from capsule_zoo.figures.curves import accuracy_curves
from capsule_zoo.figures.grids import image_rows
from capsule_zoo.guides import PartWholeGuide
from capsule_zoo.guides.turns import best_turn, centered, turned
from capsule_zoo.inference.evaluation.probe import Accuracy, fit_probe, latents
from capsule_zoo.records import Number, Numbers, Table
from capsule_zoo.registry import Entry, create, load, save

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BORDER = 6  # pixels around MNIST's 28x28, and the largest shift
# On 40x40 pixels the digits are as large as on 28x28, so the bound on the parts' size shrinks in
# proportion. Places must be known farther from the edge than the encoder sees, and digits move.
LARGE: dict[str, Any] = {
    "guide_sizes": {
        **GUIDE_SIZES,
        "max_scale": 0.8 * 28 / 40,
        "coordinates": True,
        "centered": True,
    },
    "sigma_place": 0.2,
}
DEGREES = tuple(range(0, 181, 15))
Sizes = Mapping[str, Any]


class ObjectProbe:
    """A linear probe on the objects' presences and poses, fitted on training images alone.

    For a guide that turns images it reads the poses in the turned image, and the angle.
    """

    def __init__(self, entry: Entry, train: Split) -> None:
        self.guide = entry.guide
        self.classifier = fit_probe(self._features(train.images), train.labels)

    def __call__(self, images: Tensor, labels: Tensor) -> Accuracy:
        """Return the accuracy of the probe on images (B, C, H, W)."""
        answers = torch.from_numpy(self.classifier.predict(self._features(images)))
        return Accuracy.of(answers == labels)

    def _features(self, images: Tensor) -> np.ndarray:
        turns = self.guide.reader.turns
        if turns == 1:
            return latents(self.guide, images, WITH_POSES)
        angle = best_turns(self.guide, images, turns)
        seen = latents(self.guide.with_turns(1), turned(images, angle), WITH_POSES)
        return np.column_stack([seen, angle.cos(), angle.sin()])


def best_turns(guide: PartWholeGuide, images: Tensor, turns: int) -> Tensor:
    """Return the turn at which the model explains each image best, if objects had free angles."""
    model = guide.model.sharing_parameters(rotations=turns)
    return torch.cat([best_turn(guide, few, turns, model) for few in images.split(500)])


def held_best(guide: PartWholeGuide, images: Tensor, turns: int) -> Tensor:
    """Return each image with its ink in the middle, turned to where the model explains it best."""
    return turned(centered(images)[0], best_turns(guide, images, turns))


def begin(data: Dataset, options: Options, sizes: Sizes) -> Entry:
    """Return an untrained entry for images of this size."""
    pyro.set_rng_seed(options.seed)
    return create("part-whole", image_shape=data.image_shape, **sizes)


def merged(sizes: Sizes, other: Sizes | None) -> dict[str, Any]:
    """Return sizes with others in their place; both may have `guide_sizes`, which are merged."""
    other = other or {}
    guide_sizes = {**sizes.get("guide_sizes", {}), **other.get("guide_sizes", {})}
    return {**sizes, **other, **({"guide_sizes": guide_sizes} if guide_sizes else {})}


def bordered(images: Tensor) -> Tensor:
    """Return 28x28 images in the middle of 40x40 pixels."""
    return F.pad(images, (BORDER,) * 4)


@experiment("part-whole/generalise", data="affnist", minutes=30)
def generalize(
    options: Options,
    *,
    turns: int = 16,
    turned_images: int = 2000,
    curve_images: int = 500,
    degrees: tuple[int, ...] = DEGREES,
    sizes: Mapping[str, Any] | None = None,
) -> Result:
    """Train on shifted digits; test on affine changes and rotations up to 180 degrees (30 minutes).

    MNIST on 40x40 pixels, without labels. The probe is fitted on objects inferred from shifted
    training images and tested on images of three kinds: `upright` in the middle, `affnist`, and
    `rotated` by angles uniform up to 180 degrees either way. "Turned" is the same probe when every
    image is first turned to where the model explains it best, one of 16 turns.

    Args:
        turns: number of turns that are tried; each needs a parse.
        turned_images: number of test images of each kind that are turned.
        curve_images: number of test images at each rotation.
        degrees: rotations of the curve.
        sizes: sizes of the entry that replace the experiment's.
    """
    mnist = load_dataset("mnist", root=options.data_root).transformed(bordered)
    moved = load_dataset("affnist", root=options.data_root)
    rotated = load_dataset("rotated-mnist", root=options.data_root).test
    metrics: dict[str, Number | Table] = {}
    found: dict[str, Numbers] = {}
    if options.run:
        entry = load(options.run)
    else:
        entry = begin(mnist, options, merged(LARGE, sizes))
        how: dict[str, Any] = dict(name="trained", transform=transforms.Shift(BORDER))
        steps = train(entry, mnist, options, options.budget, **how).steps
        metrics["steps"] = (float(steps), None, 1)
    pyro.set_rng_seed(options.seed)
    probe = ObjectProbe(entry, moved.train)
    tested = {
        "upright": mnist.test,
        "affnist": moved.test,
        "rotated": replace(rotated, images=bordered(rotated.images)),
    }
    for name, split in tested.items():
        options.say(f"Testing on {len(split):,} {name} images")
        accuracies = {"presence_pose": probe(split.images, split.labels)}
        few = split[:turned_images]
        best = held_best(entry.guide, few.images, turns)
        found[name] = {**accuracies, "presence_pose_turned": probe(best, few.labels)}
    curves = rotation_curves(probe, mnist.test[:curve_images], degrees, turns)
    metrics["accuracy on images"] = Table(by_quantity(found), "{variant}_{quantity}")
    rotations = {n: {str(angle): a for angle, a in c.items()} for n, c in curves.items()}
    names = {"as they are": "rotation_{variant}", "turned best": "rotation_{variant}_turned"}
    metrics["accuracy at degrees"] = Table(rotations, names)
    table = pd.DataFrame({n: {d: a.value for d, a in c.items()} for n, c in curves.items()})
    drawn = accuracy_curves(curves, "rotation of the test images (degrees)", 1 / mnist.num_classes)
    shown = {"rotations": drawn, **pictures(entry, moved.test.images)}
    return Result(metrics, shown, table, entry)


def rotation_curves(
    probe: ObjectProbe, split: Split, degrees: Sequence[int], turns: int
) -> dict[str, dict[float, Accuracy]]:
    """Return the probe's accuracy on images rotated by each angle, as they are and turned best."""
    curves: dict[str, dict[float, Accuracy]] = {"as they are": {}, "turned best": {}}
    for angle in degrees:
        images = transforms.warp_images(split.images, transforms.motion(float(angle))).clamp(0, 1)
        curves["as they are"][angle] = probe(images, split.labels)
        best = held_best(probe.guide, images, turns)
        curves["turned best"][angle] = probe(best, split.labels)
    return curves


@dataclass(frozen=True)
class Variant:
    """One training run of `augment`.

    Attributes:
        degrees: largest rotation of training images, either way.
        sizes: sizes that replace the entry's own.
        upright: share of its time that is spent on upright images, at the beginning.
        cost: relative cost of a step; the variants share the time in proportion to it.
    """

    degrees: float
    sizes: Mapping[str, Any] = field(default_factory=dict)
    upright: float = 0.0
    cost: float = 1.0


# Half of the steps of the variant that turns images are on upright images, which need no turns; the
# other steps take three times as long.
TURNING: dict[str, Any] = {"rotations": 24, "guide_sizes": {**GUIDE_SIZES, "turns": 4}}
VARIANTS = {
    "0": Variant(0),
    "45": Variant(45),
    "90": Variant(90),
    "180": Variant(180),
    "180_instances": Variant(180, {"instances": 2}),
    "180_canonical": Variant(180, TURNING, upright=0.25, cost=2.0),
}


UPRIGHT, ROTATED = "probe_presence_pose", "rotated_presence_pose"


@experiment("part-whole/augment", data="mnist", minutes=70)
def augment(
    options: Options,
    *,
    variants: tuple[str, ...] = tuple(VARIANTS),
    turns: int = 16,
    turned_images: int = 2000,
    sizes: Mapping[str, Any] | None = None,
) -> Result:
    """Measure how rotated training images cost accuracy on upright ones (70 core-minutes).

    A model is trained for each range of rotations, and two more for the widest: one whose parts
    share templates in pairs, and one that learns upright digits first and then turns every image to
    where it explains it best (`canonical`). The minutes are shared by all runs, which go side by
    side where there are several cores and take about as many steps each. Probes are fitted on
    training images alone and tested on upright test images (`probe_...`). They are fitted and
    tested again on images rotated as in training (`rotated_...`). Finally, the model that never saw
    a turned digit is tested on digits rotated by up to 180 degrees, each turned to where it
    explains the image best, one of 16 turns (`rotated_presence_pose_0_turned`).

    Args:
        variants: names of the variants; 0 and 180_canonical are among them.
        turns: number of turns that are tried for the model that never saw a turned digit.
        turned_images: number of test images that are turned.
        sizes: sizes of every entry that replace the variant's.
    """
    options.refuse_run()
    data = load_dataset("mnist", root=options.data_root)
    chosen = {
        name: replace(variant, sizes=merged(variant.sizes, sizes))
        for name, variant in choose("variant", variants, VARIANTS).items()
    }
    trained, steps = train_variants(chosen, options)
    found: dict[str, dict[str, Accuracy]] = {UPRIGHT: {}, ROTATED: {}}
    for name, entry in trained.items():
        options.say(f"Probing {name}")
        if (own := entry.guide.reader.turns) > 1:
            entry = replace(entry, guide=entry.guide.with_turns(2 * own))
        degrees = VARIANTS[name].degrees
        upright = ObjectProbe(entry, data.train[:PROBED])
        found[UPRIGHT][name] = upright(data.test.images, data.test.labels)
        if degrees:
            train, test = (rotated(s, degrees) for s in (data.train[:PROBED], data.test))
            among = ObjectProbe(entry, train)
            found[ROTATED][name] = among(test.images, test.labels)
        else:
            few = data.test[:turned_images]
            for kind, split in ((UPRIGHT, few), (ROTATED, rotated(few, 180))):
                images = held_best(entry.guide, split.images, turns)
                found[kind][f"{name}_turned"] = upright(images, split.labels)
    shown = {"": augmentation_figure(found, 1 / data.num_classes)}
    canonical = trained["180_canonical"]
    shown["canonical"] = turned_figure(canonical, rotated(data.test[:12], 180), turns)
    taken: Numbers = {name: (float(number), None, 1) for name, number in steps.items()}
    return Result({**found, "steps": taken}, shown, None, canonical)


def rotated(split: Split, degrees: float) -> Split:
    """Return images rotated by angles uniform up to `degrees`, the same ones on every call."""
    generator = torch.Generator().manual_seed(4)
    images = [transforms.Rotate(degrees)(s, generator=generator) for s in split.images.split(2000)]
    return replace(split, images=torch.cat(images))


def train_variant(job: Job[Variant]) -> int:
    """Train one variant and save it into the job's folder; return the number of steps."""
    variant, options = job.variant, job.options
    data = load_dataset("mnist", root=options.data_root)
    entry = begin(data, options, variant.sizes)
    first, steps = options.budget * variant.upright, 0
    if first:
        guide = entry.guide.with_turns(1)
        steps += train(entry, data, options, first, name="upright", guide=guide).steps
    how: dict[str, Any] = dict(name="run", transform=transforms.Rotate(variant.degrees))
    steps += train(entry, data, options, options.budget - first, **how).steps
    if job.folder:
        save(entry, job.folder, data=data.name, seed=options.seed)
    return steps


def train_variants(
    variants: Mapping[str, Variant], options: Options
) -> tuple[dict[str, Entry], dict[str, int]]:
    """Return every variant's trained entry, and the number of steps that each took."""
    study = Study(variants, costs={name: variant.cost for name, variant in variants.items()})
    timed = replace(options, minutes=options.budget)
    options.say(f"Training {len(variants)} models in {options.budget:.3g} core-minutes")
    steps = {name: taken for (name, _), taken in study.run(train_variant, timed).items()}
    return {name: load(folder) for name, folder in study.folders(timed).items()}, steps


def augmentation_figure(found: Mapping[str, Mapping[str, Accuracy]], chance: float) -> Figure:
    """Draw accuracy against the range of rotations in training."""
    kinds = {UPRIGHT: "upright", ROTATED: "rotated as in training"}
    curves: dict[str, dict[float, Accuracy]] = {}
    for name, variant in VARIANTS.items():
        _, _, extra = name.partition("_")
        for kind, words in kinds.items():
            accuracy = found[kind].get(name)
            if accuracy is not None:
                label = f"{words}, {extra}" if extra else words
                curves.setdefault(label, {})[variant.degrees] = accuracy
    return accuracy_curves(curves, "rotation of the training images (degrees, up to)", chance)


def turned_figure(entry: Entry, split: Split, turns: int) -> Figure:
    """Draw digits rotated at random, and the turns at which the model explains them best."""
    best = held_best(entry.guide, split.images, turns)
    return image_rows({"image": split.images, "as explained best": best})
