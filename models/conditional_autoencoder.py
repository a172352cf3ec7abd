"""Images on request: a code says what is in an image, a request how it is wanted.

Story. The same digit can be asked for at any angle or place. What it is lies in a code; how it is
wanted is known beforehand and no random variable: two numbers, such as the cosine and sine of an
angle or a shift over its largest size. A decoder paints from both.

    z ~ Normal(0, I)                                # the code, (B, latent)
    image ~ Normal(decoder(z, T), sigma_image)      # (B, C, H, W); T is the request, (B, 2)

The decoder ends in a sigmoid that leaks: its means may pass 0 and 1 by a little.

`ConditionalAutoencoder` is the baseline: one hidden layer mixes code and request, and the rest is
the decoder of the VAE, or the code is broadcast over a grid, each cell with its coordinates, and
convolutions make of it what belongs there. Generative CapsNets put capsules in its place.

References:
    Sohn, Lee & Yan 2015, "Learning Structured Output Representation using Deep Conditional
    Generative Models" (NeurIPS).
    Watters, Matthey, Burgess & Lerchner 2019, "Spatial Broadcast Decoder" (arXiv 1901.07017). They
    broadcast over all pixels; here it is over a grid of a quarter of the size, which two transposed
    convolutions double twice, as for all decoders of this family.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import pyro
import pyro.distributions as dist
import torch
import torch.nn.functional as F
from pyro.nn import PyroModule
from torch import Tensor, nn

from capsule_zoo.models.base import Model, Site, check_at_least, check_one_of, check_positive
from capsule_zoo.models.leading import joined, over_leading
from capsule_zoo.models.vae import Decoder, Upsampler

Latents = Mapping[str, Tensor]
U = TypeVar("U", bound=Upsampler)

# Where a canvas is large most pixels are black for every request, and the first updates turn all of
# them so far down that a sigmoid leaves no gradient to paint with: at 68 x 68 the autoencoder, the
# broadcast decoder and digit capsules stayed black. All of them learn where the sigmoid leaks and
# starts dark; from an activity of zero they must still turn black first, and are slow.
LEAK = 0.1
DARK = -2.0


def leaky_sigmoid(activity: Tensor) -> Tensor:
    """Mean pixels from activities of any size; it goes on beyond 0 and 1 at a slope of `LEAK`."""
    return (1 - LEAK) * activity.sigmoid() + LEAK * activity


def starting_dark(upsampler: U) -> U:
    """The same upsampler, whose pixels all start at an activity of `DARK`."""
    nn.init.constant_(upsampler.paint.bias, DARK)
    return upsampler


class OnRequest(Model):
    """Base of the models that paint on request: subclasses write `prior` and `paint`.

    Args:
        image_shape: (channels, height, width).
        identity: the numbers of the request to leave the image as it is, which is also what is
            painted when nothing is requested; see `capsule_zoo.data.Requests`.
        sigma_image: deviation of a pixel.

    Raises:
        ValueError: a size below 1, or a deviation that is not positive.
    """

    means_in_range = False  # the sigmoid leaks

    def __init__(
        self, image_shape: tuple[int, int, int], identity: tuple[float, ...], sigma_image: float
    ) -> None:
        super().__init__()
        check_at_least(1, image_shape=image_shape)
        check_positive(sigma_image=sigma_image)
        self.image_shape, self.identity, self.sigma_image = image_shape, identity, sigma_image

    @property
    def sites(self) -> tuple[Site, ...]:
        return tuple(
            Site(name, ("images",), law.event_dim, discrete=isinstance(law, dist.OneHotCategorical))
            for name, law in self.prior().items()
        )

    def prior(self) -> dict[str, dist.TorchDistribution]:
        """The law of one image's latents, by site."""
        raise NotImplementedError

    def paint(self, latents: Latents, request: Tensor) -> Tensor:
        """Return mean pixels (*batch, C, H, W) of latents by site and requests (B, n)."""
        raise NotImplementedError

    def forward(
        self,
        images: Tensor | None = None,
        labels: Tensor | None = None,
        batch_size: int = 1,
        *,
        request: Tensor | None = None,
    ) -> Tensor:
        """Draws the latents and returns the image, (B, C, H, W).

        Args:
            images: as requested, or None to draw them.
            request: (B, n) or (1, n); the identity by default.
        """
        self.check_images(images)
        with pyro.plate("images", batch_size if images is None else len(images), dim=-1):
            latents = {name: pyro.sample(name, law) for name, law in self.prior().items()}
            law = dist.Normal(self.mean_image(latents, request), self.sigma_image)
            return pyro.sample("image", law.to_event(3), obs=images)

    def num_images(self, latents: Latents) -> int:
        """Return B, of latents by site; the first one has values (*batch, n)."""
        return next(iter(latents.values())).shape[-2]

    def mean_image(self, latents: Latents, request: Tensor | None = None) -> Tensor:
        """E[image | latents, request], (*batch, C, H, W).

        Args:
            latents: values (*batch, ...) by site; the last batch dim is that of the B images.
            request: (B, n) or (1, n); the identity by default.

        Raises:
            ValueError: a request of another shape.
        """
        first = next(iter(latents.values()))
        if request is None:
            request = first.new_tensor([self.identity])
        batch, n = self.num_images(latents), len(self.identity)
        if request.shape not in ((batch, n), (1, n)):
            raise ValueError(
                f"request must be ({batch}, {n}) or (1, {n}), not {tuple(request.shape)}; give "
                "the numbers of one request for each image"
            )
        return self.paint(latents, request.expand(batch, -1))


