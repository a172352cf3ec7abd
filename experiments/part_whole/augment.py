"""Part-whole capsules trained on rotated images: the loss of accuracy, and a remedy.

The paper (Smith et al. 2020) finds that rotating the training images hurts on upright ones, and
attributes it to parts that are affine copies of each other. `augment` measures the effect with
three sets of features: the presences of objects (t), presences and poses (t, A), and the kind and
the shape code that explain the parts (see `models.shape_codes`). It counts the copies, and how
often another part explains some ink after the image rotates: a part that is an affine copy of
another can replace it everywhere.

The remedy: kinds and codes are fitted to parts that are inferred at every rotation of every image,
and the fit itself chooses the rotation. No upright direction is given, but rotations at which many
digits are alike win. Each kind then has its own upright direction. An image is encoded by every
kind at the rotation at which the kind explains the image's parts best.

`augment_scae` measures the loss of stacked capsule autoencoders too, after equal time, as the
paper's figure 4 does.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor

from capsule_zoo.data import Dataset, Split, load_dataset, transforms
from capsule_zoo.experiments import Job, Options, Result, Study, create_untrained, experiment, train
from capsule_zoo.experiments.common.findings import (
    group_by_quantity,
    mean_and_error,
    means_of,
    single,
    snake_case,
)
from capsule_zoo.experiments.part_whole.classification import PRESENCES, WITH_POSES
from capsule_zoo.experiments.shape_codes.objects import (
    PENALTY,
    TEMPERATURE,
    encode_at_each_rotation,
    read_objects,
    sets_at_rotations,
)
from capsule_zoo.experiments.stacked_capsule_autoencoder import clusters as stacked
from capsule_zoo.experiments.stacked_capsule_autoencoder.clusters import BATCH_SIZE, PROBED, STACKED
from capsule_zoo.figures.curves import accuracy_curves
from capsule_zoo.figures.grids import image_rows
from capsule_zoo.guides.parts.rotations import rotate_images
from capsule_zoo.inference import Inputs
from capsule_zoo.inference.probes import Accuracy, fit_probe, latents, linear_probe
from capsule_zoo.inference.training.starts.kinds import start_rotated_kinds
from capsule_zoo.models.parts import poses
from capsule_zoo.models.parts.templates import warp_templates
from capsule_zoo.records import Number, Numbers
from capsule_zoo.registry import Entry, load
from capsule_zoo.zoo.part_whole.figures import colored_parts, infer_parts, learned_templates
from capsule_zoo.zoo.shape_codes.entry import create_from_parts, part_sets, start_objects

DEGREES = (0, 45, 90, 180)  # largest rotations of training images, one for each model
COMPARED_DEGREES = (0, 30, 60, 180)  # those of the comparison with stacked capsules
STEPS = 3000  # updates of each model in a full run
ROTATIONS = (45, 90, 180)  # degrees of rotation at which part consistency is measured
COLUMNS = {  # names of features in legends
    "presence": "presences",
    "presence_pose": "presences and poses",
    "kind_code": "kinds and codes",
}
UPRIGHT, ROTATED = "probe", "rotated"
ROTATION_LABEL = "rotation of the training images (degrees, up to)"
COPY = 0.95  # likeness from which one template counts as a copy of another
_MARGIN = 2  # side of the canvas divided by the side of a template
_RATE = 0.05
KINDS = 64  # number of kinds of objects that are fitted to parts
NUM_ROTATIONS = 24  # number of rotations at which parts are inferred for the remedy
ROTATED_TRAINING, ROTATED_TEST = 5000, 2000  # numbers of images for the remedy
SIZES: dict[str, dict[str, Any]] = {"part-whole": {}, STACKED: {}}  # arguments of the entries


@experiment("part-whole/augment", data="mnist", minutes=70)
def augment(options: Options, *, seeds: int = 3) -> Result:
    """Measure how rotated training images cost accuracy on upright ones (70 core-minutes).

    A model is trained for each range of rotations and each seed, all for equally many updates.
    Linear probes are fitted on training images alone. `probe_...` are fitted and tested on upright
    images, `rotated_...` on images rotated as in training. With kinds and codes the loss is small:
    they are fitted to the rotated training images at the rotations that they choose, and every
    kind encodes an image "at the best rotation", where it explains the image best (`..._aligned` in
    the record). This probe is fitted on rotated images, and tested on rotated and upright images.

    `copies` counts the templates that are affine copies of another. `kept_45` is the fraction of
    parts that correspond to themselves when the image is rotated by 45 degrees.

    Args:
        seeds: number of seeds for each model.
    """
    timed, steps = replace(options, minutes=None), options.shorten_steps(STEPS)
    study = Study({str(degrees): degrees for degrees in DEGREES}, seeds)
    numbers = group_by_quantity(means_of(study.run(learn, timed, steps=steps)))
    data = load_dataset("mnist", root=options.data_root)
    name = str(max(DEGREES))
    widest = load(study.folders(timed)[name])
    figures = {
        "": plot_accuracies(numbers, 1 / data.num_classes),
        f"parts_{name}": plot_parts(widest, data),
        "templates": learned_templates(widest.model),
    }
    return Result({**numbers}, figures, None, widest)


def learn(job: Job[int], *, steps: int) -> dict[str, Number]:
    """Train one model on images rotated by up to the job's degrees, and measure it."""
    degrees, options = job.variant, job.options
    data = load_dataset("mnist", root=options.data_root)
    entry = create_untrained("part-whole", data, options, **SIZES["part-whole"])
    limits: dict[str, Any] = dict(steps=steps, batch_size=BATCH_SIZE)
    train(entry, data, options, inputs=Inputs(transforms.Rotate(degrees)), **limits)
    return {"steps": single(steps), **measure(entry, data, degrees, options.seed)}


