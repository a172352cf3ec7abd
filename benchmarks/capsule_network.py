"""Time a training step of the capsule network, compared with a textbook implementation.

Both presets read 28x28 images, the paper's 16 and the small one 64 of them. The peer `textbook` is
the paper's network as it is usually written: votes of all images at once by broadcasting, routing
coefficients by softmax, and all intermediate results kept by autograd. Its loss and gradients are
first checked to be equal in float64. `cnn` is a convolutional network with as many parameters as
the small guide. A step is forward, backward and Adam.
"""

import math
from collections.abc import Callable

import pyro
import torch
import torch.nn.functional as F
from harness import (
    Benchmark,
    Contestant,
    Contestants,
    check_same_gradients,
    images_of_noise,
    main,
    update,
)
from pyro.infer import Trace_ELBO
from torch import Tensor
from torch.distributions import Normal

from capsule_zoo.inference import loss_per_image
from capsule_zoo.registry import Entry, create

BATCH = {"paper": 16, "small": 64}
ITERATIONS = 3
CNN = dict(channels=(16, 32), hidden=90)


def network(preset: str, **settings) -> Entry:
    pyro.set_rng_seed(0)
    return create("capsule-network", **{"guide.network": preset}, **settings)


def ours(entry: Entry, batch: tuple[Tensor, Tensor]) -> Tensor:
    return loss_per_image(Trace_ELBO(), entry.model, entry.guide, *batch)


def textbook(entry: Entry, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the loss of the capsule network, written as in the paper."""
    model, guide = entry.model, entry.guide
    pixels, labels = batch
    maps = guide.primary.second(F.relu(guide.primary.first(pixels)))
    children = maps.flatten(2).unflatten(1, (-1, 8)).transpose(2, 3).flatten(1, 2)  # (B, I, 8)
    children = squash(children)
    weights = guide.transform.unflatten(2, (-1, 16)).transpose(1, 2)  # (I, J, 8, 16)
    votes = (children[:, :, None, None] @ weights).squeeze(3)  # (B, I, J, 16)
    logits = votes.new_zeros(votes.shape[:3])
    for iteration in range(ITERATIONS):
        total = (logits.softmax(2)[..., None] * votes).sum(1)
        if iteration + 1 < ITERATIONS:
            logits = logits + (votes * squash(total)[:, None]).sum(3)
    capsules = squash(total)  # (B, J, 16)
    targets = F.one_hot(labels, 10).to(capsules)
    length = capsules.norm(dim=2)
    missed, imagined = F.relu(0.9 - length) ** 2, F.relu(length - 0.1) ** 2
    margin = (targets * missed + 0.5 * (1 - targets) * imagined).sum(1)
    drawn = model.decoder((targets[..., None] * capsules).flatten(1)).sigmoid()
    pixels_distribution = Normal(drawn.view_as(pixels), model.sigma_image)
    nats = pixels_distribution.log_prob(pixels).sum((1, 2, 3))
    prior = -0.5 * (total.square() + math.log(2 * math.pi)).sum((1, 2))
    return (model.label_weight * margin - nats - prior).mean()


def squash(vectors: Tensor) -> Tensor:
    square = vectors.square().sum(-1, keepdim=True)
    return square / (1 + square) * vectors / square.sqrt()


def contestant(preset: str, loss: Callable[[Entry, tuple[Tensor, Tensor]], Tensor]) -> Contestant:
    entry, batch = network(preset), images_of_noise(BATCH[preset])
    return update((entry.model, entry.guide), lambda: loss(entry, batch), fused=True)


def cnn() -> Contestant:
    model = create("cnn", **CNN).model
    pixels, labels = images_of_noise(BATCH["small"])
    return update([model], lambda: F.cross_entropy(model.scores(pixels), labels), fused=True)


def make() -> Contestants:
    return {
        "paper": contestant("paper", ours),
        "textbook": contestant("paper", textbook),
        "small": contestant("small", ours),
        "cnn": cnn(),
    }


def check() -> None:
    entry = network("paper", **{"guide.channels": 4}, hidden=(9, 11))
    entry.model.double()
    entry.guide.double()
    batch = images_of_noise(3, torch.float64)
    losses = [lambda: ours(entry, batch), lambda: textbook(entry, batch)]
    check_same_gradients(losses, (entry.model, entry.guide), rtol=1e-4, atol=1e-6)


if __name__ == "__main__":
    data = "images of noise, 28x28 pixels: 16 for the paper's network, 64 for the others"
    main(Benchmark("capsule_network", make, check, "paper", ("textbook",), data, "capsule-network"))
