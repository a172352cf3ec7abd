"""Compare a training step of generative CapsNets with a plain autoencoder of equal sizes.

All contestants encode 28x28 digits with one encoder into a code of 20 numbers, as points. They
draw the digits on 68x68 pixels at the requested shifts. A step is forward, backward and Adam, on
128 images, so images per second are 128 divided by the seconds. `continuous` and the autoencoder
have about equally many parameters, `digit_capsules` has a twenty-fourth of them. `splat` and
`splat_direct` route the continuous capsules alone, forward and backward. `splat` is ours, and
`splat_direct` is the formula of the article's code, which broadcasts distances to all cells. These
two are checked to be equal before they are timed.
"""

from collections.abc import Callable
from functools import partial

import pyro
import torch
from harness import Benchmark, Contestant, Contestants, main, update
from pyro.infer import Trace_ELBO
from torch import Tensor

from capsule_zoo.data import Shifts
from capsule_zoo.inference import loss_per_image
from capsule_zoo.inference.transformations import Requested
from capsule_zoo.models.generative_capsnet import splat
from capsule_zoo.registry import create

BATCH, CANVAS, DIGIT, GRID = 128, 68, 28, (17, 17)
CAPSULES, MAPS = 128, 32
ENTRIES: dict[str, tuple[str, dict]] = {
    "continuous": ("generative-capsnet", {"preset": "continuous-shifts"}),
    "digit_capsules": ("generative-capsnet", {"preset": "shifts"}),
    "autoencoder": ("conditional-autoencoder", {"preset": "shifts", "hidden": 256}),
}


def splat_direct(address: Tensor, activation: Tensor, size: tuple[int, int]) -> Tensor:
    """Draw capsules onto the map from their distances to every cell along both axes."""
    cells = torch.stack(torch.meshgrid(*map(torch.arange, size), indexing="ij"), -1)  # (S, S, 2)
    place = (address + 1) * (torch.tensor(size).to(address) - 1) / 2
    near = (1 - (cells - place[:, :, None, None]).abs()).relu().prod(-1)
    return torch.einsum("bcij,bcm->bmij", near, activation)


def step(name: str) -> Contestant:
    """Return a training step on images of noise, with a window for the digit in the middle."""
    pyro.set_rng_seed(0)
    kind, sizes = ENTRIES[name]
    shape, window = (1, CANVAS, CANVAS), (DIGIT, DIGIT)
    entry = create(kind, image_shape=shape, guide={"window": window}, **sizes)
    entry.use_guide("deterministic")
    model = Requested(entry.model, Shifts(20), [(-20, 20)])
    border = (CANVAS - DIGIT) // 2
    images = torch.nn.functional.pad(torch.rand(BATCH, 1, DIGIT, DIGIT), (border,) * 4)
    labels = torch.zeros(BATCH, dtype=torch.int64)
    pair = model, entry.guide
    return update(pair, partial(loss_per_image, Trace_ELBO(), *pair, images, labels))


def parts(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    address = 2.4 * torch.rand(BATCH, CAPSULES, 2, dtype=dtype) - 1.2  # some are off the grid
    activation = torch.rand(BATCH, CAPSULES, MAPS, dtype=dtype)
    return address.requires_grad_(), activation.requires_grad_()


def slopes(route: Callable[..., Tensor], leaves: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(route(*leaves, GRID).square().mean(), leaves)


def make() -> Contestants:
    leaves = parts()
    return {
        **{name: step(name) for name in ENTRIES},
        "splat": lambda: slopes(splat, leaves),
        "splat_direct": lambda: slopes(splat_direct, leaves),
    }


def check() -> None:
    leaves = parts(torch.float64)
    torch.testing.assert_close(splat(*leaves, GRID), splat_direct(*leaves, GRID))
    for ours, theirs in zip(slopes(splat, leaves), slopes(splat_direct, leaves), strict=True):
        torch.testing.assert_close(ours, theirs)


if __name__ == "__main__":
    data = f"{BATCH} images of noise, {DIGIT}x{DIGIT} pixels on {CANVAS}x{CANVAS}"
    peers = ("autoencoder",)
    main(Benchmark("generative_capsnet", make, check, "continuous", peers, data))
