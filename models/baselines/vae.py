"""Variational autoencoder: one Gaussian code paints the whole image. The zoo's baseline.

Story. Capsules separate objects, their poses and their parts. Here one vector without structure
holds all of these, and a convolutional network decodes it.

    z ~ Normal(0, I)                                # the code, (B, latent)
    image ~ Normal(decoder(z), sigma_image)         # (B, C, H, W), or Bernoulli(decoder(z))

The decoder is a linear layer to a map of a quarter of the image's size, and two transposed
convolutions that double it. The Gaussian pixels are the same as in part-whole capsules, the
Bernoulli pixels the same as in the RBMs, so that nats can be compared.

References:
    Kingma & Welling 2014, "Auto-Encoding Variational Bayes" (arXiv 1312.6114). They leave the
    networks open; these are our own.
"""

import pyro
import pyro.distributions as dist
from torch import Tensor

from capsule_zoo.models.base import Model, Site
from capsule_zoo.models.checks import check_at_least, check_one_of, check_positive
from capsule_zoo.models.common.spaces import ImageSpace
from capsule_zoo.models.networks.convolutional import LIKELIHOODS, Decoder, pixel_distribution


class VariationalAutoencoder(Model):
    """The VAE with a standard normal code, described at the top of this file.

    Args:
        image_shape: (channels, height, width).
        latent: numbers in a code.
        channels: see `Decoder`.
        likelihood: "normal" or "bernoulli". Bernoulli pixels may be gray. The value is then a
            cross-entropy, not a density.
        sigma_image: standard deviation of a normal pixel, in units of its range.

    Raises:
        ValueError: a size below 1, a standard deviation that is not positive, an unknown
        likelihood.

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
        self.space = ImageSpace(image_shape)
        self.latent = latent
        self.channels = channels
        self.likelihood = likelihood
        self.sigma_image = sigma_image
        self.decoder = Decoder(latent, self.image_shape, channels)

    def forward(
        self, images: Tensor | None = None, labels: Tensor | None = None, batch_size: int = 1
    ) -> Tensor:
        origin = self.decoder.expand.weight.new_zeros(self.latent)
        with pyro.plate("images", batch_size if images is None else len(images), dim=-1):
            code = pyro.sample("image_code", dist.Normal(origin, 1.0).to_event(1))
            return pyro.sample("image", self.image_distribution(code), obs=images)

    def mean_image(self, code: Tensor) -> Tensor:
        """Decode codes (*batch, latent) to mean images E[image | code], (*batch, C, H, W)."""
        return self.decoder(code).sigmoid()

    def image_distribution(self, code: Tensor) -> dist.TorchDistribution:
        """Return p(image | code), event (C, H, W), for codes (*batch, latent)."""
        return pixel_distribution(self.decoder(code), self.likelihood, self.sigma_image)
