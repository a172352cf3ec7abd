"""Missing pixels: a likelihood that scores only the observed pixels.

A pixel that is NaN is missing. `model.with_missing_pixels()` returns the same model, with the same
parameters, for images with such pixels. Given the latents the pixels are independent, so the
missing pixels are summed out when their factors are left out:

    log p(observed pixels | z) = sum over observed pixels p of log p(pixel_p | z).

The value at a missing pixel never affects the score or its gradient. A guide reads the image, and
its networks see `fill` at a missing pixel (`Guide.with_missing_pixels`).

>>> hidden = hide(images, half_mask((28, 28), "left"))           # NaN in the left half
>>> evaluate(model.with_missing_pixels(), guide.with_missing_pixels(), hidden)
"""

from typing import Any

import pyro.distributions as dist
import torch
from pyro.distributions.torch import Independent
from pyro.poutine.messenger import Messenger
from torch import Tensor


def fill_missing(images: Tensor, fill: Tensor | float) -> Tensor:
    """Return images (B, C, H, W) with `fill`, a number or (C, H, W), instead of NaN."""
    return torch.where(images.isnan(), torch.as_tensor(fill).to(images), images)


def log_prob_of_pixels(
    distribution: dist.TorchDistribution, images: Tensor, observed: Tensor
) -> Tensor:
    """Compute the log density of the observed pixels alone, in nats, (*batch).

    Args:
        distribution: the distribution of whole images, event shape (C, H, W), with independent
            pixels; or of any other observation.
        images: (*batch, C, H, W), finite also where they are not observed.
        observed: the same shape, or one that broadcasts to it; True where a pixel counts.

    Raises:
        ValueError: the distribution has no density of single pixels, and a part of an image is
        missing.
    """
    if hasattr(distribution, "log_prob_where"):
        return distribution.log_prob_where(images, observed)
    rank = distribution.event_dim
    if rank == 0:
        return distribution.mask(observed).log_prob(images)
    if isinstance(distribution, Independent) and distribution.reinterpreted_batch_ndims == rank:
        return distribution.base_dist.mask(observed).to_event(rank).log_prob(images)
    whole = observed.flatten(-rank)
    if bool((whole.all(-1) == whole.any(-1)).all()):
        return distribution.mask(whole.all(-1)).log_prob(images)
    raise ValueError(
        f"the distribution of the image site, {type(distribution).__name__}, does not tell its "
        "pixels apart, so that "
        f"none can be left out; give it independent pixels by .to_event({rank}), or a method "
        "log_prob_where(images, observed)"
    )


class ObservedPixels(dist.TorchDistribution):
    """The distribution of an image that scores only its observed pixels.

    Attributes:
        distribution: the distribution of the whole image, which gives the draws and means.
        observed: True where a pixel counts; it broadcasts to the images. None where NaN in a value
            marks the missing pixels.
    """

    arg_constraints = {}

    def __init__(self, distribution: dist.TorchDistribution, observed: Tensor | None) -> None:
        self.distribution = distribution
        self.observed = observed
        super().__init__(distribution.batch_shape, distribution.event_shape, validate_args=False)

    @property
    def support(self) -> Any:
        return self.distribution.support

    @property
    def mean(self) -> Tensor:
        return self.distribution.mean

    def shape(self, sample_shape: torch.Size = torch.Size()) -> torch.Size:
        """Return the shape of samples."""
        return self.distribution.shape(sample_shape)

    def expand(self, batch_shape: torch.Size, _instance: None = None) -> "ObservedPixels":
        """Return the distribution expanded to more batch dims."""
        return ObservedPixels(self.distribution.expand(batch_shape), self.observed)

    def log_prob(self, value: Tensor) -> Tensor:
        """Compute the log density of the observed pixels, in nats."""
        if self.observed is None:
            return log_prob_of_pixels(self.distribution, fill_missing(value, 0.0), ~value.isnan())
        return log_prob_of_pixels(self.distribution, value, self.observed)

    def sample(self, sample_shape: torch.Size = torch.Size()) -> Tensor:
        """Sample whole images."""
        return self.distribution.sample(sample_shape)


class ScoreObserved(Messenger):
    """The effect handler under which a site scores only the observed pixels.

    Args:
        site: the name of the site.
        observed: True where a pixel is observed, (B, C, H, W); None where the value that is
            observed by name has NaN at missing pixels.
    """

    def __init__(self, site: str, observed: Tensor | None) -> None:
        super().__init__()
        self.site = site
        self.observed = observed

    def _pyro_sample(self, msg: Any) -> None:
        if msg["name"] == self.site:
            msg["fn"] = ObservedPixels(msg["fn"], self.observed)


def refuse_dependent_pixels(model: Any) -> None:
    """Raise ValueError for a model whose likelihood is not a product over pixels."""
    name = type(model).__name__
    if model.supervised:
        raise ValueError(
            f"{name} explains labels and not pixels, so that there is no score to leave a missing "
            "pixel out of; fill the pixels in first, as by `fill_in` of another model"
        )
    if not model.normalized:
        raise ValueError(
            f"{name} ties its pixels together by an energy, so that a missing pixel cannot be left "
            "out of its density; use a directed model"
        )
