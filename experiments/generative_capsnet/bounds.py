"""Digits on request from codes with distributions: bounds, samples, inferred angles.

The networks of the article and of `beyond_training` are autoencoders. Here all
classes are requested at every angle under the variational guide, so that there is a bound on
log p(image), a prior to draw from, and a posterior over the angle of an image. The decoder of a
VAE, with an equal encoder, is compared with the capsules.
"""

from dataclasses import replace

import numpy as np
import pyro
import torch
from matplotlib.figure import Figure
from torch import Tensor

from capsule_zoo.data import Dataset, Rotations
from capsule_zoo.experiments import Options, Result, Study, experiment
from capsule_zoo.experiments.common.findings import (
    bounds_of_rows,
    group_by_quantity,
    median_and_error,
    pictures,
    single,
)
from capsule_zoo.experiments.generative_capsnet.beyond_training import (
    RARE,
    ROTATED,
    Task,
    learn,
    load_on_canvas,
    sample_requests,
)
from capsule_zoo.figures.grids import COLUMNS, image_rows
from capsule_zoo.inference import compare
from capsule_zoo.inference.transformations import infer_transformation
from capsule_zoo.records import Number, Numbers
from capsule_zoo.registry import Entry, load

CAPSNETS = ("digit_capsules", "continuous", "digit_capsules_linear", "continuous_linear")
NAMES = {"vae": "autoencoder", **{name: name for name in CAPSNETS}}  # names of the decoders
EVERY_ANGLE = replace(ROTATED, rare=ROTATED.usual)
STEPS = 3000  # updates of every run, unless minutes are given
BOUND_IMAGES, PARTICLES = 1000, 100  # test images for the bounds, draws of the IWAE bound
ROTATED_IMAGES = 60  # images whose angle is inferred
DREAMS = 6


@experiment("generative-capsnet/mnist")
def mnist(options: Options) -> Result:
    """Bound log p of digits at every angle under the variational guide (35 core-minutes).

    Bounds are on plain test images. The capsule network with the highest bound is kept.
    """
    data = load_on_canvas(EVERY_ANGLE, options)
    study = Study({n: Task(d, EVERY_ANGLE, STEPS, "variational") for n, d in NAMES.items()})
    runs = study.run(learn, options)
    entries = {name: load(folder) for name, folder in study.folders(options).items()}
    pairs = {name: (entry.model, entry.guide) for name, entry in entries.items()}
    table = compare(pairs, data.test[:BOUND_IMAGES], num_particles=PARTICLES, seed=options.seed)
    bounds = bounds_of_rows(table)
    measures: dict[str, Numbers] = {}
    for name, entry in entries.items():
        (run,) = runs[name]
        options.say(f"Inferring by {name} how images were rotated")
        measures[name] = {
            "updates": single(run["steps"]),
            "error_all_angles": single(np.mean(run["errors"]["circle"])),
            "inferred_degrees": inferred_angles(entry, data, options),
        }
    best = entries[max(CAPSNETS, key=lambda name: bounds["elbo"][name][0])]
    figures = pictures(best, data.test.images)
    figures["dreams"] = plot_dreams(best, sample_requests(data, EVERY_ANGLE), options.seed)
    preview = data.test.images[:COLUMNS]
    rotated_images, _, inferred = rotate_and_infer(best, preview, options.seed)
    back = Rotations().move(rotated_images, -inferred)
    rows = {"test image": preview, "rotated": rotated_images, "rotated back": back}
    figures["rotated_back"] = image_rows(
        rows, "Test images, rotated at random, and rotated back by the inferred angle"
    )
    return Result({**bounds, **group_by_quantity(measures)}, figures, table, best)


def inferred_angles(entry: Entry, data: Dataset, options: Options) -> Number:
    """Return the median error, in degrees, of the angles inferred from rotated test images.

    The images are of the usual classes.
    """
    usual = torch.isin(data.test.labels, torch.tensor(RARE), invert=True)
    images = data.test.images[usual][:ROTATED_IMAGES]
    _, angles, inferred = rotate_and_infer(entry, images, options.seed)
    error = ((inferred - angles + 180) % 360 - 180).abs()
    return median_and_error(error.squeeze(1), seed=options.seed)


def rotate_and_infer(entry: Entry, images: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rotate images at random; return them, and true and inferred angles (B, 1), in degrees."""
    generator = torch.Generator().manual_seed(seed)
    angles = 360 * torch.rand(len(images), 1, generator=generator) - 180
    rotated_images, grid = Rotations().move(images, angles), torch.arange(-180.0, 180.0, 15.0)
    posterior = infer_transformation(
        entry.model, entry.guide, rotated_images, Rotations(), grid=grid
    )
    return rotated_images, angles, posterior.best


@torch.no_grad()
def plot_dreams(entry: Entry, requests: Tensor, seed: int) -> Figure:
    """Draw samples of the prior, each under every request (points, parameters)."""
    pyro.set_rng_seed(seed)
    codes = {
        name: distribution.sample((DREAMS,)) for name, distribution in entry.model.prior().items()
    }
    numbers, rows = Rotations().numbers(requests), {}
    for i in range(DREAMS):
        one = {name: code[[i] * len(requests)] for name, code in codes.items()}
        rows[f"sample {i + 1}"] = entry.model.mean_image(one, numbers)
    return image_rows(rows, "Samples from the prior, each rotated in steps of 36 degrees")