def measure(entry: Entry, data: Dataset, degrees: int, seed: int) -> Numbers:
    """Return the accuracies of a trained model's probes, its copies, and its part consistency."""
    subset = data.train[:PROBED]
    codes = create_from_parts(entry, kinds=KINDS)
    rotated_few = rotate_split(subset, degrees)
    start_objects(codes.guide, part_sets(codes.guide.with_scope("parts"), rotated_few), seed)
    splits = {UPRIGHT: (subset, data.test)}
    if degrees:
        splits[ROTATED] = rotated_few, rotate_split(data.test, degrees)
    numbers: Numbers = {}
    for name, pair in splits.items():
        fitted, tested = (features_of(entry, codes, split) for split in pair)
        labels = [split.labels for split in pair]
        for column in COLUMNS:
            penalty = PENALTY if column == "kind_code" else 1.0
            rows = fitted[column], labels[0], tested[column], labels[1]
            numbers[f"{name}_{column}"] = linear_probe(*rows, penalty)
    if degrees:
        subset, test = subset[:ROTATED_TRAINING], data.test[:ROTATED_TEST]
        tests = {ROTATED: rotate_split(test, degrees), UPRIGHT: test}
        remedy = fit_rotated(entry, rotate_split(subset, degrees), tests, seed)
        numbers |= {f"{name}_aligned": accuracy for name, accuracy in remedy.items()}
    color, alpha = entry.model.templates()
    numbers["copies"] = single(count_copies(likeness((color * alpha).mean(1))))
    for angle in ROTATIONS:
        numbers[f"kept_{angle}"] = part_consistency(entry, data.test.images[:1000], angle)
    return numbers


def features_of(entry: Entry, codes: Entry, split: Split) -> dict[str, np.ndarray]:
    """Return the features of images, (N, features) each, by name."""
    sets = part_sets(codes.guide.with_scope("parts"), split).images
    return {
        "presence": latents(entry.guide, split.images, PRESENCES),
        "presence_pose": latents(entry.guide, split.images, WITH_POSES),
        "kind_code": read_objects(codes.guide, sets, TEMPERATURE).features(),
    }


