"""Variational autoencoder, the baseline without capsules (Kingma and Welling 2014)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyro.infer import TraceMeanField_ELBO
from torch import Tensor

from capsule_zoo.guides import ConvolutionalEncoder
from capsule_zoo.inference.ancestral import infer, mean_images
from capsule_zoo.models import VariationalAutoencoder
from capsule_zoo.registry import Entry, register

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def _samples(entry: Entry, images: Tensor) -> Figure:
    from capsule_zoo.figures import image_rows  # only here, so that listing needs no matplotlib

    drawn = mean_images(entry.model, 36).split(12)
    rows = {f"draws {12 * i + 1}-{12 * i + 12}": images for i, images in enumerate(drawn)}
    return image_rows(rows, "Samples from the prior")


def _reconstructions(entry: Entry, images: Tensor) -> Figure:
    from capsule_zoo.figures import image_rows

    few = images[:12]
    rebuilt = mean_images(entry.model, len(few), infer(entry.guide, few))
    return image_rows({"image": few, "reconstruction": rebuilt}, "Images and reconstructions")


@register("vae", small=dict(image_shape=(1, 5, 6), latent=2, channels=4, hidden=6))
def vae(
    image_shape: tuple[int, int, int] = (1, 28, 28),
    latent: int = 32,
    hidden: int = 256,
    **sizes: Any,
) -> Entry:
    """A convolutional network paints from one Gaussian code; see `capsule_zoo.models.vae`.

    Args:
        image_shape: (channels, height, width).
        latent, sizes: arguments of `VariationalAutoencoder`.
        hidden: of `ConvolutionalEncoder`.
    """
    model = VariationalAutoencoder(image_shape, latent, **sizes)
    return Entry(
        model=model,
        guide=ConvolutionalEncoder(model, hidden),
        guides={"convolutional": lambda entry: ConvolutionalEncoder(entry.model, hidden)},
        objective=TraceMeanField_ELBO(),
        training=dict(lr=1e-3, schedule="linear", batch_size=128),
        figures={"samples": _samples, "reconstructions": _reconstructions},
        default_guide="convolutional",
    )
