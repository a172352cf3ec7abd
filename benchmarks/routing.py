"""Time a training step of matrix capsules with EM routing, 28x28 images, three iterations.

There are two presets: the small one with 16 images and the full one with 8. Images are padded to
32x32, so that grids are 14x14, 6x6 and 4x4, as in the paper. The peer `textbook` is the small
network as it is usually written: votes by broadcasting (image, position, child, parent, 4, 4),
moments and densities by elementwise products, and all intermediate results kept by autograd. It
computes equal numbers, which is checked first in float64. The other contestants show how the
time grows: twice the images, twice the types of capsules in every layer, one and five iterations.
`entry` is the entry `matrix-capsules` as it trains on MNIST: images are not padded, and a batch has
32 of them.
"""

import math
from collections.abc import Callable
from functools import partial

import pyro
import torch
from harness import (
    Benchmark,
    Contestant,
    Contestants,
    check_same_gradients,
    images_of_noise,
    main,
    update,
)
from torch import Tensor

from capsule_zoo.guides import EMRouting
from capsule_zoo.inference.training.memory import keep_memory
from capsule_zoo.models import MatrixCapsules
from capsule_zoo.models.matrix_capsules import PRESETS, spread_energy
from capsule_zoo.models.networks.classifier import standardize_images
from capsule_zoo.models.routing.capsule_convolution import CapsuleGrid, CapsuleLayer

BATCH = {"small": 16, "full": 8}


def network(preset: str = "small", iterations: int = 3, **sizes) -> MatrixCapsules:
    pyro.set_rng_seed(0)
    return MatrixCapsules(
        routing=EMRouting(iterations), **{"padding": 2, **PRESETS[preset], **sizes}
    )


def loss_of(model: MatrixCapsules, scores: Callable, batch: tuple[Tensor, Tensor]) -> Tensor:
    pixels, labels = batch
    energy = spread_energy(scores(pixels).sigmoid(), model.margin)
    return energy.gather(-1, labels[:, None]).mean()


def step(model: MatrixCapsules, scores: Callable, number: int) -> Contestant:
    """Return a training step: loss, gradient and Adam's update."""
    batch = images_of_noise(number)
    return update([model], lambda: loss_of(model, scores, batch), lr=3e-3)


def ours(preset: str, number: int | None = None, **settings) -> Contestant:
    model = network(preset, **settings)
    return step(model, model.scores, number or BATCH[preset])


def textbook(preset: str) -> Contestant:
    model = network(preset)
    return step(model, Textbook(model), BATCH[preset])


class Textbook:
    """The matrix-capsule network with a network's parameters, written layer by layer."""

    def __init__(self, model: MatrixCapsules) -> None:
        self.model = model

    def __call__(self, pixels: Tensor) -> Tensor:
        model = self.model
        grid = model.primary(model.stem(standardize_images(pixels)).relu())
        for layer in (*model.layers, model.classes):
            grid = self.route(layer, grid)
        return grid.logits[:, 0]

    def route(self, layer: CapsuleLayer, grid: CapsuleGrid) -> CapsuleGrid:
        windows, distribution = layer.windows, layer.distribution()
        pose = windows.see(grid.pose).flatten(2, 3)[:, :, :, None]  # (N, P, I, 1, 4, 4)
        votes = (pose @ layer.transforms()).transpose(-1, -2).flatten(-2)  # (N, P, I, J, 16)
        if hasattr(layer, "offset"):
            votes = votes + layer.offset.T[:, None]
        presence = windows.see(grid.presence).flatten(2)[..., None]  # (N, P, I, 1)
        types = grid.logits.shape[2]
        parents = windows.num_claims().repeat_interleave(types, 1) * votes.shape[3]
        fraction = (1 / parents.to(votes))[None, :, :, None].expand(votes.shape[:4])
        for t in range(layer.routing.iterations):
            weight = (fraction * presence)[..., None]
            count = weight.sum(2)  # (N, P, J, 1)
            mean = (weight * votes).sum(2) / count
            apart = (votes - mean[:, :, None]).square()
            variance = (weight * apart).sum(2) / count + distribution.noise
            cost = count[..., 0] * (0.5 * (2 * math.pi * math.e * variance).log().sum(-1))
            cold = distribution.inverse_temperature * (1 - layer.routing.anneal ** (t + 1))
            logits = cold * (distribution.beta_a - cost - count[..., 0] * distribution.beta_u)
            square = (apart + distribution.noise) / variance[:, :, None]
            density = -0.5 * (square + (2 * math.pi * variance).log()[:, :, None]).sum(-1)
            claim = density + torch.nn.functional.logsigmoid(logits)[:, :, None]
            best = claim.detach().amax((1, 2, 3), keepdim=True)  # over all parents of an image
            fraction = self.normalize(claim - best, windows.cells, types, len(grid.pose[0]))
        return CapsuleGrid(mean.unflatten(3, (4, 4)).mT, logits, layer.shape)

    def normalize(self, claim: Tensor, cells: Tensor, types: int, number: int) -> Tensor:
        """Return each child's softmax of the claims; only for float64 or moderate claims."""
        claim = claim.exp()
        here = claim.sum(3).reshape(len(claim), -1, types)  # (N, P x K, types)
        total = here.new_zeros(len(claim), number, types).index_add(1, cells.flatten(), here)
        return claim / total[:, cells].flatten(2, 3)[..., None]


def make() -> Contestants:
    keep_memory()  # as `fit` does
    return {
        "small": ours("small"),
        "textbook": textbook("small"),
        "full": ours("full"),
        "small_twice_the_images": ours("small", 2 * BATCH["small"]),
        "entry": ours("small", 2 * BATCH["small"], padding=0),
        "small_twice_the_types": ours("small", capsules=(16, 32, 32)),
        "small_one_iteration": ours("small", iterations=1),
        "small_five_iterations": ours("small", iterations=5),
    }


def check() -> None:
    """Check that losses and gradients agree in float64, up to rounding."""
    model = network(features=8, capsules=(3, 4, 4)).double()
    batch = images_of_noise(2, torch.float64)
    losses = [partial(loss_of, model, scores, batch) for scores in (model.scores, Textbook(model))]
    check_same_gradients(losses, [model], rtol=1e-6, atol=1e-9)


if __name__ == "__main__":
    data = "images of noise, 28x28 pixels: 16 for the small preset, 8 for the full one"
    main(Benchmark("routing", make, check, "small", ("textbook",), data))
