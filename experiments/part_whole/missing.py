"""Hidden halves of digits, filled in by part-whole capsules, by a VAE and from training images."""

import math

import torch
from matplotlib.figure import Figure
from pyro.distributions import Normal
from torch import Tensor

from capsule_zoo.data import hide, load_dataset, occluded
from capsule_zoo.data.missing import SIDES
from capsule_zoo.experiments import Options, Result, experiment, trained
from capsule_zoo.experiments.common.findings import by_quantity, mean_and_error
from capsule_zoo.experiments.part_whole.prior import autoencoder
from capsule_zoo.figures import grids as figures
from capsule_zoo.inference import FilledIn, fill_in
from capsule_zoo.records import Numbers

MINUTES = 40  # of the capsules, in a full run
SHOWN = 0.4  # brightness of hidden pixels in the figure


@experiment("part-whole/missing", data="mnist", minutes=MINUTES, of_runs=True)
def missing(
    options: Options,
    *,
    images: int = 200,
    particles: int = 100,
    steps: int = 100,
    vae_steps: int = 1500,
) -> Result:
    """Fill in hidden halves of digits; measure nats and errors of hidden pixels (10 minutes).

    One half of every held-out digit is hidden: left, right, top and bottom in turn. `fill_in`
    infers the latents from the other half, once by the guide alone ("amortized"; it sees black at
    hidden pixels) and once followed by test-time inference on the observed pixels. Draws count
    alike. All rows predict a pixel by normal laws with the capsules' own deviation, so that their
    nats compare: the capsules, a VAE with as many latents as the objects have, a mixture around
    every training image that is weighted by the observed half, and the mean training image.

    Args:
        images: number of held-out digits.
        particles: number of draws for each digit.
        steps: steps of test-time inference; these and the next shrink with minutes.
        vae_steps: updates of the VAE.
    """
    data = load_dataset("mnist", root=options.data_root)
    ours = trained("part-whole", data, options)
    vae = autoencoder(ours, data, options, steps=options.shortened(vae_steps))
    few, sigma = data.test.images[:images], ours.model.sigma_image
    observed = hidden_in_turn(few)

    found: dict[str, FilledIn] = {}
    for name, entry in {"part_whole": ours, "vae": vae}.items():
        for kind, refining in {"_amortized": 0, "": options.shortened(steps)}.items():
            options.say(f"Filling in hidden halves: {name}{kind}")
            found[f"{name}{kind}"] = fill_in(
                entry.model,
                entry.guide,
                few,
                observed,
                num_particles=particles,
                steps=refining,
                seed=options.seed,
            )
    found["training_images"] = from_training_images(data.train.images, few, observed, sigma)
    found["mean_image"] = from_mean(data.train.images, few, observed, sigma)
    rows = {name: scores(filled, few, observed) for name, filled in found.items()}
    return Result(by_quantity(rows), {"": draw(few, observed, found)}, entry=vae)


def hidden_in_turn(images: Tensor) -> Tensor:
    """Return masks (N, 1, H, W), False in the left, right, top or bottom half, in turn."""
    masks = [occluded((images.shape[2], images.shape[3]), side) for side in SIDES]
    return torch.stack([masks[i % len(masks)] for i in range(len(images))])[:, None]


def from_training_images(known: Tensor, images: Tensor, observed: Tensor, sigma: float) -> FilledIn:
    """Fill in images by the mixture of normal laws around every known image.

    The mixture is weighted by the observed pixels.

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
    """Return an image's mean, likeliest known image, nats of hidden pixels, effective number."""
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
    """Fill in images by the mean of the known images."""
    mean = known.mean(0)
    nats = (Normal(mean, sigma).log_prob(images) * ~observed).sum((1, 2, 3))
    filled = torch.where(observed, images, mean)
    return FilledIn(filled, filled, nats, torch.ones(len(images)))


def scores(filled: FilledIn, images: Tensor, observed: Tensor) -> Numbers:
    """Return nats of the hidden pixels, squared errors summed over them, and effective draws."""
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
    "part_whole_amortized": "capsules, guide alone",
    "part_whole": "capsules",
    "vae_amortized": "VAE, guide alone",
    "vae": "VAE",
    "training_images": "training images",
    "mean_image": "mean image",
}


def draw(images: Tensor, observed: Tensor, found: dict[str, FilledIn]) -> Figure:
    """Draw twelve digits: whole, half hidden, and filled in by each."""
    seen = hide(images, observed).nan_to_num(nan=SHOWN)
    rows = {"image": images[:12], "observed": seen[:12]}
    rows |= {label: found[name].images[:12] for name, label in LABELS.items()}
    return figures.image_rows(rows, "Hidden halves of held-out digits, filled in")
