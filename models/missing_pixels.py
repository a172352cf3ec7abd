"""Missing pixels: a likelihood that scores only the pixels that were observed.

A pixel that is NaN is missing. `model.with_missing_pixels()` is the same model, with the same
parameters, of images with such pixels: given its latents the pixels are independent, so that those
which are missing are summed out by leaving their factors away,

    log p(observed pixels | z) = sum over observed pixels p of log p(pixel_p | z).

What stands at a missing pixel never reaches the score or its gradient. A guide reads the image: its
networks see a missing pixel as `fill`, see `Guide.with_missing_pixels`.

>>> hidden = hide(images, occluded((28, 28), "left"))           # NaN in the left half
>>> evaluate(model.with_missing_pixels(), guide.with_missing_pixels(), hidden)
"""

from __future__ import annotations

from typing import Any

import pyro.distributions as dist
import torch
from pyro.distributions.torch import Independent
from pyro.poutine.messenger import Messenger
from torch import Tensor


def filled(images: Tensor, fill: Tensor | float) -> Tensor:
    """Images (B, C, H, W) with `fill`, a number or (C, H, W), where they are NaN."""
    return torch.where(images.isnan(), torch.as_tensor(fill).to(images), images)


def log_prob_of_pixels(law: dist.TorchDistribution, images: Tensor, observed: Tensor) -> Tensor:
    """Log density of the observed pixels alone, in nats, of the law's batch shape.

    Args:
        law: of whole images, event shape (C, H, W), the pixels independent.
        images: (*batch, C, H, W), finite also where they are not observed.
        observed: the same shape, or one that broadcasts to it; True where a pixel counts.

    Raises:
        ValueError: the law does not tell its pixels apart.
    """
    if hasattr(law, "log_prob_where"):
        return law.log_prob_where(images, observed)
    if isinstance(law, Independent) and law.reinterpreted_batch_ndims == law.event_dim == 3:
        return law.base_dist.mask(observed).to_event(3).log_prob(images)
    raise ValueError(
        f"the law of the image site, {type(law).__name__}, does not tell its pixels apart, so that "
        "none can be left out; give it independent pixels by .to_event(3), or a method "
        "log_prob_where(images, observed)"
    )


class ObservedPixels(dist.TorchDistribution):
    """The law of an image of which only the observed pixels are scored.

    Attributes:
        law: of the whole image; draws and means are its own.
        observed: True where a pixel counts; it broadcasts to the images.
    """

    arg_constraints = {}

    def __init__(self, law: dist.TorchDistribution, observed: Tensor) -> None:
        self.law, self.observed = law, observed
        super().__init__(law.batch_shape, law.event_shape, validate_args=False)

    @property
    def support(self) -> Any:
        return self.law.support

    @property
    def mean(self) -> Tensor:
        return self.law.mean

    def expand(self, batch_shape: torch.Size, _instance: None = None) -> ObservedPixels:
        """The same law with more batch dims."""
        return ObservedPixels(self.law.expand(batch_shape), self.observed)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density of the observed pixels, in nats."""
        return log_prob_of_pixels(self.law, value, self.observed)

    def sample(self, sample_shape: torch.Size = torch.Size()) -> Tensor:  # noqa: B008
        """Whole images."""
        return self.law.sample(sample_shape)


class ScoreObserved(Messenger):
    """Within it, the site "image" scores only the observed pixels.

    Args:
        observed: (B, C, H, W).
        plate_dim: of the plate of the images, as in `Model.plate_dims`.
    """

    def __init__(self, observed: Tensor, plate_dim: int) -> None:
        super().__init__()
        inner = [1] * (-plate_dim - 1)  # of plates within that of the images
        self.observed = observed.reshape(len(observed), *inner, *observed.shape[1:])

    def _pyro_sample(self, msg: Any) -> None:
        if msg["name"] == "image":
            msg["fn"] = ObservedPixels(msg["fn"], self.observed)


def refuse_dependent_pixels(model: Any) -> None:
    """Raise ValueError for a model whose density knows no single pixel."""
    name = type(model).__name__
    if model.supervised:
        raise ValueError(
            f"{name} explains labels and not pixels, so that there is no score to leave a missing "
            "pixel out of; fill the pixels in first, as by `fill_in` of another model"
        )
    if not model.normalised:
        raise ValueError(
            f"{name} ties its pixels together by an energy, so that a missing pixel cannot be left "
            "out of its density; use a directed model"
        )
