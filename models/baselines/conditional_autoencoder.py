"""Images on request: a code holds the content of an image, a request its transformation.

Story. A digit can be requested at any angle and position. A code holds its identity. The request
is known beforehand and is not a random variable: it is two numbers, such as the cosine and sine of
an angle or a shift over its largest size. A decoder paints from both.

    z ~ Normal(0, I)                                # the code, (B, latent)
    image ~ Normal(decoder(z, T), sigma_image)      # (B, C, H, W); T is the request, (B, 2)

The decoder ends in a sigmoid that leaks: its means may pass 0 and 1 by a little.

`ConditionalAutoencoder` is the baseline, with one of three decoders:

- "convolutional": a hidden layer mixes code and request, and the rest is the decoder of the VAE.
- "linear": the hidden layer is linear in the request instead. The code gives every unit its
  coefficients, as it gives every part of a generative CapsNet its matrix with `motion="linear"`. It
  is the control that is told how requests act, and has no parts with addresses.
- "broadcast": the code is broadcast over a grid, each cell gets its coordinates, and convolutions
  follow.

Generative CapsNets replace the decoder by capsules.

References:
    Sohn, Lee & Yan 2015, "Learning Structured Output Representation using Deep Conditional
    Generative Models" (NeurIPS).
    Watters, Matthey, Burgess & Lerchner 2019, "Spatial Broadcast Decoder" (arXiv 1901.07017). They
    broadcast over all pixels. Here the grid has a quarter of the size, and two transposed
    convolutions double it twice, as in all decoders of this family.
"""

import pyro.distributions as dist
import torch
import torch.nn.functional as F
from pyro.nn import PyroModule
from torch import Tensor, nn

from capsule_zoo.models.checks import check_at_least, check_one_of
from capsule_zoo.models.networks.convolutional import Decoder, Upsampler
from capsule_zoo.models.networks.layers import elu
from capsule_zoo.models.networks.leading import join_broadcast, over_leading
from capsule_zoo.models.networks.on_request import (
    Latents,
    OnRequest,
    centered_normal,
    leaky_sigmoid,
    starting_dark,
)


class MixedDecoder(PyroModule):
    """The decoder of the VAE after a hidden layer that mixes code and request.

    Args:
        code: numbers in a code.
        request: numbers in a request.
        image_shape: (channels, height, width).
        hidden: units of the mixing layer.
        channels: maps at half the image's size; twice as many at a quarter.
    """

    def __init__(
        self, code: int, request: int, image_shape: tuple[int, int, int], hidden: int, channels: int
    ) -> None:
        super().__init__()
        self.mix = PyroModule[nn.Linear](code + request, hidden)
        self.decoder = starting_dark(Decoder(hidden, image_shape, channels))

    def forward(self, code: Tensor, request: Tensor) -> Tensor:
        return self.decoder(elu(self.mix(join_broadcast([code, request], -1))))


class LinearDecoder(PyroModule):
    """The decoder of the VAE after a hidden layer whose units are linear in the request.

    Args:
        code, request, image_shape, channels: as for `MixedDecoder`.
        hidden: units of the hidden layer; a unit is c . [request, 1], with c linear in the code.
    """

    def __init__(
        self, code: int, request: int, image_shape: tuple[int, int, int], hidden: int, channels: int
    ) -> None:
        super().__init__()
        self.mix = PyroModule[nn.Linear](code, hidden * (request + 1))
        self.decoder = starting_dark(Decoder(hidden, image_shape, channels))

    def forward(self, code: Tensor, request: Tensor) -> Tensor:
        request = F.pad(request, (0, 1), value=1.0)
        coefficients = self.mix(code).unflatten(-1, (-1, request.shape[-1]))
        units = torch.einsum("...hn,...n->...h", coefficients, request)
        return self.decoder(elu(units))


class BroadcastDecoder(PyroModule):
    """The spatial broadcast decoder: inputs are copied to all cells of a grid, with coordinates.

    Args:
        code, request, image_shape, channels: as for `MixedDecoder`.
        hidden: maps of the layer that reads inputs and coordinates.
    """

    def __init__(
        self, code: int, request: int, image_shape: tuple[int, int, int], hidden: int, channels: int
    ) -> None:
        super().__init__()
        self.upsample = starting_dark(Upsampler(2 * channels, image_shape, channels))
        self.mix = PyroModule[nn.Conv2d](code + request + 2, hidden, 1)
        self.spread = PyroModule[nn.Conv2d](hidden, 2 * channels, 3, padding=1)

    def forward(self, code: Tensor, request: Tensor) -> Tensor:
        return over_leading(self._decode, join_broadcast([code, request], -1), event_dim=1)

    def _decode(self, inputs: Tensor) -> Tensor:
        """Decode inputs (B, n) to activities of pixels (B, C, H, W)."""
        rows, columns = self.upsample.quarter
        row, column = (
            torch.linspace(-1, 1, n, dtype=inputs.dtype, device=inputs.device)
            for n in (rows, columns)
        )
        coordinates = torch.stack(torch.meshgrid(row, column, indexing="ij"))
        maps = inputs[:, :, None, None].expand(-1, -1, rows, columns)
        maps = torch.cat([maps, coordinates.expand(len(inputs), -1, -1, -1)], 1)
        return self.upsample(elu(self.spread(elu(self.mix(maps)))))


DECODERS: dict[str, type[MixedDecoder | LinearDecoder | BroadcastDecoder]] = {
    "convolutional": MixedDecoder,
    "linear": LinearDecoder,
    "broadcast": BroadcastDecoder,
}


class ConditionalAutoencoder(OnRequest):
    """The conditional autoencoder, a baseline without capsules, described at the top of this file.

    Args:
        image_shape, identity, sigma_image: as for `OnRequest`.
        latent: numbers in a code.
        decoder: "convolutional", "linear" or "broadcast".
        hidden, channels: as for `MixedDecoder`, `LinearDecoder` or `BroadcastDecoder`.

    Raises:
        ValueError: a size below 1, a standard deviation that is not positive, an unknown decoder.
    """

    def __init__(
        self,
        image_shape: tuple[int, int, int] = (1, 28, 28),
        latent: int = 20,
        *,
        decoder: str = "convolutional",
        hidden: int = 1024,
        channels: int = 32,
        identity: tuple[float, ...] = (1.0, 0.0),
        sigma_image: float = 0.15,
    ) -> None:
        super().__init__(image_shape, identity, sigma_image)
        check_at_least(1, latent=latent, hidden=hidden, channels=channels)
        check_one_of("decoder", decoder, tuple(DECODERS))
        self.latent = latent
        self.decoder = DECODERS[decoder](latent, len(identity), image_shape, hidden, channels)

    def prior(self) -> dict[str, dist.TorchDistribution]:
        return {"image_code": centered_normal(self.decoder.mix.weight, self.latent)}

    def paint(self, latents: Latents, request: Tensor) -> Tensor:
        return leaky_sigmoid(self.decoder(latents["image_code"], request))
