"""What the pose of a class capsule says: decoded to pixels, and nudged."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

from capsule_zoo.data import Dataset
from capsule_zoo.experiments import Options, Result, experiment
from capsule_zoo.experiments.findings import mean_and_error, squared_error
from capsule_zoo.experiments.matrix_capsules import SHIFT, digits_and_entry
from capsule_zoo.figures.routing import nudges
from capsule_zoo.guides import ClassPose
from capsule_zoo.inference import fit
from capsule_zoo.models import VariationalAutoencoder
from capsule_zoo.models.blocks.capsule_convolution import POSE, RIGHT_COLUMN
from capsule_zoo.models.modes import in_eval_mode
from capsule_zoo.records import Numbers
from capsule_zoo.registry import Entry

NUDGES = torch.linspace(-2, 2, 9)  # deviations
MEASURED = 1000  # test images
STANDARDISED = 2000  # training images, which say how large poses are


@experiment("matrix-capsules/pose", data="mnist")
def pose(options: Options) -> Result:
    """What each number of a class pose does to the image that is decoded from it (70 minutes).

    A decoder of the pose of the label's capsule is trained on the network's poses, the network
    frozen; then each of the 16 numbers is nudged by deviations of its class. `ink_down` and
    `ink_across` say how far the ink's centre moves, in pixels per deviation, with the two numbers
    that the coordinates were added to.
    """
    data, entry = digits_and_entry(options, 60)
    options.say("Training a decoder of the class poses")
    decoder, guide = decoded(entry, data, options, (options.minutes or 60) / 6)
    images = data.test.images[:MEASURED]
    with torch.no_grad(), in_eval_mode(entry.model):
        codes = torch.cat([guide(few) for few in images.split(100)])
        metrics: Numbers = {"squared_error": squared_error(decoder.mean_image(codes), images)}
        for axis, (row, column) in enumerate(RIGHT_COLUMN):
            ends = [nudged(codes, row * POSE + column, by) for by in (-0.5, 0.5)]
            before, after = (ink_centre(decoder.mean_image(code)) for code in ends)
            metrics[f"ink_{('down', 'across')[axis]}"] = mean_and_error((after - before)[:, axis])
        rows = {}
        for row, column in product(range(POSE), range(POSE)):
            several = [nudged(codes, row * POSE + column, by.item())[:1] for by in NUDGES]
            rows[f"({row}, {column})"] = decoder.mean_image(torch.cat(several))
    return Result(metrics, {"": nudges(rows)}, None, entry)


def decoded(
    entry: Entry, data: Dataset, options: Options, minutes: float
) -> tuple[VariationalAutoencoder, ClassPose]:
    """A decoder of the class poses, trained for so long, and the network as the guide to it."""
    latent = entry.model.num_classes * POSE * POSE
    decoder = VariationalAutoencoder(data.image_shape, latent)
    guide = ClassPose(decoder, entry.model.to(options.device)).to(options.device)
    known = data.train[:STANDARDISED]
    guide.standardise(known.images.to(options.device), known.labels.to(options.device))
    fit(
        decoder,
        guide,
        data,
        minutes=minutes,
        schedule="linear",
        labels=True,
        transform=SHIFT,
        seed=options.seed,
        device=options.device,
        progress=options.progress,
    )
    entry.model.cpu()
    return decoder.cpu(), guide.cpu()


def nudged(codes: Tensor, element: int, by: float) -> Tensor:
    """Codes (N, classes x 16) with one element of the class that is there moved by deviations.

    The deviation is that of the element among all codes of the class.
    """
    poses = codes.unflatten(1, (-1, POSE * POSE)).clone()
    label = poses.abs().sum(2).argmax(1)
    for c in label.unique():
        own = label == c
        poses[own, c, element] += by * poses[own, c, element].std(correction=0)
    return poses.flatten(1)


def ink_centre(images: Tensor) -> Tensor:
    """Row and column of the centre of the ink, in pixels, (N, 2)."""
    ink = images.mean(1)
    total = ink.sum((1, 2))
    down, across = (torch.arange(n, dtype=ink.dtype) for n in ink.shape[1:])
    return torch.stack([ink.sum(2) @ down / total, ink.sum(1) @ across / total], 1)
