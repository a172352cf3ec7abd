"""Digits on request from codes that have laws: nats, draws at any angle, angles inferred.

The article's networks are autoencoders, and so are those of the other experiments. Here all classes
are asked for at every angle under the variational guide, so that there is a bound on log p(image),
a prior to draw from, and a posterior that says how an image was turned. The decoder of a VAE, with
the same encoder, stands beside the capsules.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pyro
import torch
from torch import Tensor

from capsule_zoo.data import Rotations
from capsule_zoo.experiments import Options, Result, experiment
from capsule_zoo.experiments.findings import bounds_of_rows, by_quantity, pictures
from capsule_zoo.experiments.generative_capsnet import (
    TURNED,
    inferred_angles,
    jobs_of,
    learn,
    on_canvas,
    some_requests,
    turned,
)
from capsule_zoo.experiments.training import side_by_side
from capsule_zoo.figures.grids import image_rows
from capsule_zoo.inference import compare
from capsule_zoo.records import Numbers
from capsule_zoo.registry import Entry, load

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CAPSNETS = ("digit_capsules", "continuous", "digit_capsules_linear", "continuous_linear")
EVERY_ANGLE = replace(TURNED, rare=TURNED.usual)
WEIGHED = 1000  # images
PARTICLES = 100
DREAMS = 6


@experiment("generative-capsnet/mnist")
def mnist(options: Options) -> Result:
    """Nats, with all digits at every angle under the variational guide (35 core-minutes).

    Bounds are of plain test images. The capsule network with the higher one is kept.
    """
    options.refuse_run()
    data = on_canvas(EVERY_ANGLE, options)
    names = ("vae", *CAPSNETS)
    runs = [(name, options.seed) for name in names]
    measured: dict[str, Numbers] = {}
    with TemporaryDirectory() as folder:
        jobs = jobs_of(runs, EVERY_ANGLE, options, Path(folder), "variational")
        options.say(f"Training {', '.join(names)}")
        for name, (steps, errors) in zip(names, side_by_side(learn, jobs), strict=True):
            measured[name] = {
                "updates": (float(steps), None, 1),
                "error_all_angles": (float(errors["circle"].mean()), None, 1),
            }
        entries = {job.decoder: load(job.folder) for job in jobs}
    pairs = {name: (entry.model, entry.guide) for name, entry in entries.items()}
    table = compare(pairs, data.test[:WEIGHED], num_particles=PARTICLES, seed=options.seed)
    bounds = bounds_of_rows(table)
    for name, entry in entries.items():
        options.say(f"Inferring by {name} how images were turned")
        measured[name]["inferred_degrees"] = inferred_angles(entry, data, options)
    kept = entries[max(CAPSNETS, key=lambda name: bounds["elbo"][name][0])]
    drawn = pictures(kept, data.test.images)
    drawn["dreams"] = dreams(kept, some_requests(data, EVERY_ANGLE), options.seed)
    drawn["turned_back"] = turned_back(kept, data.test.images[:12], options.seed)
    return Result({**bounds, **by_quantity(measured)}, drawn, table, kept)


@torch.no_grad()
def dreams(entry: Entry, asked: Tensor, seed: int) -> Figure:
    """Draws from the prior, each as it looks under every request (points, parameters)."""
    pyro.set_rng_seed(seed)
    codes = {name: law.sample((DREAMS,)) for name, law in entry.model.prior().items()}
    numbers, rows = Rotations().numbers(asked), {}
    for i in range(DREAMS):
        one = {name: code[[i] * len(asked)] for name, code in codes.items()}
        rows[f"draw {i + 1}"] = entry.model.mean_image(one, numbers)
    return image_rows(rows, "Draws from the prior, each asked for at every 36 degrees")


def turned_back(entry: Entry, images: Tensor, seed: int) -> Figure:
    """Images, turned, and turned back by the angles that were inferred."""
    given, _, found = turned(entry, images, seed)
    rows = {"test image": images, "as given": given}
    rows["turned back"] = Rotations().move(given, -found)
    return image_rows(rows, "Angles inferred from single images")
