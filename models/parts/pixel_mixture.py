"""The likelihood of stacked capsule autoencoders, in which each pixel comes from one part.

    which_p ~ Categorical(background: beta, part i: t_i alpha_i(p))      # for every pixel p
    image_p ~ Normal(color_{which_p}(p), sigma)                         # all channels together

The choice is summed out. In compositing a part hides the parts below it; here parts compete.

Reference: Kosiorek, Sabour, Teh & Hinton 2019 (arXiv 1906.06818).
"""

from __future__ import annotations

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import constraints


class PixelMixture(dist.TorchDistribution):
    """The law of an image (C, H, W) whose pixels are mixtures of parts and background.

    The pixels are independent. Batch shape (*batch, 1), event shape (C, H, W).

    Args:
        color: colours of background and parts, (1 + parts, C, *batch, H, W).
        weight: unnormalized weights (1 + parts, 1, *batch, H, W), not negative, and positive for at
            least one layer at each pixel.
        scale: deviation of a pixel.
    """

    arg_constraints = {}
    support = constraints.independent(constraints.real, 3)

    def __init__(self, color: Tensor, weight: Tensor, scale: float) -> None:
        self.color = color
        self.scale = scale
        self.mixing = weight / weight.sum(0)
        _, channels, *batch, height, width = color.shape
        shapes = torch.Size((*batch, 1)), torch.Size((channels, height, width))
        super().__init__(*shapes, validate_args=False)

    def expand(self, batch_shape: torch.Size, _instance: None = None) -> PixelMixture:
        """Return the same law with more batch dims, (*batch, 1)."""
        batch_shape = torch.Size(batch_shape)
        if batch_shape[-1] != 1:
            raise ValueError(
                f"batch_shape must end in 1, not {tuple(batch_shape)}; sample the image outside "
                "the plate of the parts"
            )
        wide = PixelMixture.__new__(PixelMixture)
        wide.scale = self.scale
        wide.color = _with_batch(self.color, batch_shape[:-1])
        wide.mixing = _with_batch(self.mixing, batch_shape[:-1])
        super(PixelMixture, wide).__init__(batch_shape, self.event_shape, validate_args=False)
        return wide

    @property
    def mean(self) -> Tensor:
        """The mean image, (*batch, 1, C, H, W)."""
        return (self.mixing * self.color).sum(0).movedim(0, -3).unsqueeze(-4)

    @property
    def variance(self) -> Tensor:
        """The variance of every pixel, (*batch, 1, C, H, W)."""
        square = (self.mixing * self.color.square()).sum(0).movedim(0, -3).unsqueeze(-4)
        return square - self.mean.square() + self.scale**2

    def log_prob(self, value: Tensor) -> Tensor:
        """Compute the log density (*batch, 1) of images (*batch, 1, C, H, W), in nats."""
        return self.log_prob_where(value)

    def log_prob_where(self, value: Tensor, observed: Tensor | None = None) -> Tensor:
        """Compute the log density (*batch, 1), in nats, of the pixels where `observed` is True.

        Args:
            value: images (*batch, 1, C, H, W).
            observed: a mask that broadcasts to them; all pixels by default.
        """
        pixels = value.squeeze(-4).movedim(-3, 0)  # (C, *batch, H, W)
        law = self
        if pixels.dim() >= self.color.dim():  # more batch dims than the law has
            law = self.expand(torch.broadcast_shapes(value.shape[:-3], self.batch_shape))
        channels = dist.Normal(law.color, law.scale).log_prob(pixels)
        if observed is not None:
            seen = observed.squeeze(-4).movedim(-3, 0)  # (C, *batch, H, W)
            channels = torch.where(seen, channels, 0.0)
        each = channels.sum(1)
        share = law.mixing.squeeze(1).clamp_min(torch.finfo(each.dtype).tiny)  # no log of zero
        density = (each + share.log()).logsumexp(0)  # (*batch, H, W)
        if observed is not None:
            density = torch.where(seen.any(0), density, 0.0)  # no rounding error of the shares' sum
        return density.sum((-1, -2)).unsqueeze(-1)

    def sample(self, sample_shape: torch.Size = torch.Size()) -> Tensor:  # noqa: B008
        """Draw images (*sample_shape, *batch, 1, C, H, W)."""
        share = self.mixing.squeeze(1).movedim(0, -1)  # (*batch, H, W, 1 + parts)
        which = dist.Categorical(share).sample(sample_shape)  # (*sample_shape, *batch, H, W)
        colors = self.color.movedim(1, -3).movedim(0, -1)  # (*batch, C, H, W, 1 + parts)
        chosen = torch.nn.functional.one_hot(which, len(self.color)).to(colors)
        mean = (colors * chosen.unsqueeze(-4)).sum(-1)  # (*sample_shape, *batch, C, H, W)
        return (mean + self.scale * torch.randn_like(mean)).unsqueeze(-4)


def _with_batch(stack: Tensor, batch: torch.Size) -> Tensor:
    """Expand the batch dims of a stack (layers, channels, *own, H, W) to `batch`."""
    layers, channels, *own, height, width = stack.shape
    spread = stack.reshape(layers, channels, *[1] * (len(batch) - len(own)), *own, height, width)
    return spread.expand(layers, channels, *batch, height, width)
