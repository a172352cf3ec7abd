"""Part-whole capsules that were trained on shifted digits, on affine changes and rotations."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pyro
import torch
from torch import Tensor
from torch.nn import functional as F

from capsule_zoo.data import Split, load_dataset, transforms
from capsule_zoo.experiments import Options, Result, begun, experiment, train
from capsule_zoo.experiments.common.findings import by_quantity, pictures, single
from capsule_zoo.experiments.part_whole.classification import PRESENCES, WITH_POSES
from capsule_zoo.figures.curves import accuracy_curves
from capsule_zoo.guides import Guide, PartWholeGuide
from capsule_zoo.guides.parts.turns import best_turn, centered, turned
from capsule_zoo.inference import Inputs, infer, refine
from capsule_zoo.inference.evaluation.probe import Accuracy, fit_probe, latents
from capsule_zoo.models import Capsules
from capsule_zoo.records import Number, Numbers, Table
from capsule_zoo.registry import Entry, load

BORDER = 6  # pixels around MNIST's 28x28, and the largest shift
# On 40x40 pixels the digits are as large as on 28x28, so the bound on the parts' size shrinks in
# proportion. Places must be known farther from the edge than the encoder sees, and digits move.
LARGE: dict[str, Any] = {
    "guide": dict(max_scale=0.8 * 28 / 40, coordinates=True, centered=True),
    "sigma_place": 0.2,
}
AT_ONCE = 500  # images that are read or refined together
DEGREES = tuple(range(0, 181, 15))
Features = Callable[[Any, Tensor], np.ndarray]


class ObjectProbe:
    """A linear probe on what a guide infers of objects, fitted on training images alone.

    Args:
        entry: the trained entry.
        train: the images and labels that the probe is fitted on.
        features: a function of guide and images that returns one row for each image.
    """

    def __init__(self, entry: Entry, train: Split, features: Features) -> None:
        self.guide = entry.guide
        self.features = features
        self.classifier = fit_probe(features(self.guide, train.images), train.labels)

    def __call__(self, split: Split) -> Accuracy:
        """Return the accuracy of the probe on images with labels."""
        rows = self.features(self.guide, split.images)
        return Accuracy.of(torch.from_numpy(self.classifier.predict(rows)) == split.labels)


@torch.no_grad()
def chosen_objects(guide: Guide, images: Tensor) -> np.ndarray:
    """Return how many parts choose each object, (N, objects), in expectation."""
    found = []
    for few in images.split(AT_ONCE):
        drawn = infer(guide, few)
        model = guide.model.discretized()
        objects, parts = (
            Capsules(drawn[f"{level.name}_presence"], drawn[f"{level.name}_pose"])
            for level in (model.levels[0], model.levels[-1])
        )
        share = model.responsibilities(objects, parts)[..., 1:]
        found.append((parts.presence[..., None] * share).sum(1))
    return torch.cat(found).numpy()


def refined_objects(guide: Guide, images: Tensor, steps: int, seed: int) -> np.ndarray:
    """Return presences and poses of objects that are refined for each image, (N, features)."""
    rows = []
    for few in images.split(AT_ONCE):
        free = refine(guide.model, guide, few, steps=steps, seed=seed).guide
        rows.append(latents(free, few, WITH_POSES))
    return np.concatenate(rows)


FEATURES: dict[str, Features] = {
    "presence": partial(latents, sites=PRESENCES),
    "presence_pose": partial(latents, sites=WITH_POSES),
    "chosen": chosen_objects,
}


def held_best(guide: PartWholeGuide, split: Split, turns: int) -> Split:
    """Return each image with its ink in the middle, turned to where the model explains it best.

    Objects may have any of `turns` angles for this.
    """
    model = guide.model.sharing_parameters(pose=replace(guide.model.pose, rotations=turns))
    angles = [best_turn(guide, few, turns, model) for few in split.images.split(AT_ONCE)]
    return replace(split, images=turned(centered(split.images)[0], torch.cat(angles)))


def rotated(split: Split, degrees: float) -> Split:
    """Return all images rotated by an angle, counterclockwise."""
    images = transforms.warp_images(split.images, transforms.motion(float(degrees)))
    return replace(split, images=images.clamp(0, 1))


def bordered(images: Tensor) -> Tensor:
    """Return 28x28 images in the middle of 40x40 pixels."""
    return F.pad(images, (BORDER,) * 4)


@experiment("part-whole/generalise", data="affnist", minutes=30, of_runs=True)
def generalize(
    options: Options,
    *,
    turns: int = 16,
    turned_images: int = 2000,
    refined_images: int = 500,
    refined_training: int = 2000,
    refining: int = 100,
    curve_images: int = 500,
    degrees: tuple[int, ...] = DEGREES,
    sizes: Mapping[str, Any] | None = None,
) -> Result:
    """Train on shifted digits; test on affine changes and rotations up to 180 degrees (30 minutes).

    MNIST on 40x40 pixels, without labels. The probe is fitted on objects inferred from shifted
    training images and tested on images of three kinds: `upright` in the middle, `affnist`, and
    `rotated` by angles uniform up to 180 degrees either way. "Turned" is the same probe when every
    image is first turned to where the model explains it best, one of 16 turns. "Refined" are
    free-form poses and presences, which start at the guide's and are optimized for each image; a
    probe of their own is fitted on refined training images, because refinement moves presences
    towards 0 and 1. "Few" is the probe on the guide's own answers for the same few training images.

    The features are the objects' presences (`presence`), these and their poses (`presence_pose`),
    or the expected number of parts that choose each object (`chosen`), which is what the parts say
    of the objects' presence, as the guide's presences are what the image says.

    Args:
        turns: number of turns that are tried; each needs a parse.
        turned_images: number of test images of each kind that are turned.
        refined_images: number of test images of each kind whose poses are refined.
        refined_training: number of training images of the probe on refined poses.
        refining: steps of the refinement.
        curve_images: number of test images at each rotation.
        degrees: rotations of the curve.
        sizes: sizes of the entry that replace the experiment's.
    """
    mnist = load_dataset("mnist", root=options.data_root).transformed(bordered)
    moved = load_dataset("affnist", root=options.data_root)
    circle = load_dataset("rotated-mnist", root=options.data_root).test
    metrics: dict[str, Number | Table] = {}
    if options.run:
        entry = load(options.run)
    else:
        given = sizes or {}
        guide = {**LARGE["guide"], **given.get("guide", {})}
        entry = begun("part-whole", mnist, options, **{**LARGE, **given, "guide": guide})
        how: dict[str, Any] = dict(name="trained", inputs=Inputs(transforms.Shift(BORDER)))
        steps = train(entry, mnist, options, options.budget, **how).steps
        metrics["steps"] = single(steps)
    pyro.set_rng_seed(options.seed)
    options.say(f"Fitting probes on {len(moved.train):,} shifted images")
    probes = {name: ObjectProbe(entry, moved.train, read) for name, read in FEATURES.items()}
    probe = probes["presence_pose"]
    options.say(f"Refining {refined_training:,} training images for a probe")
    fitted = moved.train[:refined_training]
    refined = partial(refined_objects, steps=refining, seed=options.seed)
    probes_of_few = {
        "presence_pose{}_few": ObjectProbe(entry, fitted, FEATURES["presence_pose"]),
        "presence_pose{}_refined": ObjectProbe(entry, fitted, refined),
    }
    tested = {
        "upright": mnist.test,
        "affnist": moved.test,
        "rotated": replace(circle, images=bordered(circle.images)),
    }
    found: dict[str, Numbers] = {}
    for name, split in tested.items():
        options.say(f"Testing on {len(split):,} {name} images")
        few = split[:turned_images]
        best = held_best(entry.guide, few, turns)
        found[name] = {kind: read(split) for kind, read in probes.items()}
        found[name]["presence_pose_turned"] = probe(best)
        for ending, seen in (("", split[:refined_images]), ("_turned", best[:refined_images])):
            for kind, read in probes_of_few.items():
                found[name][kind.format(ending)] = read(seen)
    curves = rotation_curves(probe, mnist.test[:curve_images], degrees, turns)
    metrics["accuracy on images"] = Table(by_quantity(found), "{variant}_{quantity}")
    names = {"as they are": "rotation_{variant}", "turned best": "rotation_{variant}_turned"}
    metrics["accuracy at degrees"] = Table(curves, names)
    drawn = accuracy_curves(curves, "rotation of the test images (degrees)", 1 / mnist.num_classes)
    shown = {"rotations": drawn, **pictures(entry, moved.test.images)}
    return Result(metrics, shown, None, entry)


def rotation_curves(
    probe: ObjectProbe, split: Split, degrees: Sequence[int], turns: int
) -> dict[str, Numbers]:
    """Return the probe's accuracy on images rotated by each angle, as they are and turned best."""
    curves: dict[str, Numbers] = {"as they are": {}, "turned best": {}}
    for angle in degrees:
        seen = rotated(split, angle)
        curves["as they are"][str(angle)] = probe(seen)
        curves["turned best"][str(angle)] = probe(held_best(probe.guide, seen, turns))
    return curves
