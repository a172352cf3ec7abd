"""Support for plates to the left of `images`: enumeration, and Bayesian parameters.

Sites are in the plate `images` at dim -2 and in a plate of capsules at dim -1. A plate outside the
model, such as the particles of a vectorized objective, adds batch dims to the left of both.
Parallel enumeration adds a dim there too, but that dim is not a plate.
"""

from typing import Any

import pyro.distributions as dist
import torch
from pyro.nn import PyroModule
from pyro.poutine.runtime import get_plates
from torch import Tensor

from capsule_zoo.models.common.missing_pixels import log_prob_of_pixels

_INNER = 2  # number of plates of the zoo's models: images, and capsules


class EnumeratedPresence(ValueError):
    """The error for a presence that depends on enumeration and is used outside its plate."""


class ImageDistribution(dist.TorchDistribution):
    """The distribution of the image site in a plate `images` at dim -2.

    There the batch shape is (*outer, B, 1), with a dim of 1 for the plates of capsules. Values lack
    that dim. A draw, a value given by name and the images that `model(images)` takes and returns
    therefore have one shape, (*outer, B, C, H, W), and the same log density.

    Args:
        distribution: the distribution with batch shape (*outer, B, 1) and event shape (C, H, W),
            whose values have the shape (*outer, B, 1, C, H, W).
    """

    arg_constraints = {}

    def __init__(self, distribution: dist.TorchDistribution) -> None:
        self.distribution = distribution
        super().__init__(distribution.batch_shape, distribution.event_shape, validate_args=False)

    @property
    def has_rsample(self) -> bool:
        """Whether samples are reparametrized."""
        return self.distribution.has_rsample

    @property
    def support(self) -> Any:
        """The support of the image distribution."""
        return self.distribution.support

    @property
    def mean(self) -> Tensor:
        """The mean image, (*outer, B, C, H, W)."""
        return self.distribution.mean.squeeze(-4)

    @property
    def variance(self) -> Tensor:
        """The variance of every pixel, (*outer, B, C, H, W)."""
        return self.distribution.variance.squeeze(-4)

    def shape(self, sample_shape: torch.Size = torch.Size()) -> torch.Size:
        """Return the shape of samples, (*sample_shape, *outer, B, C, H, W)."""
        shape = self.distribution.shape(sample_shape)
        return shape[:-4] + shape[-3:]

    def expand(self, batch_shape: torch.Size, _instance: None = None) -> "ImageDistribution":
        """Return the distribution expanded to more batch dims, (*outer, B, 1)."""
        return ImageDistribution(self.distribution.expand(torch.Size(batch_shape)))

    def sample(self, sample_shape: torch.Size = torch.Size()) -> Tensor:
        """Sample images (*sample_shape, *outer, B, C, H, W)."""
        return self.distribution.sample(sample_shape).squeeze(-4)

    def rsample(self, sample_shape: torch.Size = torch.Size()) -> Tensor:
        """Sample images (*sample_shape, *outer, B, C, H, W) with reparametrized gradients."""
        return self.distribution.rsample(sample_shape).squeeze(-4)

    def log_prob(self, value: Tensor) -> Tensor:
        """Compute the log density (*outer, B, 1) of images (*outer, B, C, H, W), in nats."""
        return self.distribution.log_prob(value.unsqueeze(-4))

    def log_prob_where(self, value: Tensor, observed: Tensor) -> Tensor:
        """Compute the log density (*outer, B, 1), in nats, of the pixels where `observed` is True.

        Args:
            value, observed: (*outer, B, C, H, W), or shapes that broadcast to it.
        """
        return log_prob_of_pixels(self.distribution, value.unsqueeze(-4), observed.unsqueeze(-4))


def outer_sizes() -> torch.Size:
    """Return the sizes of the dims to the left of `images` of the plates in scope."""
    sizes = {-frame.dim: frame.size for frame in get_plates() if frame.dim is not None}
    outermost = max([_INNER, *sizes])
    return torch.Size(sizes.get(place, 1) for place in range(outermost, _INNER, -1))


def refuse_enumeration(name: str, value: Tensor) -> None:
    """Raise EnumeratedPresence if `value` varies along a dim that is not a plate.

    A renderer, a network or the next level reads the presences of all capsules of a plate together,
    outside the plate. `TraceEnum_ELBO` visits only two of their 2^n states, all on and all off. It
    also does not weight terms outside the plate by the probability of the state. The ELBO would be
    wrong, even for a single capsule.

    Args:
        name: name of the site.
        value: value of the site, without event dims, (*batch, B, capsules).
    """
    if value.dim() <= _INNER:
        return
    outside = value.shape[:-_INNER]
    sizes = outer_sizes()
    plates = [*[1] * (len(outside) - len(sizes)), *sizes][-len(outside) :]
    if any(size > 1 and plate == 1 for size, plate in zip(outside, plates, strict=True)):
        raise EnumeratedPresence(
            f"site {name!r} must not be enumerated, nor drawn given an enumerated site: all "
            "capsules of its plate are read together, so the sum would be wrong; draw it in a "
            'guide (a model with selection="enumerate" is for TraceEnum_ELBO with a guide, use '
            'with_selection("marginal") for anything else)'
        )


def bayesian_parameters(module: PyroModule) -> list[tuple[PyroModule, str]]:
    """Return the module and name of every parameter that is a `PyroSample`."""
    parts = [part for part in module.modules() if isinstance(part, PyroModule)]
    return [(part, name) for part in parts for name in part._pyro_samples]


def per_image(parameter: Tensor, event_dim: int) -> Tensor:
    """Return a parameter with batch dims that match the batch dims of images, (*batch, 1).

    A plain parameter has no batch dims and is returned unchanged. A `PyroSample` under plates
    outside the model has the dims of the plates and 1 for `images` and for the capsules, (*outer,
    1, 1).

    Args:
        parameter: (*event), or (*outer, 1, 1, *event), or (samples, *event) as
            `pyro.infer.Predictive` gives draws of sites outside all plates.
        event_dim: number of dims of the parameter itself.
    """
    if parameter.dim() == event_dim:
        return parameter
    outer, event = parameter.shape[:-event_dim], parameter.shape[parameter.dim() - event_dim :]
    if len(outer) >= _INNER and outer[-_INNER:] == (1,) * _INNER:
        outer = outer[:-_INNER]
    return parameter.reshape(*outer, 1, *event)
