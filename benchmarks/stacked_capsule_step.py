"""Time a training step of stacked capsule autoencoders, and the density of its pixels in it.

The peer `stacked_layers` computes the loss with the zoo's networks, but the density of the pixels
from stacks of all layers (`PixelMixture`), as it is written down. Both are checked to be equal
before they are timed. The peer `torch_scae` is a public PyTorch version of the paper, with its own
networks of nearly equal size (1.87 million parameters, ours 1.66). It is timed if it can be
imported: `pip install monty`, and github.com/bdsaglam/torch-scae on PYTHONPATH. The sizes are the
paper's: 16 objects, 24 parts, 11x11 templates, 128 channels.

The stages are forward passes: reader (parts from the image), objects (set transformer), render and
likelihood (the pixels' density), votes.
"""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import pyro
import torch
from harness import Benchmark, Contestant, Contestants, check_same_gradients, main
from pyro import poutine
from torch import Tensor

from capsule_zoo.inference import loss_per_image
from capsule_zoo.inference.objectives.stacked_capsules import drawn_capsules
from capsule_zoo.models import StackedCapsuleAutoencoder
from capsule_zoo.models.parts.object_votes import FeaturedCapsules
from capsule_zoo.models.parts.pixel_mixture import PixelMixture
from capsule_zoo.registry import Entry, create

BATCH = 128


class Stacked(StackedCapsuleAutoencoder):
    """The model with the pixels' density computed from stacks of layers."""

    def image_distribution(self, parts: FeaturedCapsules) -> PixelMixture:  # type: ignore[override]
        return super().image_distribution(parts).as_stacks


def prepare(dtype: torch.dtype = torch.float32) -> tuple[Entry, Stacked, Tensor]:
    """Return an untrained entry, its model with stacked layers, and a batch of noise."""
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


def torch_scae() -> Contestant:
    """Return a training step of the public implementation, its classifiers' losses included."""
    from torch_scae import factory

    sizes = dict(image_shape=(1, 28, 28), n_classes=10, n_part_caps=24, n_obj_caps=16)
    network = factory.make_scae(sizes)
    images, labels = torch.rand(BATCH, 1, 28, 28), torch.arange(BATCH) % 10
    split = torch.split

    def copies(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        return tuple(part.clone() for part in split(*args, **kwargs))

    def step() -> None:
        with patch.object(torch, "split", copies):  # it changes a part of a split
            outputs = network(image=images)
        loss, _ = network.loss(outputs, reconstruction_target=images, label=labels)
        loss.backward()

    return step


PEERS: dict[str, Callable[[], Contestant]] = {
    name: peer for name, peer in (("torch_scae", torch_scae),) if find_spec(name)
}


def make() -> Contestants:
    entry, stacked, images = prepare()
    model, guide = entry.model, entry.guide
    drawn: list[FeaturedCapsules] = []

    def capsules() -> list[FeaturedCapsules]:
        """Return the objects and parts, inferred on first use."""
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
        "render_and_likelihood": lambda: model.image_distribution(capsules()[1]).log_prob(
            images[:, None]
        ),
        "votes": lambda: model.votes(capsules()[0]),
        **{name: peer() for name, peer in PEERS.items()},
    }


def check() -> None:
    """Check that the losses agree in float64, up to rounding."""
    entry, stacked, images = prepare(torch.float64)
    loss_pair = losses(entry, stacked, images[:8])
    check_same_gradients(loss_pair.values(), (entry.model, entry.guide), rtol=1e-7, atol=1e-7)


if __name__ == "__main__":
    data = f"{BATCH} images of noise, 28x28 pixels; 16 objects, 24 parts, 11x11 templates"
    peers = ("stacked_layers", *PEERS)
    main(Benchmark("stacked_capsule_step", make, check, "zoo", peers, data))
