"""The likelihood of stacked capsule autoencoders, a mixture over parts at each pixel.

    which_p ~ Categorical(background: beta, part i: t_i alpha_i(p))      # for every pixel p
    image_p ~ Normal(color_{which_p}(p), sigma)                         # all channels together

The choice is summed out. In compositing a part hides the parts below it; here parts compete.

Reference: Kosiorek, Sabour, Teh & Hinton 2019 (arXiv 1906.06818).
"""

import math
from functools import cached_property
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributions import constraints

from capsule_zoo.models.networks.leading import flat_batch, unflat_batch


class PixelMixture(dist.TorchDistribution):
    """The distribution of an image (C, H, W): each pixel is a mixture of parts and background.

    The pixels are independent. Batch shape (*batch, 1), event shape (C, H, W).

    Args:
        color: colours of background and parts, (1 + parts, C, *batch, H, W).
        weight: unnormalized weights (1 + parts, 1, *batch, H, W), not negative, and positive for at
            least one layer at each pixel.
        scale: standard deviation of a pixel.
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

    def expand(self, batch_shape: torch.Size, _instance: None = None) -> "PixelMixture":
        """Return the distribution expanded to more batch dims, (*batch, 1)."""
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
        distribution = self
        if pixels.dim() >= self.color.dim():  # more batch dims than the distribution has
            distribution = self.expand(torch.broadcast_shapes(value.shape[:-3], self.batch_shape))
        channels = dist.Normal(distribution.color, distribution.scale).log_prob(pixels)
        if observed is not None:
            mask = observed.squeeze(-4).movedim(-3, 0)  # (C, *batch, H, W)
            channels = torch.where(mask, channels, 0.0)
        log_density = channels.sum(1)
        fraction = distribution.mixing.squeeze(1).clamp_min(
            torch.finfo(log_density.dtype).tiny
        )  # no log of zero
        density = (log_density + fraction.log()).logsumexp(0)  # (*batch, H, W)
        if observed is not None:
            density = torch.where(
                mask.any(0), density, 0.0
            )  # no rounding error of the fractions' sum
        return density.sum((-1, -2)).unsqueeze(-1)

    def sample(self, sample_shape: torch.Size = torch.Size()) -> Tensor:
        """Sample images (*sample_shape, *batch, 1, C, H, W)."""
        fraction = self.mixing.squeeze(1).movedim(0, -1)  # (*batch, H, W, 1 + parts)
        which = dist.Categorical(fraction).sample(sample_shape)  # (*sample_shape, *batch, H, W)
        colors = self.color.movedim(1, -3).movedim(0, -1)  # (*batch, C, H, W, 1 + parts)
        indicator = torch.nn.functional.one_hot(which, len(self.color)).to(colors)
        mean = (colors * indicator.unsqueeze(-4)).sum(-1)  # (*sample_shape, *batch, C, H, W)
        return (mean + self.scale * torch.randn_like(mean)).unsqueeze(-4)


def _with_batch(stack: Tensor, batch: torch.Size) -> Tensor:
    """Expand the batch dims of a stack (layers, channels, *own, H, W) to `batch`."""
    layers, channels, *outer, height, width = stack.shape
    spread = stack.reshape(
        layers, channels, *[1] * (len(batch) - len(outer)), *outer, height, width
    )
    return spread.expand(layers, channels, *batch, height, width)


class TintedMixture(dist.TorchDistribution):
    """The distribution of an image (C, H, W), a pixel mixture of tinted templates and background.

        weight_m = t_m alpha_m(p),    color_m = tint_m template_m(p)          # part m at pixel p
        p(image_p) = sum_m weight_m Normal(image_p | color_m, sigma) / sum_m weight_m

    The background is one of the layers m. `PixelMixture` computes this from stacks of all
    layers, (1 + parts, C, B, H, W), and takes a dozen of them for values and gradients. Here the
    layers follow one another: each needs a few tensors of the size of the batch, which stay in the
    processor's cache, and the gradients are written out. Draws, means and more batch dims are left
    to `PixelMixture`.

    Batch shape (*batch, 1), event shape (C, H, W).

    Args:
        drawn: warped templates and alphas of the parts, (parts, C + 1, B, H, W), alpha last, with
            all batch dims flattened into B.
        tint: colors of the parts, (*batch, parts, C).
        presence: presences t of the parts, (*batch, parts).
        behind: color of the background, (C,).
        claim: weight of the background, a positive scalar.
        scale: standard deviation of a pixel.
    """

    arg_constraints = {}
    support = constraints.independent(constraints.real, 3)

    def __init__(
        self,
        drawn: Tensor,
        tint: Tensor,
        presence: Tensor,
        behind: Tensor,
        claim: Tensor,
        scale: float,
    ) -> None:
        self.drawn = drawn
        self.tint = tint
        self.presence = presence
        self.behind = behind
        self.claim = claim
        self.scale = scale
        batch = torch.Size((*presence.shape[:-1], 1))
        event = torch.Size((len(behind), *drawn.shape[-2:]))
        super().__init__(batch, event, validate_args=False)

    def layers(self) -> tuple[Tensor, Tensor]:
        """Return colors (parts, C, B, H, W) and weights (parts, 1, B, H, W) of the parts."""
        shape, alpha = self.drawn.split([len(self.behind), 1], dim=1)
        tint = flat_batch(self.tint, 2).permute(1, 2, 0)
        presence = flat_batch(self.presence, 1).T[:, None]
        return shape * tint[..., None, None], alpha * presence[..., None, None]

    @cached_property
    def as_stacks(self) -> PixelMixture:
        """The distribution as a `PixelMixture`, with all layers in memory."""
        color, weight = self.layers()
        behind = self.behind[:, None, None, None].expand(color.shape[1:])
        claim = self.claim.expand(weight.shape[1:])
        batch = self.batch_shape[:-1]
        colors = unflat_batch(torch.cat([behind[None], color]), 2, batch)
        weights = unflat_batch(torch.cat([claim[None], weight]), 2, batch)
        return PixelMixture(colors, weights, self.scale)

    def expand(
        self, batch_shape: torch.Size, _instance: None = None
    ) -> "TintedMixture | PixelMixture":
        """Return the distribution expanded to more batch dims, (*batch, 1)."""
        if torch.Size(batch_shape) == self.batch_shape:  # as in the plate of the images
            return self
        return self.as_stacks.expand(batch_shape)

    @property
    def mixing(self) -> Tensor:
        """The mixing weights of background and parts, (1 + parts, 1, *batch, H, W)."""
        return self.as_stacks.mixing

    @property
    def mean(self) -> Tensor:
        """The mean image, (*batch, 1, C, H, W)."""
        return self.as_stacks.mean

    @property
    def variance(self) -> Tensor:
        """The variance of every pixel, (*batch, 1, C, H, W)."""
        return self.as_stacks.variance

    def sample(self, sample_shape: torch.Size = torch.Size()) -> Tensor:
        """Sample images (*sample_shape, *batch, 1, C, H, W)."""
        return self.as_stacks.sample(sample_shape)

    def log_prob(self, value: Tensor) -> Tensor:
        """Compute the log density (*batch, 1) of images (*batch, 1, C, H, W), in nats."""
        return self.log_prob_where(value)

    def log_prob_where(self, value: Tensor, observed: Tensor | None = None) -> Tensor:
        """Compute the log density (*batch, 1), in nats, of the pixels where `observed` is True.

        Args:
            value: images (*batch, 1, C, H, W).
            observed: a mask that broadcasts to them; all pixels by default.
        """
        if value.requires_grad or value.shape[:-3] != self.batch_shape:
            return self.as_stacks.log_prob_where(value, observed)
        pixels = flat_batch(value.squeeze(-4), 3)
        mask: Tensor | None = None
        if observed is not None:
            mask = flat_batch(observed.expand(value.shape).squeeze(-4), 3)
        tint, presence = flat_batch(self.tint, 2), flat_batch(self.presence, 1)
        numbers = self.drawn, tint, presence, self.behind, self.claim
        log_density: Tensor = _LogDensity.apply(pixels, mask, self.scale, *numbers)
        return unflat_batch(log_density, 0, self.batch_shape[:-1]).unsqueeze(-1)


class _LogDensity(torch.autograd.Function):
    """The autograd function of the log density (B,) under tinted templates, layer by layer.

    With d the squared distance from a layer's color, density_p = sum w exp(-d / 2 sigma^2) / sum w.
    Exponents are shifted by the smallest d among layers with a weight, so that the sum is never 0.
    """

    @staticmethod
    def forward(
        ctx: Any,
        pixels: Tensor,
        mask: Tensor | None,
        scale: float,
        drawn: Tensor,
        tint: Tensor,
        presence: Tensor,
        behind: Tensor,
        claim: Tensor,
    ) -> Tensor:
        rate = 1 / (2 * scale**2)
        ground = _squared_length(_difference(pixels, behind[:, None, None], mask))
        nearest = ground.clone()
        tiny = torch.finfo(drawn.dtype).tiny
        distances = []
        for m in range(len(drawn)):
            color, weight = _layer(drawn[m], tint[:, m], presence[:, m])
            distances.append(_squared_length(_difference(pixels, color, mask)))
            torch.minimum(nearest, distances[-1].where(weight > tiny, ground), out=nearest)
        top = claim * (-rate * (ground - nearest)).exp_()
        total = claim.expand_as(top).clone()
        for m, distance in enumerate(distances):
            weight = drawn[m, -1] * presence[:, m, None, None]
            total.add_(weight)
            # a layer without weight may be nearer than the nearest one: its exponent is clamped
            top.addcmul_(weight, distance.sub_(nearest).clamp_min_(0).mul_(-rate).exp_())
        ctx.save_for_backward(
            pixels, mask, drawn, tint, presence, behind, claim, nearest, top, total
        )
        ctx.rate = rate
        log_density = top.log().sub_(total.log()).sub_(nearest, alpha=rate)
        if mask is None:
            count = torch.full_like(log_density[:, 0, 0], pixels[0].numel())
        else:
            count = mask.sum((1, 2, 3)).to(log_density)
            log_density = torch.where(
                mask.any(1), log_density, 0.0
            )  # no rounding error of two equal sums
        return log_density.sum((-1, -2)) - count * (math.log(scale) + 0.5 * math.log(2 * math.pi))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        pixels, mask, drawn, tint, presence, behind, claim, nearest, top, total = ctx.saved_tensors
        rate = ctx.rate
        slopes = outer[:, None, None].expand_as(top)
        if mask is not None:
            slopes = slopes * mask.any(1)
        of_total = slopes / total
        of_top = slopes / top
        slope, of_tint, of_there = (torch.empty_like(x) for x in (drawn, tint, presence))
        for m in range(len(drawn)):
            color, weight = _layer(drawn[m], tint[:, m], presence[:, m])
            difference = _difference(pixels, color, mask)  # (B, C, H, W)
            distance = _squared_length(difference)
            fraction = distance.sub_(nearest).clamp_min_(0).mul_(-rate).exp_().mul_(of_top)
            of_color = difference.mul_((weight * fraction).mul_(2 * rate)[:, None])
            of_weight = fraction.sub_(of_total)
            slope[m, :-1] = (of_color * tint[:, m, :, None, None]).transpose(0, 1)
            slope[m, -1] = of_weight * presence[:, m, None, None]
            shape = drawn[m, :-1].transpose(0, 1)
            of_tint[:, m] = (of_color * shape).sum((-1, -2))
            of_there[:, m] = (of_weight * drawn[m, -1]).sum((-1, -2))
        difference = _difference(pixels, behind[:, None, None], mask)
        fraction = (-rate * (_squared_length(difference) - nearest)).exp_().mul_(of_top)
        of_behind = 2 * rate * claim * torch.einsum("bhw,bchw->c", fraction, difference)
        of_claim = (fraction - of_total).sum().reshape(claim.shape)
        return None, None, None, slope, of_tint, of_there, of_behind, of_claim


def _difference(pixels: Tensor, color: Tensor, mask: Tensor | None) -> Tensor:
    """Return pixels minus color, (B, C, H, W), zero at missing pixels."""
    difference = pixels - color
    return difference if mask is None else difference.mul_(mask)


def _squared_length(difference: Tensor) -> Tensor:
    """Return the squared length (B, H, W) of differences (B, C, H, W)."""
    squares = difference.square()
    return squares.sum(1) if squares.shape[1] > 1 else squares.squeeze(1)


def _layer(drawn: Tensor, tint: Tensor, presence: Tensor) -> tuple[Tensor, Tensor]:
    """Split a layer (C + 1, B, H, W) into color (B, C, H, W) and weight (B, H, W)."""
    color = drawn[:-1].transpose(0, 1) * tint[..., None, None]
    return color, drawn[-1] * presence[:, None, None]
