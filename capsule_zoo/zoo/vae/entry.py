"""Variational autoencoder, the baseline without capsules (Kingma and Welling 2014)."""

from typing import Any

from pyro.infer import TraceMeanField_ELBO

from capsule_zoo.figures.generic import reconstructions, samples
from capsule_zoo.guides import ConvolutionalEncoder
from capsule_zoo.inference import Pace
from capsule_zoo.models import VariationalAutoencoder
from capsule_zoo.registry import Entry, register
from capsule_zoo.sizes import Takes

PICTURES = {"samples": samples, "reconstructions": reconstructions}


@register(
    "vae",
    small=dict(image_shape=(1, 5, 6), latent=2, channels=4, hidden=6),
    takes={"sizes": Takes(VariationalAutoencoder)},
)
def vae(
    image_shape: tuple[int, int, int] = (1, 28, 28),
    latent: int = 32,
    hidden: int = 256,
    context: int = 0,
    **sizes: Any,
) -> Entry[VariationalAutoencoder, ConvolutionalEncoder]:
    """A convolutional network draws an image from one Gaussian code.

    Args:
        image_shape: (channels, height, width).
        latent, sizes: arguments of `VariationalAutoencoder`.
        hidden, context: arguments of `ConvolutionalEncoder`.
    """
    model = VariationalAutoencoder(image_shape, latent, **sizes)
    return Entry(
        model=model,
        guides={"convolutional": lambda entry: ConvolutionalEncoder(entry.model, hidden, context)},
        objective=TraceMeanField_ELBO(),
        training=dict(lr=1e-3, pace=Pace("linear"), batch_size=128),
        figures=PICTURES,
    )
