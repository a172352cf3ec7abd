"""Compare a training step of recurrent capsules with a step of DRAW of equal sizes.

A step is the loss and gradient of 64 images with ten strokes, a window of 12 x 12 and 256 units, so
images per second are 64 divided by the seconds. `draw` is the zoo's DRAW: this code with the
capsules off. `plain_torch` is DRAW as in its paper, written by hand without Pyro, with pixels
counted from 1. These two are checked to be equal in float64 before they are timed. `linear` has
linear layers instead of votes and routing. `every` looks through its capsules at each step.
"""

from collections.abc import Callable

import pyro
import torch
import torch.nn.functional as F
from harness import Benchmark, Contestants, check_same_gradients, main
from torch import Tensor

from capsule_zoo.inference import loss_per_image
from capsule_zoo.inference.training.memory import keep_memory
from capsule_zoo.models.networks.attention_window import Aim
from capsule_zoo.models.networks.layers import CoupledLSTM
from capsule_zoo.registry import Entry, create

BATCH = 64
VARIANTS = {
    "zoo": ("recurrent-capsules", {}),
    "linear": ("recurrent-capsules", {"routing": None}),
    "every": ("recurrent-capsules", {"capsules": "every"}),
    "draw": ("draw", {}),
}


class PlainDraw:
    """DRAW by the paper's equations, with an entry's parameters; its loss in nats per image."""

    def __init__(self, entry: Entry) -> None:
        self.model = entry.model
        self.guide = entry.guide

    def __call__(self, images: Tensor) -> Tensor:
        model, guide, batch = self.model, self.guide, len(images)
        image, canvas = images[:, 0], model.blank[0].expand(batch, -1, -1)
        hidden = cell = encoder = encoder_cell = images.new_zeros(batch, model.units)
        divergence = images.new_zeros(())
        for _ in range(model.steps):
            columns, rows, intensity = self.filters(guide.aim, hidden)
            glimpses = [
                rows @ x @ columns.mT * intensity for x in (image, image - canvas.sigmoid())
            ]
            inputs = torch.cat([torch.stack(glimpses, 1).flatten(1), hidden], 1)
            encoder, encoder_cell = self.recur(guide.cell, inputs, encoder, encoder_cell)
            mean, log_scale = guide.code(encoder).chunk(2, 1)
            noise = torch.normal(torch.zeros_like(mean), torch.ones_like(mean))
            variance = (2 * log_scale).exp()
            kl_terms = mean.square() + variance - 1 - 2 * log_scale
            divergence = divergence + 0.5 * kl_terms.sum()
            code = mean + noise * log_scale.exp()
            hidden, cell = self.recur(model.cell, code, hidden, cell)
            columns, rows, intensity = self.filters(model.aim, hidden)
            patch = model.paint(hidden).view(batch, model.window_size, model.window_size)
            canvas = canvas + rows.mT @ patch @ columns / intensity
        missing = F.binary_cross_entropy_with_logits(canvas, image, reduction="sum")
        return (missing + divergence) / batch

    def recur(
        self, module: CoupledLSTM, inputs: Tensor, hidden: Tensor, cell: Tensor
    ) -> tuple[Tensor, Tensor]:
        forget, output, new = module.gates(torch.cat([inputs, hidden], 1)).chunk(3, 1)
        forget = forget.sigmoid()
        cell = forget * cell + (1 - forget) * new.tanh()
        return output.sigmoid() * cell.tanh(), cell

    def filters(self, aim: Aim, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the window's filters F_x, F_y (B, N, pixels) and its intensity (B, 1, 1)."""
        height, width, size = *aim.shape, aim.size
        x, y, log_variance, log_delta, log_intensity = aim.place(hidden)[..., None, None].unbind(1)
        step = torch.arange(1, size + 1).to(hidden)[:, None] - size / 2 - 0.5
        stride = (max(height, width) - 1) / (size - 1) * log_delta.exp()
        banks = []
        for offset, pixels in ((x, width), (y, height)):
            mean = (pixels + 1) / 2 * (offset + 1) + step * stride
            apart = torch.arange(1, pixels + 1).to(hidden) - mean
            bank = (-apart.square() / (2 * log_variance.exp())).exp()
            banks.append(bank / bank.sum(-1, keepdim=True))
        return banks[0], banks[1], log_intensity.exp()


def prepare(name: str, dtype: torch.dtype = torch.float32) -> tuple[Entry, Tensor]:
    """Return an untrained entry and a batch of binary noise."""
    pyro.set_rng_seed(0)
    kind, sizes = VARIANTS[name]
    entry = create(kind, **sizes)
    entry.model.to(dtype)
    entry.guide.to(dtype)
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(BATCH, *entry.model.image_shape, generator=generator) < 0.2
    return entry, images.to(dtype)


def zoo_loss(entry: Entry, images: Tensor) -> Callable[[], Tensor]:
    return lambda: loss_per_image(entry.objective, entry.model, entry.guide, images)


def make() -> Contestants:
    keep_memory()
    steps = {name: zoo_loss(*prepare(name)) for name in VARIANTS}
    entry, images = prepare("draw")
    steps["plain_torch"] = lambda: PlainDraw(entry)(images)
    return {name: lambda loss=loss: loss().backward() for name, loss in steps.items()}


def check() -> None:
    """Check that DRAW by hand has the zoo's loss and gradients in float64."""
    entry, images = prepare("draw", torch.float64)
    losses = zoo_loss(entry, images), lambda: PlainDraw(entry)(images)
    check_same_gradients(losses, (entry.model, entry.guide), rtol=1e-7, atol=1e-7)


if __name__ == "__main__":
    data = f"{BATCH} images of binary noise, 28x28 pixels"
    peers = ("draw", "plain_torch")
    main(Benchmark("recurrent_capsules", make, check, "zoo", peers, data))
