"""The pose of a digit in the codes of recurrent capsules, of DRAW, and in the pixels themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyro
import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from torch import Tensor

from capsule_zoo.data import Binarize, load_dataset, transforms
from capsule_zoo.data.seeds import seeded_generator
from capsule_zoo.experiments import Options, Result, experiment
from capsule_zoo.experiments.common.energy import binary_mnist
from capsule_zoo.experiments.common.findings import by_quantity, mean_and_error, ratio
from capsule_zoo.experiments.recurrent_capsules.headline import held_out
from capsule_zoo.experiments.training import train
from capsule_zoo.guides import RecurrentEncoder
from capsule_zoo.inference import Inputs
from capsule_zoo.models.common.modes import in_eval_mode
from capsule_zoo.records import Numbers, Table
from capsule_zoo.registry import Entry, create, load
from capsule_zoo.zoo.recurrent_capsules.figures import readings

WEIGHTS = "recurrent-capsules-mnist"
QUANTITIES = {"shift": [0, 1], "rotation": [2], "scale": [3]}  # columns of `moved`'s numbers
PENALTIES = np.logspace(-1, 6, 8)  # of the ridge regression
Features = Callable[[Tensor], np.ndarray]


@experiment("recurrent-capsules/pose", data="mnist", minutes=20)
def pose(
    options: Options,
    *,
    updates: int = 4000,
    fitted: int = 10_000,
    images: int = 2000,
    shifts: tuple[int, ...] = (1, 2, 4),
    pixels: float = 4.0,
    degrees: float = 30.0,
    factor: float = 0.2,
) -> Result:
    """Read shift, rotation and scale off the codes, compared with DRAW (20 core-minutes).

    The capsules are the published weights `recurrent-capsules-mnist`, unless another run is given.
    They saw labels. DRAW is trained here, with as many strokes, numbers in its code and units, and
    without labels. `negative ELBO` shows how well each of them is trained; numbers of codes compare
    only as far as this is alike. Neither of them saw a digit that was moved. `untrained` are the
    capsules before any training, because random features of an image tell its pose too.

    Gray digits are shifted, rotated and scaled at once, each by a number that is uniform in its
    range, then binarized. A ridge regression reads these numbers off the code: the posterior means
    of all strokes, where each stroke follows the means of the strokes before it. It is fitted on
    moved training images, with the penalty that is best there by leave-one-out, and tested on moved
    test images. `pixels` is the same regression on the image itself. `r2` is the share of variance
    that is explained, `error` the mean distance: in pixels (along both axes together), degrees, and
    as a difference of factors.

    `move` is the squared distance between the codes of a test image as it is and shifted by whole
    pixels along an axis, as a multiple of the sum of the variances of the code over test images. Of
    two different images it is 2 on average.

    Args:
        updates: updates of DRAW, unless minutes are given.
        fitted: number of training images of the regression.
        images: number of test images.
        shifts: shifts of `move`, in pixels.
        pixels: largest shift of the regression, along each axis.
        degrees: largest rotation, either way.
        factor: largest difference of the scale from 1, below 1.
    """
    data = binary_mnist(options)
    capsules = load(options.run or WEIGHTS)
    if not isinstance(capsules.guide, RecurrentEncoder):
        raise ValueError(
            f"run holds {capsules.name!r}, but recurrent capsules are needed; name a run of "
            "recurrent-capsules"
        )
    options.say("Training DRAW")
    entries = {"capsules": capsules, "draw": draw_like(capsules, options, updates)}
    pyro.set_rng_seed(options.seed)
    entries["untrained"] = create(capsules.name, **capsules.sizes)
    readers: dict[str, Features] = {n: partial(code_means, e) for n, e in entries.items()}
    readers["pixels"] = lambda x: x.flatten(1).numpy()
    gray = load_dataset("mnist", root=options.data_root)
    reach = torch.tensor([pixels, pixels, degrees, factor])
    known, known_numbers = moved(gray.train.images[:fitted], reach, options.seed)
    tests, numbers = moved(gray.test.images[:images], reach, options.seed + 1)
    still = data.test[:images]
    rows: dict[str, Numbers] = {}
    moves: dict[str, Numbers] = {}
    predicted: dict[str, np.ndarray] = {}
    for name, read in readers.items():
        options.say(f"Reading poses off {name}")
        predicted[name] = fit_ridge(read(known), known_numbers).predict(read(tests))
        rows[name] = scores(torch.from_numpy(predicted[name]), numbers)
        moves[name] = moves_of(read, still.images, shifts)
        if name in entries:
            rows[name]["neg_elbo"] = held_out(entries[name], still, 1, options)["neg_elbo"]
    found: dict[str, Table] = {
        "read off": Table(by_quantity(rows)),
        "squared move by pixels": Table(moves, "move_{quantity}_{variant}"),
    }
    return Result({**found}, {"": readings(predicted, numbers.numpy())})


def draw_like(entry: Entry, options: Options, updates: int) -> Entry:
    """Train DRAW with as many strokes, numbers in its code and units as recurrent capsules have."""
    model = entry.model
    sizes = dict(steps=model.steps, latent=model.latent, units=model.units)
    pyro.set_rng_seed(options.seed)
    draw = create("draw", image_shape=model.image_shape, **sizes)
    limit: dict[str, Any] = options.limit(updates)
    train(draw, binary_mnist(options), options, name="draw", inputs=Inputs(Binarize()), **limit)
    return draw


def moved(images: Tensor, reach: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Move gray images (N, C, H, W) at random and binarize them, the same way on every call.

    Args:
        reach: largest shift to the right and down (pixels), rotation (degrees) and difference of
            the scale from 1, (4,).

    Returns:
        The images, and the shifts, rotations and scales of their motions (N, 4).
    """
    generator = seeded_generator(seed)
    numbers = reach * (2 * torch.rand(len(images), 4, generator=generator) - 1)
    numbers = numbers + numbers.new_tensor([0, 0, 0, 1])
    x, y, degrees, scale = numbers.unbind(1)
    motions = transforms.motion(degrees, scale=(scale, scale), shift=(x, y))
    warped = transforms.warp_images(images, motions).clamp(0, 1)
    return Binarize()(warped, generator=generator), numbers


