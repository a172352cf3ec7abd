"""Time a training step of stacked capsule autoencoders, and the density of its pixels in it.

The peer computes the same loss with the same networks, but the density of the pixels from stacks of
all layers (`PixelMixture`), as it is written down. Both are checked to be equal before they are
timed. The sizes are those of the paper: 16 objects, 24 parts, 11x11 templates, 128 channels. A
public PyTorch version of the paper took 2.2 seconds and 2.6 GB for such a step on two idle cores.

The stages are forward passes: reader (parts from the image), objects (set transformer), render and
likelihood (the pixels' density), votes.
"""

from __future__ import annotations

from collections.abc import Callable

import pyro
import torch
from harness import Benchmark, Contestants, check_same_gradients, main
from pyro import poutine
from torch import Tensor

from capsule_zoo.inference import loss_per_image
from capsule_zoo.inference.objectives.stacked_capsules import drawn_capsules
from capsule_zoo.models import StackedCapsuleAutoencoder
from capsule_zoo.models.blocks.object_votes import FeaturedCapsules
from capsule_zoo.models.blocks.pixel_mixture import PixelMixture
from capsule_zoo.registry import Entry, create

BATCH = 128


class Stacked(StackedCapsuleAutoencoder):
    """The model whose pixels have the density that is computed from stacks of layers."""

    def image_law(self, parts: FeaturedCapsules) -> PixelMixture:  # type: ignore[override]
        return super().image_law(parts).stacked


def prepare(dtype: torch.dtype = torch.float32) -> tuple[Entry, Stacked, Tensor]:
    """Return an untrained entry, the same model with stacked layers, and a batch of noise."""
    pyro.set_rng_seed(0)
    entry = create("stacked-capsule-autoencoder", preset="paper", objects=16)
    entry.model.to(dtype)
    entry.guide.to(dtype)
    stacked = Stacked.__new__(Stacked)
    stacked.__dict__.update(entry.model.__dict__)
    return entry, stacked, torch.rand(BATCH, *entry.model.image_shape, dtype=dtype)


def losses(entry: Entry, stacked: Stacked, images: Tensor) -> dict[str, Callable[[], Tensor]]:
    models = {"zoo": entry.model, "stacked_layers": stacked}
    return {
        name: lambda model=model: loss_per_image(entry.objective, model, entry.guide, images)
        for name, model in models.items()
    }


def make() -> Contestants:
    entry, stacked, images = prepare()
    model, guide = entry.model, entry.guide
    drawn: list[FeaturedCapsules] = []

    def capsules() -> list[FeaturedCapsules]:
        """Return objects and parts, drawn on first use."""
        if not drawn:
            with torch.no_grad():
                trace = poutine.trace(guide).get_trace(images)
            drawn.extend(drawn_capsules(trace, level) for level in ("object", "part"))
        return drawn

    steps = losses(entry, stacked, images)
    return {
        **{name: lambda loss=loss: loss().backward() for name, loss in steps.items()},
        "reader": lambda: guide.read_parts(images),
        "objects": lambda: guide.infer_objects(model, capsules()[1]),
        "render_and_likelihood": lambda: model.image_law(capsules()[1]).log_prob(images[:, None]),
        "votes": lambda: model.votes(capsules()[0]),
    }


def check() -> None:
    """Check that the losses agree in float64, where only the last digits may differ."""
    entry, stacked, images = prepare(torch.float64)
    parameters = [*entry.model.parameters(), *entry.guide.parameters()]
    few = losses(entry, stacked, images[:8])
    check_same_gradients(few.values(), parameters, rtol=1e-7, atol=1e-7)


if __name__ == "__main__":
    words = f"{BATCH} images of noise, 28x28 pixels; 16 objects, 24 parts, 11x11 templates"
    main(
        Benchmark(
            "stacked_capsule_step",
            make,
            check,
            "zoo",
            ("stacked_layers",),
            words,
            about="stacked-capsule-autoencoder",
        )
    )
