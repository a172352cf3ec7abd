"""Hidden halves of digits, filled in by part-whole capsules, by a VAE and from training images."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from pyro.distributions import Normal
from torch import Tensor

from capsule_zoo.data import Dataset, hide, load_dataset, occluded
from capsule_zoo.data.missing import SIDES
from capsule_zoo.experiments import Options, Result, experiment
from capsule_zoo.experiments.findings import by_quantity, mean_and_error
from capsule_zoo.experiments.training import shortened, train, trained
from capsule_zoo.figures import grids as figures
from capsule_zoo.inference import FilledIn, fill_in
from capsule_zoo.records import Numbers
from capsule_zoo.registry import Entry, create

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MINUTES = 40  # of the capsules, where no trained ones are given
IMAGES = 200
PARTICLES = 100
STEPS = 100  # of test-time inference
RIVAL_STEPS = 1500  # optimizer steps of the autoencoder
SHOWN = 0.4  # brightness of hidden pixels in the figure


@experiment("part-whole/missing", data="mnist")
def missing(options: Options) -> Result:
    """Hidden halves of digits, filled in; nats and squared error of the hidden pixels (10 minutes).

    Of every held-out digit one half is hidden: left, right, top and bottom in turn. `fill_in`
    infers the latents from the other half, once by the guide alone ("amortised"; it sees black at
    hidden pixels) and once followed by test-time inference on the observed pixels; draws count
    alike. All rows foretell a pixel by normal laws of the capsules' own deviation, so that their
    nats compare: the capsules, a VAE with as many latents as the objects have, a mixture around
    every training image that is weighted by the observed half, and the mean training image.
    """
    data = load_dataset("mnist", root=options.data_root)
    ours = trained("part-whole", data, options, MINUTES)
    vae = autoencoder(ours, data, options)
    images, sigma = data.test.images[:IMAGES], ours.model.sigma_image
    observed = hidden_in_turn(images)

    found: dict[str, FilledIn] = {}
    for name, entry in {"part_whole": ours, "vae": vae}.items():
        for kind, steps in {"_amortised": 0, "": shortened(STEPS, length(options))}.items():
            options.say(f"Filling in hidden halves: {name}{kind}")
            found[f"{name}{kind}"] = fill_in(
                entry.model,
                entry.guide,
                images,
                observed,
                num_particles=PARTICLES,
                steps=steps,
                seed=options.seed,
            )
    found["training_images"] = from_training_images(data.train.images, images, observed, sigma)
    found["mean_image"] = from_mean(data.train.images, images, observed, sigma)
    rows = {name: scores(filled, images, observed) for name, filled in found.items()}
    return Result(by_quantity(rows), {"": draw(images, observed, found)}, entry=vae)


def length(options: Options) -> float:
    """Of this run, as a share of a full one."""
    return (options.minutes or MINUTES) / MINUTES


def autoencoder(ours: Entry, data: Dataset, options: Options) -> Entry:
    """A VAE with as many latent numbers as the objects have, and the same law of pixels."""
    latent = 7 * ours.model.levels[0].size
    sizes = dict(latent=latent, sigma_image=ours.model.sigma_image)
    vae = create("vae", image_shape=data.image_shape, **sizes)
    steps = shortened(RIVAL_STEPS, length(options))
    options.say(f"Training a VAE with {latent} latents for {steps} steps")
    train(vae, data, options, steps=steps)
    return vae


def hidden_in_turn(images: Tensor) -> Tensor:
    """Masks (N, 1, H, W), True where observed: left, right, top and bottom halves are hidden."""
    masks = [occluded((images.shape[2], images.shape[3]), side) for side in SIDES]
    return torch.stack([masks[i % len(masks)] for i in range(len(images))])[:, None]


def from_training_images(known: Tensor, images: Tensor, observed: Tensor, sigma: float) -> FilledIn:
    """The mixture of normal laws around every known image, weighted by the observed pixels.

    Args:
        known: (M, C, H, W).
        images: (N, C, H, W).
        observed: (N, 1, H, W).
        sigma: deviation of a pixel.
    """
    each = [_from_known(known, x, o, sigma) for x, o in zip(images, observed, strict=True)]
    columns = zip(*each, strict=True)
    return FilledIn(*(torch.stack(column) for column in columns))


def _from_known(known: Tensor, image: Tensor, observed: Tensor, sigma: float) -> tuple:
    """One image's mean, likeliest known image, nats of the hidden pixels and effective number."""
    squares = (known - image).square()
    log_share = (-squares * observed).sum((1, 2, 3)) / (2 * sigma**2)
    log_share = log_share.log_softmax(0)
    hidden = ~observed.expand(image.shape)
    constant = int(hidden.sum()) * math.log(sigma * math.sqrt(2 * math.pi))
    log_hidden = (-squares * hidden).sum((1, 2, 3)) / (2 * sigma**2) - constant
    share = log_share.exp()
    mean = torch.einsum("m,mchw->chw", share, known)
    nearest = known[share.argmax()]
    return (
        torch.where(observed, image, mean),
        torch.where(observed, image, nearest),
        (log_share + log_hidden).logsumexp(0),
        1 / share.square().sum(),
    )


def from_mean(known: Tensor, images: Tensor, observed: Tensor, sigma: float) -> FilledIn:
    """The mean of the known images, whatever the observed pixels are."""
    mean = known.mean(0)
    nats = (Normal(mean, sigma).log_prob(images) * ~observed).sum((1, 2, 3))
    filled = torch.where(observed, images, mean)
    return FilledIn(filled, filled, nats, torch.ones(len(images)))


def scores(filled: FilledIn, images: Tensor, observed: Tensor) -> Numbers:
    """Nats of the hidden pixels, squared errors summed over them, and effective draws."""
    hidden = ~observed

    def error(answer: Tensor) -> Tensor:
        return ((answer - images).square() * hidden).sum((1, 2, 3))

    return {
        "log_hidden": mean_and_error(filled.log_hidden),
        "squared_error": mean_and_error(error(filled.images)),
        "squared_error_drawn": mean_and_error(error(filled.drawn)),
        "ess": mean_and_error(filled.ess),
    }


LABELS = {
    "part_whole_amortised": "capsules, guide alone",
    "part_whole": "capsules",
    "vae_amortised": "VAE, guide alone",
    "vae": "VAE",
    "training_images": "training images",
    "mean_image": "mean image",
}


def draw(images: Tensor, observed: Tensor, found: dict[str, FilledIn]) -> Figure:
    """Twelve digits: whole, half hidden, and filled in by each."""
    seen = hide(images, observed).nan_to_num(nan=SHOWN)
    rows = {"image": images[:12], "observed": seen[:12]}
    rows |= {label: found[name].images[:12] for name, label in LABELS.items()}
    return figures.image_rows(rows, "Hidden halves of held-out digits, filled in")
