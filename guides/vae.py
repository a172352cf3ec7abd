"""The guide to a variational autoencoder: a convolutional network infers the code.

    q(z | image) = Normal(mean, scale),    (mean, log_scale) = CNN(image)

The network has two convolutions of stride 2, which mirror the decoder, and one hidden layer.

References:
    Kingma & Welling 2014, "Auto-Encoding Variational Bayes" (arXiv 1312.6114).
"""

import pyro
import pyro.distributions as dist
from pyro.nn import PyroModule
from torch import Tensor, nn

from capsule_zoo.guides.base import Guide
from capsule_zoo.models.baselines.vae import VariationalAutoencoder
from capsule_zoo.models.checks import check_at_least
from capsule_zoo.models.common.spaces import ImageSpace, ObservationSpace
from capsule_zoo.models.networks.convolutional import Encoder


class ConvolutionalEncoder(Guide[VariationalAutoencoder]):
    """A convolutional encoder: the guide q(code | image) of a `VariationalAutoencoder`.

    It is described at the top of this file.

    Args:
        model: the autoencoder.
        hidden: units of the layer between the maps and the code.
        context: further channels, such as the surroundings of an object in a scene, that are read
            in addition to the channels of the image; they come last.

    Raises:
        ValueError: `model` is not a variational autoencoder, or a size is too small.
    """

    def __init__(self, model: VariationalAutoencoder, hidden: int = 256, context: int = 0) -> None:
        super().__init__(model)
        check_at_least(1, hidden=hidden)
        check_at_least(0, context=context)
        self.context = context
        channels, height, width = model.image_shape
        self.encoder = Encoder((channels + context, height, width), model.channels, hidden)
        self.code = PyroModule[nn.Linear](hidden, 2 * model.latent)

    @property
    def space(self) -> ObservationSpace:
        """The space of the guide's inputs: images, with the context as further channels."""
        if not self.context:
            return self.model.space
        channels, height, width = self.model.image_shape
        return ImageSpace((channels + self.context, height, width))

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        """Sample the codes and return them, (B, latent)."""
        distribution = self.code_distribution(images)
        with pyro.plate("images", len(images), dim=-1):
            return pyro.sample("image_code", distribution)

    def expectations(self, images: Tensor) -> Tensor:
        """Compute E_q[z | image], (B, latent)."""
        return self.code_distribution(images).mean

    def code_distribution(self, images: Tensor) -> dist.TorchDistribution:
        """Return q(z | image), with batch shape (B,) and event shape (latent,)."""
        mean, log_scale = self.code(self.encoder(images)).chunk(2, dim=-1)
        return dist.Normal(mean, log_scale.exp()).to_event(1)