class AtMeans(Messenger):
    """A handler that sets some sites of a guide to the means of their laws."""

    def __init__(self, sites: Sequence[str]) -> None:
        super().__init__()
        self.sites = sites

    def _pyro_sample(self, message: dict) -> None:
        if message["name"] in self.sites:
            message["value"] = message["fn"].mean
            message["done"] = True


@torch.no_grad()
def code_means(entry: Entry, images: Tensor) -> np.ndarray:
    """Return the posterior means of all strokes, each given the means before it, (N, T latent)."""
    found = []
    with in_eval_mode(entry.guide), AtMeans(entry.guide.covers):
        for few in images.split(500):
            nodes = poutine.trace(entry.guide).get_trace(few).nodes
            found.append(torch.cat([nodes[name]["value"] for name in entry.guide.covers], 1))
    return torch.cat(found).numpy()


def fit_ridge(features: np.ndarray, numbers: Tensor) -> Any:
    """Return a ridge regression of numbers (N, 4) on standardized features (N, K).

    Each number has the penalty of its own that is best by leave-one-out.
    """
    from sklearn.linear_model import RidgeCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    regression = RidgeCV(PENALTIES, alpha_per_target=True)
    return make_pipeline(StandardScaler(), regression).fit(features, numbers.numpy())


def scores(predicted: Tensor, numbers: Tensor) -> Numbers:
    """Return the explained variance and the mean error of each quantity, from (N, 4) numbers."""
    found: Numbers = {}
    for name, columns in QUANTITIES.items():
        own, wrong = numbers[:, columns], (predicted - numbers)[:, columns].square().sum(1)
        left, error, count = ratio(wrong, (own - own.mean(0)).square().sum(1))
        found[f"{name}_r2"] = (1 - left, error, count)
        found[f"{name}_error"] = mean_and_error(wrong.sqrt())
    return found


def moves_of(read: Features, images: Tensor, shifts: tuple[int, ...]) -> Numbers:
    """Return the squared move of features by shift; images take turns in its four directions."""
    before = read(images)
    variance = before.var(0).sum()
    right, down = torch.tensor([[1, 0], [0, 1], [-1, 0], [0, -1]]).repeat(len(images), 1).T
    found: Numbers = {}
    for shift in shifts:
        x, y = (shift * way[: len(images)] for way in (right, down))
        after = read(transforms.shift_pixels(images, x, y))
        found[str(shift)] = mean_and_error(((after - before) ** 2).sum(1) / variance)
    return found