def centred_normal(like: Tensor, *shape: int, deviation: float = 1.0) -> dist.TorchDistribution:
    """Normal(0, deviation) over events of this shape, in the precision of `like`, on its device."""
    return dist.Normal(like.new_zeros(shape), deviation).to_event(len(shape))


class MixedDecoder(PyroModule):
    """A hidden layer that mixes code and request, below the decoder of the VAE.

    Args:
        inputs: numbers in a code and a request.
        image_shape: (channels, height, width).
        hidden: units of the mixing layer.
        channels: maps at half the image's size; twice as many at a quarter.
    """

    def __init__(
        self, inputs: int, image_shape: tuple[int, int, int], hidden: int, channels: int
    ) -> None:
        super().__init__()
        self.mix = PyroModule[nn.Linear](inputs, hidden)
        self.decoder = starting_dark(Decoder(hidden, image_shape, channels))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.decoder(F.elu(self.mix(inputs)))


class BroadcastDecoder(PyroModule):
    """The same inputs at every cell of a grid, told apart by coordinates, then convolutions.

    Args:
        inputs, image_shape, channels: as of `MixedDecoder`.
        hidden: maps of the layer that reads inputs and coordinates.
    """

    def __init__(
        self, inputs: int, image_shape: tuple[int, int, int], hidden: int, channels: int
    ) -> None:
        super().__init__()
        self.upsample = starting_dark(Upsampler(2 * channels, image_shape, channels))
        self.mix = PyroModule[nn.Conv2d](inputs + 2, hidden, 1)
        self.spread = PyroModule[nn.Conv2d](hidden, 2 * channels, 3, padding=1)

    def forward(self, inputs: Tensor) -> Tensor:
        return over_leading(self._decode, inputs, event_dim=1)

    def _decode(self, inputs: Tensor) -> Tensor:
        """Return activities (B, C, H, W) of inputs (B, n)."""
        rows, columns = self.upsample.quarter
        row, column = (
            torch.linspace(-1, 1, n, dtype=inputs.dtype, device=inputs.device)
            for n in (rows, columns)
        )
        coordinates = torch.stack(torch.meshgrid(row, column, indexing="ij"))
        maps = inputs[:, :, None, None].expand(-1, -1, rows, columns)
        maps = torch.cat([maps, coordinates.expand(len(inputs), -1, -1, -1)], 1)
        return self.upsample(F.elu(self.spread(F.elu(self.mix(maps)))))


DECODERS: dict[str, type[MixedDecoder | BroadcastDecoder]] = {
    "convolutional": MixedDecoder,
    "broadcast": BroadcastDecoder,
}


class ConditionalAutoencoder(OnRequest):
    """The baseline without capsules; see the top of this file.

    Args:
        image_shape, identity, sigma_image: of `OnRequest`.
        latent: numbers in a code.
        decoder: "convolutional" or "broadcast".
        hidden, channels: of `MixedDecoder` or `BroadcastDecoder`.

    Raises:
        ValueError: a size below 1, a deviation that is not positive, an unknown decoder.
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
        inputs = latent + len(identity)
        self.decoder = DECODERS[decoder](inputs, image_shape, hidden, channels)

    def prior(self) -> dict[str, dist.TorchDistribution]:
        return {"image_code": centred_normal(self.decoder.mix.weight, self.latent)}

    def paint(self, latents: Latents, request: Tensor) -> Tensor:
        return leaky_sigmoid(self.decoder(joined([latents["image_code"], request], -1)))
