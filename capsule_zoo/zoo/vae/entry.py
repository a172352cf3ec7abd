"""Variational autoencoder, the baseline without capsules (Kingma and Welling 2014)."""

from pyro.infer import TraceMeanField_ELBO

from capsule_zoo.figures.generic import reconstructions, samples
from capsule_zoo.guides import ConvolutionalEncoder
from capsule_zoo.inference import Pace
from capsule_zoo.models import VariationalAutoencoder
from capsule_zoo.registry import register

register(
    "vae",
    model=VariationalAutoencoder,
    guides={"convolutional": ConvolutionalEncoder},
    objective=TraceMeanField_ELBO,
    training=dict(lr=1e-3, pace=Pace("linear"), batch_size=128),
    figures={"samples": samples, "reconstructions": reconstructions},
    summary="A convolutional network draws an image from one Gaussian code.",
    small=dict(image_shape=(1, 5, 6), latent=2, channels=4, guide=dict(hidden=6)),
)
