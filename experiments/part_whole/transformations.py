"""Part-whole capsules trained on shifted digits, tested on affine maps and rotations."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pyro
import torch
from torch import Tensor
from torch.nn import functional as F

from capsule_zoo.data import Split, load_dataset, transforms
from capsule_zoo.experiments import Options, Result, create_untrained, experiment, train
from capsule_zoo.experiments.common.findings import group_by_quantity, pictures, single
from capsule_zoo.experiments.part_whole.classification import PRESENCES, WITH_POSES
from capsule_zoo.figures.curves import accuracy_curves
from capsule_zoo.guides import Guide, PartWholeGuide
from capsule_zoo.guides.parts.rotations import best_rotation, center_images, rotate_images
from capsule_zoo.inference import Inputs, fit_guide, infer
from capsule_zoo.inference.probes import Accuracy, fit_probe, latents
from capsule_zoo.models import Capsules
from capsule_zoo.records import Numbers, Table
from capsule_zoo.registry import load

BORDER = 6  # pixels of the border around MNIST's 28x28, and of the largest shift
# On 40x40 pixels the digits are as large as on 28x28, so the bound on the parts' size shrinks in
# proportion. Positions must be known farther from the edge than the encoder sees, and digits move.
LARGE: dict[str, Any] = {
    "guide": dict(max_scale=0.8 * 28 / 40, coordinates=True, centered=True),
    "sigma_place": 0.2,
}
AT_ONCE = 500  # images that are encoded or refined at once
ROTATED, REFINED = 2000, 500  # numbers of rotated and of refined test images in each set
REFINED_TRAINING = 2000  # number of training images of the probe on refined poses
NUM_ROTATIONS = 16  # number of rotations that are tried; each needs a parse
REFINEMENT_STEPS = 100  # steps of the refinement
DEGREES = range(0, 181, 15)  # rotations of the curve
CURVED = 500  # number of test images at each rotation of the curve
AS_GIVEN, TO_THE_BEST = "images as given", "rotated to the best angle"  # names of curves
Features = Callable[[Any, Tensor], np.ndarray]


class ObjectProbe:
    """A linear probe on a guide's inferred objects, fitted on training images alone.

    Args:
        features: a function of guide and images that returns one row for each image.
    """

    def __init__(self, guide: Guide, train: Split, features: Features) -> None:
        self.guide = guide
        self.features = features
        self.classifier = fit_probe(features(guide, train.images), train.labels)

    def __call__(self, split: Split) -> Accuracy:
        """Return the accuracy of the probe on images with labels."""
        rows = self.features(self.guide, split.images)
        return Accuracy.of(torch.from_numpy(self.classifier.predict(rows)) == split.labels)


@torch.no_grad()
def count_choosing_parts(guide: Guide, images: Tensor, with_types: bool = False) -> np.ndarray:
    """Return the expected number of parts that choose each object, (N, objects).

    Args:
        with_types: whether to count parts of each type of an object apart, (N, objects * types).
    """
    counts = []
    for batch in images.split(AT_ONCE):
        drawn = infer(guide, batch)
        model = guide.model.discretize()
        names = model.levels[0].name, model.levels[-1].name
        objects, parts = (Capsules(drawn[f"{n}_presence"], drawn[f"{n}_pose"]) for n in names)
        read = model.choices if with_types else model.responsibilities
        fraction = read(objects, parts)[..., 1:]
        counts.append((parts.presence[..., None] * fraction).sum(1))
    return torch.cat(counts).numpy()


def refine_objects(guide: Guide, images: Tensor, steps: int, seed: int) -> np.ndarray:
    """Refine the objects of each image; return their presences and poses, (N, features)."""
    rows = []
    for batch in images.split(AT_ONCE):
        free = fit_guide(
            "free_form", guide.model, guide, batch, steps=steps, seed=seed, distribution="delta"
        )
        rows.append(latents(free, batch, WITH_POSES))
    return np.concatenate(rows)


FEATURES: dict[str, Features] = {
    "presence": partial(latents, sites=PRESENCES),
    "presence_pose": partial(latents, sites=WITH_POSES),
    "part_counts": count_choosing_parts,
}


def rotate_to_best(guide: PartWholeGuide, split: Split, rotations: int) -> Split:
    """Center each image and rotate it to where the model explains it best.

    The model's objects may then have any of `rotations` angles.
    """
    model = guide.model.sharing_parameters(pose=replace(guide.model.pose, rotations=rotations))
    angles = [
        best_rotation(guide, batch, rotations, model) for batch in split.images.split(AT_ONCE)
    ]
    return replace(split, images=rotate_images(center_images(split.images)[0], torch.cat(angles)))


def add_border(images: Tensor) -> Tensor:
    """Pad 28x28 images to 40x40 pixels."""
    return F.pad(images, (BORDER,) * 4)


@experiment("part-whole/generalise", data="affnist", minutes=30, of_runs=True)
def generalize(options: Options) -> Result:
    """Train on shifted digits; test on affine maps and rotations up to 180 degrees (30 minutes).

    MNIST on 40x40 pixels, without labels. The probe is fitted on objects inferred from shifted
    training images and tested on three sets of images: `upright` in the middle, `affnist`, and
    `rotated` by uniform angles up to 180 degrees either way. "At the best
    rotation" (`..._aligned` in the record) every image is first rotated to where the model explains
    it best, one of 16 rotations. "Refined" are free-form poses and presences, initialized at the
    guide's and optimized for each image. A
    separate probe is fitted on refined training images, because refinement moves presences
    towards 0 and 1. "Few" is the probe on the guide's objects for these few training images.

    The features are the objects' presences (`presence`), presences and poses (`presence_pose`), or
    the expected number of parts that choose each object (`part_counts`): the parts then decide on
    the presence of an object, in place of the image.
    """
    mnist = load_dataset("mnist", root=options.data_root).transform_images(add_border)
    moved = load_dataset("affnist", root=options.data_root)
    circle = load_dataset("rotated-mnist", root=options.data_root).test
    metrics: dict[str, Any] = {}
    if options.run:
        entry = load(options.run)
    else:
        entry = create_untrained("part-whole", mnist, options, **LARGE)
        arguments: dict[str, Any] = dict(name="trained", inputs=Inputs(transforms.Shift(BORDER)))
        metrics["steps"] = single(train(entry, mnist, options, options.budget, **arguments).steps)
    pyro.set_rng_seed(options.seed)
    options.say(f"Fitting probes on {len(moved.train):,} shifted images")
    guide, subset = entry.guide, moved.train[:REFINED_TRAINING]
    probes = {name: ObjectProbe(guide, moved.train, read) for name, read in FEATURES.items()}
    probe = probes["presence_pose"]
    options.say(f"Refining {len(subset):,} training images for a probe")
    refined = partial(refine_objects, steps=REFINEMENT_STEPS, seed=options.seed)
    probes_of_few = {
        "presence_pose{}_few": ObjectProbe(guide, subset, FEATURES["presence_pose"]),
        "presence_pose{}_refined": ObjectProbe(guide, subset, refined),
    }
    tested = {
        "upright": mnist.test,
        "affnist": moved.test,
        "rotated": replace(circle, images=add_border(circle.images)),
    }
    accuracies: dict[str, Numbers] = {}
    for name, split in tested.items():
        options.say(f"Testing on {len(split):,} {name} images")
        best = rotate_to_best(guide, split[:ROTATED], NUM_ROTATIONS)
        row: Numbers = {features: measure(split) for features, measure in probes.items()}
        row["presence_pose_aligned"] = probe(best)
        for ending, images in (("", split[:REFINED]), ("_aligned", best[:REFINED])):
            for features, measure in probes_of_few.items():
                row[features.format(ending)] = measure(images)
        accuracies[name] = row
    curves: dict[str, Numbers] = {AS_GIVEN: {}, TO_THE_BEST: {}}
    upright = mnist.test[:CURVED]
    for angle in DEGREES:
        moved_digits = transforms.warp_images(upright.images, transforms.motion(float(angle)))
        rotated = replace(upright, images=moved_digits.clamp(0, 1))
        curves[AS_GIVEN][str(angle)] = probe(rotated)
        curves[TO_THE_BEST][str(angle)] = probe(rotate_to_best(guide, rotated, NUM_ROTATIONS))
    metrics["accuracy on images"] = Table(group_by_quantity(accuracies), "{variant}_{quantity}")
    names = {AS_GIVEN: "rotation_{variant}", TO_THE_BEST: "rotation_{variant}_aligned"}
    metrics["accuracy at degrees"] = Table(curves, names)
    drawn = accuracy_curves(curves, "rotation of the test images (degrees)", 1 / mnist.num_classes)
    figures = {"rotations": drawn, **pictures(entry, moved.test.images)}
    return Result(metrics, figures, None, entry)
