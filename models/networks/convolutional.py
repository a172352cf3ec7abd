"""Convolutional encoders and decoders of baselines and several models."""

import math

import pyro.distributions as dist
import torch.nn.functional as F
from pyro.nn import PyroModule
from torch import Tensor, nn

from capsule_zoo.models.networks.layers import elu
from capsule_zoo.models.networks.leading import over_leading

LIKELIHOODS = ("normal", "bernoulli")


def halve_size(size: tuple[int, int]) -> tuple[int, int]:
    """Return (height, width) of maps after a convolution of stride 2, kernel 3 and padding 1."""
    height, width = size
    return (height + 1) // 2, (width + 1) // 2


class Conv2d(PyroModule[nn.Conv2d]):
    """A convolution without padding, computed as a product if the kernel covers the input.

    The product takes a third of the time.
    """

    def forward(self, inputs: Tensor) -> Tensor:
        if inputs.shape[-2:] != self.kernel_size:
            return super().forward(inputs)
        return F.linear(inputs.flatten(1), self.weight.flatten(1), self.bias)[..., None, None]


class ConvTranspose2d(PyroModule[nn.ConvTranspose2d]):
    """A transposed convolution without padding, computed as a product for an input of one cell.

    The product takes a third of the time.
    """

    def forward(self, inputs: Tensor) -> Tensor:
        if inputs.shape[-2:] != (1, 1):
            return super().forward(inputs)
        maps = (inputs.flatten(1) @ self.weight.flatten(1)).unflatten(1, self.weight.shape[1:])
        return maps + self.bias[:, None, None]


class Upsampler(PyroModule):
    """A network from maps at a quarter of the size to logits of mean pixels, (*batch, C, H, W).

    It has two transposed convolutions, each of which doubles the size.

    Args:
        maps: number of maps at a quarter of the size, (*batch, maps, *quarter).
        image_shape: (channels, height, width).
        channels: maps at half the size.
    """

    def __init__(self, maps: int, image_shape: tuple[int, int, int], channels: int) -> None:
        super().__init__()
        colors, height, width = image_shape
        self.size = height, width
        self.half = halve_size(self.size)
        self.quarter = halve_size(self.half)
        self.grow = PyroModule[nn.ConvTranspose2d](maps, channels, 4, 2, padding=1)
        self.paint = PyroModule[nn.ConvTranspose2d](channels, colors, 4, 2, padding=1)

    def forward(self, maps: Tensor) -> Tensor:
        return over_leading(self._quadruple_size, maps, event_dim=3)

    def _quadruple_size(self, maps: Tensor) -> Tensor:
        """Decode maps (B, maps, *quarter) to logits (B, C, H, W)."""
        (height, width), (rows, columns) = self.half, self.size
        maps = elu(self.grow(maps)[..., :height, :width])  # cropped by one if the size is odd
        return _upsample_maps(self.paint, maps)[..., :rows, :columns]


def _upsample_maps(layer: nn.ConvTranspose2d, maps: Tensor) -> Tensor:
    """Apply a layer that doubles the size of maps.

    For one color it is written as a product and a sum of overlapping patches, which takes half the
    time, because torch's convolutions are optimized for many maps on both sides.
    """
    if layer.out_channels > 1 or layer.bias is None:
        return layer(maps)
    rows, columns = maps.shape[2:]
    patches = layer.weight.flatten(1).T @ maps.flatten(2)
    return F.fold(patches, (2 * rows, 2 * columns), 4, padding=1, stride=2) + layer.bias


class Decoder(Upsampler):
    """A network from codes (*batch, latent) to the logits of mean pixels, (*batch, C, H, W).

    Args:
        latent: numbers in a code.
        image_shape: (channels, height, width).
        channels: maps at half the image's size; twice as many at a quarter.
    """

    def __init__(self, latent: int, image_shape: tuple[int, int, int], channels: int) -> None:
        super().__init__(2 * channels, image_shape, channels)
        self.expand = PyroModule[nn.Linear](latent, 2 * channels * math.prod(self.quarter))

    def forward(self, code: Tensor) -> Tensor:
        return super().forward(elu(self.expand(code)).unflatten(-1, (-1, *self.quarter)))


def pixel_distribution(
    logits: Tensor, likelihood: str, sigma_image: float
) -> dist.TorchDistribution:
    """Return the distribution of images, event (C, H, W), from logits (*batch, C, H, W).

    Its parameters are not checked: only NaN could be wrong, and is seen in the density.
    """
    if likelihood == "bernoulli":
        return dist.Bernoulli(logits=logits, validate_args=False).to_event(3)
    return dist.Normal(logits.sigmoid(), sigma_image, validate_args=False).to_event(3)


class Encoder(PyroModule):
    """A network from images (B, C, H, W) to hidden units (B, hidden).

    Args:
        image_shape: (channels, height, width).
        channels: maps at half the image's size; twice as many at a quarter.
        hidden: units of the layer on top.
    """

    def __init__(self, image_shape: tuple[int, int, int], channels: int, hidden: int) -> None:
        super().__init__()
        colors, height, width = image_shape
        quarter = halve_size(halve_size((height, width)))
        self.halve = PyroModule[nn.Conv2d](colors, channels, 3, 2, padding=1)
        self.quarter = PyroModule[nn.Conv2d](channels, 2 * channels, 3, 2, padding=1)
        self.hidden = PyroModule[nn.Linear](2 * channels * math.prod(quarter), hidden)

    def forward(self, images: Tensor) -> Tensor:
        maps = elu(self.quarter(elu(self.halve(images - 0.5))))
        return elu(self.hidden(maps.flatten(1)))