def fit_rotated(
    entry: Entry, train: Split, tests: Mapping[str, Split], seed: int
) -> dict[str, Accuracy]:
    """Fit kinds and codes to images at their inferred rotations; probe test images by name."""
    codes = create_from_parts(entry, kinds=KINDS)
    views = torch.stack([*sets_at_rotations(codes.guide, train, NUM_ROTATIONS)])
    start_rotated_kinds(codes.model, views, seed)
    codes.guide.infer_objects.start_at_posterior(codes.model)
    rows = encode_at_each_rotation(codes.guide, views, TEMPERATURE).features()
    probe = fit_probe(rows, train.labels, PENALTY)
    accuracies: dict[str, Accuracy] = {}
    for name, test in tests.items():
        sets = sets_at_rotations(codes.guide, test, NUM_ROTATIONS)
        rows = encode_at_each_rotation(codes.guide, sets, TEMPERATURE).features()
        accuracies[name] = Accuracy.of(torch.from_numpy(probe.predict(rows)) == test.labels)
    return accuracies


@torch.no_grad()
def part_consistency(entry: Entry, images: Tensor, degrees: float) -> Number:
    """Return the fraction of present parts that correspond to themselves in a rotated image.

    A part of the image corresponds to the present part of the rotated image whose pose, rotated
    back, is nearest.
    """
    angle = images.new_full((len(images),), math.radians(degrees))
    before = infer_parts(entry.guide, images)
    after = infer_parts(entry.guide, rotate_images(images, angle))
    back = poses.compose(poses.rotation(angle)[:, None], after.pose)
    away = (before.pose[:, :, None] - back[:, None]).square().sum(-1)  # (N, P, P)
    away = away.masked_fill(after.presence[:, None] == 0, math.inf)
    same = away.argmin(-1) == torch.arange(away.shape[-1])
    is_present = (before.presence > 0) & (after.presence.sum(-1, keepdim=True) > 0)
    fraction = (same & is_present).sum(-1) / is_present.sum(-1).clamp(min=1)
    return mean_and_error(fraction[is_present.any(-1)])


@experiment("part-whole/augment-scae", data="mnist", minutes=96)
def augment_scae(options: Options, *, seeds: int = 3) -> Result:
    """Train part-whole and stacked capsules on rotated digits, in equal time (96 core-minutes).

    Every model has equally many core minutes and batches of equal size. `probe_...` are linear
    probes, and `clusters_...` clusters that are matched with the classes, fitted and tested on
    upright digits. Those of `rotated_...` are fitted and tested on digits rotated as in training.

    Args:
        seeds: number of seeds, among which the minutes are divided.
    """
    timed = replace(options, minutes=options.budget)
    variants = {f"{snake_case(n)}_{angle}": (n, angle) for n in SIZES for angle in COMPARED_DEGREES}
    numbers = group_by_quantity(means_of(Study(variants, seeds).run(learn_rotated, timed)))
    return Result({**numbers}, {"": plot_compared(numbers)})


def learn_rotated(job: Job[tuple[str, int]]) -> Numbers:
    """Train the entry of the job on images rotated by up to its degrees, and measure it.

    Numbers of images rotated as in training begin with `rotated_`.
    """
    (name, degrees), options = job.variant, job.options
    data = load_dataset("mnist", root=options.data_root)
    entry = create_untrained(name, data, options, **SIZES[name])
    inputs = Inputs(transforms.Rotate(degrees))
    facts = stacked.train_in_time(entry, data, options, inputs=inputs)
    data = replace(data, train=data.train[:PROBED])
    numbers = stacked.measure(entry, data)
    if degrees:
        fitted, tested = (rotate_split(split, degrees) for split in (data.train, data.test))
        rotated = stacked.measure(entry, replace(data, train=fitted, test=tested))
        numbers |= {f"rotated_{quantity}": number for quantity, number in rotated.items()}
    return numbers | facts


def plot_compared(numbers: Mapping[str, Numbers]) -> Figure:
    """Plot accuracies of both models against the range of rotations in training."""
    labels = {
        "probe_presence": "probe",
        "clusters_presence": "clusters",
        "rotated_probe_presence": "probe, rotated digits",
    }
    curves: dict[str, Numbers] = {}
    for name, title in (("part_whole", "part-whole"), (snake_case(STACKED), "stacked")):
        for quantity, label in labels.items():
            curves[f"{title}: {label}"] = {
                str(angle): numbers[quantity][f"{name}_{angle}"]
                for angle in COMPARED_DEGREES
                if f"{name}_{angle}" in numbers[quantity]  # upright digits have no rotated ones
            }
    return accuracy_curves(curves, ROTATION_LABEL, 0.1)


