"""Variational autoencoder: one Gaussian code paints the whole image. The zoo's baseline.

Story. What capsules take apart, objects, their poses and their parts, is here one vector without
structure, and a convolutional network makes of it whatever the images ask for.

    z ~ Normal(0, I)                                # the code, (B, latent)
    image ~ Normal(decoder(z), sigma_image)         # (B, C, H, W), or Bernoulli(decoder(z))

The decoder is a linear layer to a map of a quarter of the image's size, and two transposed
convolutions that double it. The Gaussian pixels are those of part-whole capsules, the Bernoulli
pixels those of the RBMs, so that nats compare.

References:
    Kingma & Welling 2014, "Auto-Encoding Variational Bayes" (arXiv 1312.6114). They leave the
    networks open; these are ours.
"""

from __future__ import annotations

import math

import pyro
import pyro.distributions as dist
import torch.nn.functional as F
from pyro.nn import PyroModule
from torch import Tensor, nn

from capsule_zoo.models.base import Model, Site, check_at_least, check_one_of, check_positive
from capsule_zoo.models.leading import over_leading

LIKELIHOODS = ("normal", "bernoulli")


def halved(size: tuple[int, int]) -> tuple[int, int]:
    """(height, width) after a convolution of stride 2, kernel 3 and padding 1."""
    height, width = size
    return (height + 1) // 2, (width + 1) // 2


class Upsampler(PyroModule):
    """From maps at a quarter of the image's size to the logits of mean pixels, (*batch, C, H, W).

    Two transposed convolutions, each of which doubles the size.

    Args:
        maps: at a quarter of the size, (*batch, maps, *quarter).
        image_shape: (channels, height, width).
        channels: maps at half the size.
    """

    def __init__(self, maps: int, image_shape: tuple[int, int, int], channels: int) -> None:
        super().__init__()
        colours, height, width = image_shape
        self.size = height, width
        self.half = halved(self.size)
        self.quarter = halved(self.half)
        self.grow = PyroModule[nn.ConvTranspose2d](maps, channels, 4, 2, padding=1)
        self.paint = PyroModule[nn.ConvTranspose2d](channels, colours, 4, 2, padding=1)

    def forward(self, maps: Tensor) -> Tensor:
        return over_leading(self._doubled_twice, maps, event_dim=3)

    def _doubled_twice(self, maps: Tensor) -> Tensor:
        """Return the logits (B, C, H, W) of maps (B, maps, *quarter)."""
        (height, width), (rows, columns) = self.half, self.size
        maps = F.elu(self.grow(maps)[..., :height, :width])  # one too many where the size is odd
        return _painted(self.paint, maps)[..., :rows, :columns]


def _painted(layer: nn.ConvTranspose2d, maps: Tensor) -> Tensor:
    """What the layer, which doubles the size, makes of its maps.

    For one colour it is written out as a product and the sum of the patches that overlap, which
    takes half the time: torch's convolutions are made for many maps on either side.
    """
    if layer.out_channels > 1 or layer.bias is None:
        return layer(maps)
    rows, columns = maps.shape[2:]
    patches = layer.weight.flatten(1).T @ maps.flatten(2)
    return F.fold(patches, (2 * rows, 2 * columns), 4, padding=1, stride=2) + layer.bias


class Decoder(Upsampler):
    """From codes (*batch, latent) to the logits of mean pixels, (*batch, C, H, W).

    Args:
        latent: numbers in a code.
        image_shape: (channels, height, width).
        channels: maps at half the image's size; twice as many at a quarter.
    """

    def __init__(self, latent: int, image_shape: tuple[int, int, int], channels: int) -> None:
        super().__init__(2 * channels, image_shape, channels)
        self.expand = PyroModule[nn.Linear](latent, 2 * channels * math.prod(self.quarter))

    def forward(self, code: Tensor) -> Tensor:
        return super().forward(F.elu(self.expand(code)).unflatten(-1, (-1, *self.quarter)))


class VariationalAutoencoder(Model):
    """A decoder under a standard normal code; see the top of this file.

    Args:
        image_shape: (channels, height, width).
        latent: numbers in a code.
        channels: see `Decoder`.
        likelihood: "normal" or "bernoulli". Bernoulli pixels may be grey; the value is then a
            cross-entropy and no density.
        sigma_image: deviation of a normal pixel, in units of its range.

    Raises:
        ValueError: a size below 1, a deviation that is not positive, an unknown likelihood.

    Called as `model(images=None, labels=None, batch_size=1)` it returns the image (B, C, H, W).
    """

    sites = (Site("image_code", ("images",), event_dim=1),)

    def __init__(
        self,
        image_shape: tuple[int, int, int] = (1, 28, 28),
        latent: int = 32,
        *,
        channels: int = 32,
        likelihood: str = "normal",
        sigma_image: float = 0.15,
    ) -> None:
        super().__init__()
        check_at_least(1, image_shape=image_shape, latent=latent, channels=channels)
        check_positive(sigma_image=sigma_image)
        check_one_of("likelihood", likelihood, LIKELIHOODS)
        self.image_shape, self.latent, self.channels = image_shape, latent, channels
        self.likelihood, self.sigma_image = likelihood, sigma_image
        self.decoder = Decoder(latent, self.image_shape, channels)

    def forward(
        self, images: Tensor | None = None, labels: Tensor | None = None, batch_size: int = 1
    ) -> Tensor:
        self.check_images(images)
        origin = self.decoder.expand.weight.new_zeros(self.latent)
        with pyro.plate("images", batch_size if images is None else len(images), dim=-1):
            code = pyro.sample("image_code", dist.Normal(origin, 1.0).to_event(1))
            return pyro.sample("image", self.image_law(code), obs=images)

    def mean_image(self, code: Tensor) -> Tensor:
        """E[image | code], (*batch, C, H, W), of codes (*batch, latent)."""
        return self.decoder(code).sigmoid()

    def image_law(self, code: Tensor) -> dist.TorchDistribution:
        """The law of the image site given codes (*batch, latent): event (C, H, W)."""
        return pixel_law(self.decoder(code), self.likelihood, self.sigma_image)


def pixel_law(logits: Tensor, likelihood: str, sigma_image: float) -> dist.TorchDistribution:
    """The law of images with these logits of mean pixels (*batch, C, H, W); event (C, H, W)."""
    if likelihood == "bernoulli":
        return dist.Bernoulli(logits=logits, validate_args=False).to_event(3)
    return dist.Normal(logits.sigmoid(), sigma_image).to_event(3)
