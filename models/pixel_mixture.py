"""Pixels that each come from one part: the likelihood of stacked capsule autoencoders.

    which_p ~ Categorical(background: beta, part i: t_i alpha_i(p))      # for every pixel p
    image_p ~ Normal(colour_{which_p}(p), sigma)                         # all channels together

The choice is summed out. Where compositing lets a part hide those below it, here parts compete.

Reference: Kosiorek, Sabour, Teh & Hinton 2019 (arXiv 1906.06818).
"""

from __future__ import annotations

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import constraints


class PixelMixture(dist.TorchDistribution):
    """An image (C, H, W) whose pixels are independent mixtures of parts and background.

    Batch shape (B, 1), event shape (C, H, W).

    Args:
        colour: of background and parts, (1 + parts, C, B, H, W).
        weight: unnormalised, not negative, positive somewhere at each pixel,
            (1 + parts, 1, B, H, W).
        scale: deviation of a pixel.
    """

    arg_constraints = {}
    support = constraints.independent(constraints.real, 3)

    def __init__(self, colour: Tensor, weight: Tensor, scale: float) -> None:
        self.colour, self.scale = colour, scale
        self.share = weight / weight.sum(0)
        _, channels, batch, height, width = colour.shape
        shapes = torch.Size((batch, 1)), torch.Size((channels, height, width))
        super().__init__(*shapes, validate_args=False)

    @property
    def mean(self) -> Tensor:
        """(B, 1, C, H, W)."""
        return (self.share * self.colour).sum(0).transpose(0, 1)[:, None]

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density (B, 1) of images (B, 1, C, H, W), in nats."""
        pixels = value.squeeze(1).transpose(0, 1)  # (C, B, H, W)
        each = dist.Normal(self.colour, self.scale).log_prob(pixels).sum(1)
        share = self.share.squeeze(1).clamp_min(torch.finfo(each.dtype).tiny)  # no log of zero
        return (each + share.log()).logsumexp(0).sum((-1, -2))[:, None]

    def sample(self, sample_shape: torch.Size = torch.Size()) -> Tensor:  # noqa: B008
        """Images (*sample_shape, B, 1, C, H, W)."""
        share = self.share.squeeze(1).movedim(0, -1)  # (B, H, W, 1 + parts)
        which = dist.Categorical(share).sample(sample_shape)  # (*sample_shape, B, H, W)
        colours = self.colour.movedim((2, 1, 0), (0, 1, -1))  # (B, C, H, W, 1 + parts)
        chosen = torch.nn.functional.one_hot(which, len(self.colour)).to(colours)
        mean = (colours * chosen.unsqueeze(-4)).sum(-1)  # (*sample_shape, B, C, H, W)
        return (mean + self.scale * torch.randn_like(mean)).unsqueeze(-4)
