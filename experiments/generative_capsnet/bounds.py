"""Digits on request from codes that have laws: bounds, draws at any angle, inferred angles.

The networks of the article are autoencoders, and so are the networks of the other experiments. Here
all classes are requested at every angle under the variational guide, so that there is a bound on
log p(image), a prior to draw from, and a posterior over the angle of an image. The decoder of a
VAE, with the same encoder, is compared with the capsules.
"""

from dataclasses import dataclass, replace

import numpy as np
import pyro
import torch
from matplotlib.figure import Figure
from torch import Tensor

from capsule_zoo.data import Rotations
from capsule_zoo.experiments import Options, Result, experiment
from capsule_zoo.experiments.common.findings import bounds_of_rows, by_quantity, pictures, single
from capsule_zoo.experiments.generative_capsnet.beyond_training import (
    Trainings,
    inferred_angles,
    learn,
    study_of,
    turned,
)
from capsule_zoo.experiments.generative_capsnet.requests import TURNED, on_canvas, some_requests
from capsule_zoo.figures.grids import image_rows
from capsule_zoo.inference import compare
from capsule_zoo.records import Numbers
from capsule_zoo.registry import Entry, load

CAPSNETS = ("digit_capsules", "continuous", "digit_capsules_linear", "continuous_linear")
EVERY_ANGLE = replace(TURNED, rare=TURNED.usual)
DREAMS = 6


@dataclass(frozen=True)
class Bounds(Trainings):
    """The settings of the experiment on bounds: `Trainings`, and what is measured.

    Args:
        decoders: names of the decoders that are trained, a capsule network among them.
        seeds: number of seeds; only the first is measured.
        images: number of test images of each of the classes 4 and 9, for the error at all angles.
        inferred: number of images whose angle is inferred.
        bounded: number of test images of the bounds.
        particles: number of draws of the IWAE bound.
    """

    decoders: tuple[str, ...] = ("vae", *CAPSNETS)
    seeds: int = 1
    bounded: int = 1000
    particles: int = 100


@experiment("generative-capsnet/mnist")
def mnist(options: Options, chosen: Bounds) -> Result:
    """Bound log p of digits at every angle under the variational guide (35 core-minutes).

    Bounds are of plain test images. The capsule network with the highest bound is kept.
    """
    data = on_canvas(EVERY_ANGLE, options)
    study = study_of({"every-angle": EVERY_ANGLE}, chosen, "variational")
    runs = study.run(learn, options)
    folders = study.folders(options)
    entries = {name: load(folders[f"every-angle-{name}"]) for name in chosen.decoders}
    pairs = {name: (entry.model, entry.guide) for name, entry in entries.items()}
    table = compare(
        pairs, data.test[: chosen.bounded], num_particles=chosen.particles, seed=options.seed
    )
    bounds = bounds_of_rows(table)
    measured: dict[str, Numbers] = {}
    for name, entry in entries.items():
        run = runs[f"every-angle-{name}"][0]
        options.say(f"Inferring by {name} how images were turned")
        measured[name] = {
            "updates": single(run["steps"]),
            "error_all_angles": single(np.mean(run["errors"]["circle"])),
            "inferred_degrees": inferred_angles(entry, data, options, chosen.inferred),
        }
    capsnets = [name for name in CAPSNETS if name in entries]
    kept = entries[max(capsnets, key=lambda name: bounds["elbo"][name][0])]
    drawn = pictures(kept, data.test.images)
    drawn["dreams"] = dreams(kept, some_requests(data, EVERY_ANGLE), options.seed)
    few = data.test.images[:12]
    given, _, found = turned(kept, few, options.seed)
    rows = {"test image": few, "as given": given, "turned back": Rotations().move(given, -found)}
    drawn["turned_back"] = image_rows(rows, "Angles inferred from single images")
    return Result({**bounds, **by_quantity(measured)}, drawn, table, kept)


@torch.no_grad()
def dreams(entry: Entry, requests: Tensor, seed: int) -> Figure:
    """Draw samples of the prior, each under every request (points, parameters)."""
    pyro.set_rng_seed(seed)
    codes = {name: law.sample((DREAMS,)) for name, law in entry.model.prior().items()}
    numbers, rows = Rotations().numbers(requests), {}
    for i in range(DREAMS):
        one = {name: code[[i] * len(requests)] for name, code in codes.items()}
        rows[f"draw {i + 1}"] = entry.model.mean_image(one, numbers)
    return image_rows(rows, "Draws from the prior, each requested at every 36 degrees")