def rotate_split(split: Split, degrees: float) -> Split:
    """Rotate the images of a split by uniform angles up to `degrees`, with a fixed seed."""
    generator = torch.Generator().manual_seed(4)
    images = [transforms.Rotate(degrees)(s, generator=generator) for s in split.images.split(2000)]
    return replace(split, images=torch.cat(images))


def plot_accuracies(numbers: Mapping[str, Numbers], chance: float) -> Figure:
    """Plot accuracy against the range of rotations in training."""
    kinds = {UPRIGHT: "upright", ROTATED: "rotated as in training"}
    names = {f"{k}_{c}": f"{title}, {w}" for k, title in kinds.items() for c, w in COLUMNS.items()}
    for kind, title in kinds.items():
        names[f"{kind}_aligned"] = f"{title}, kinds and codes, rotation inferred"
    drawn = {label: numbers[name] for name, label in names.items() if name in numbers}
    return accuracy_curves(drawn, ROTATION_LABEL, chance)


@torch.no_grad()
def plot_parts(entry: Entry, data: Dataset) -> Figure:
    """Draw three test digits at four rotations, and their parts, each in its color."""
    digits = data.test.images[:3].repeat_interleave(4, 0)
    angle = torch.tensor([0.0, 45.0, 90.0, 180.0]).deg2rad().repeat(3)
    images = rotate_images(digits, angle)
    painted = colored_parts(entry.model.discretize(), infer_parts(entry.guide, images))
    title = "Digits at 0, 45, 90 and 180 degrees, and their inferred parts"
    return image_rows({"image": images, "parts": painted}, title)


def likeness(templates: Tensor, rotations: int = 8, steps: int = 50) -> Tensor:
    """Return the likeness of each template to each other one under the best affine map, (P, P).

    The likeness is the cosine of the angle between two images, row i drawn as column j, at the best
    affine map that Adam finds from several rotations. It is 1 on the diagonal.

    Args:
        templates: ink of P templates, (P, h, w), at least 0.
        rotations: number of rotations that initialize the search.
        steps: updates of Adam.
    """
    size = (_MARGIN * templates.shape[1], _MARGIN * templates.shape[2])
    parts = len(templates)
    rest = poses.identity_like(templates) / _MARGIN  # templates fill the middle of the canvas
    ink = templates.detach()[:, None]
    target = _draw_templates(ink, rest.expand(1, parts, 6), size)[0]  # (P, pixels)
    angle = 2 * math.pi * torch.arange(rotations, dtype=rest.dtype, device=rest.device) / rotations
    pose = poses.rotation(angle) / _MARGIN
    pose = pose[None, :, None].repeat(parts, 1, parts, 1).requires_grad_()  # (targets, T, P, 6)
    optimizer = torch.optim.Adam([pose], _RATE)
    best = templates.new_zeros(parts, parts)
    with torch.enable_grad():
        for _ in range(steps):
            drawn = _draw_templates(ink, pose.flatten(0, 1), size).unflatten(0, (parts, rotations))
            cosine = F.cosine_similarity(drawn, target[:, None, None], dim=-1, eps=1e-6)
            best = torch.maximum(best, cosine.detach().amax(1).T)
            optimizer.zero_grad()
            (-cosine.sum()).backward()
            optimizer.step()
    return best


def count_copies(alike: Tensor, least: float = COPY) -> int:
    """Return the number of templates that have a mutual copy, from their `likeness`."""
    mutual = torch.minimum(alike, alike.T).fill_diagonal_(0)
    return int((mutual.amax(1) >= least).sum())


def _draw_templates(ink: Tensor, pose: Tensor, size: tuple[int, int]) -> Tensor:
    """Render templates (P, 1, h, w) at poses (B, P, 6), (B, P, pixels)."""
    return warp_templates(ink, pose, size)[:, 0].transpose(0, 1).flatten(2)
