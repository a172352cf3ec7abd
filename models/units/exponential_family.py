"""Bernoulli, Gaussian and Poisson units of energy models, in natural parameters.

A unit u with bias a and base measure f obeys, when a field phi is added to its bias,

    log p(u | phi) = (a + phi) u + log f(u) - A(a + phi),      A' = mean

    family       support      log f(u)               A(eta)
    Bernoulli    {0, 1}       0                      log(1 + e^eta)
    Gaussian     reals        -precision u^2 / 2     (eta^2 / precision + log(2 pi / precision)) / 2
    Poisson      0, 1, ...    -log u!                e^eta

The Gaussian's precision is learned through its logarithm, so that its second natural parameter,
-precision / 2, is negative whatever the optimizer does.
"""

import math

import pyro.distributions as dist
import torch
from pyro.nn import PyroModule
from torch import Tensor, nn

from capsule_zoo.models.checks import check_at_least, check_one_of


class _Softplus(torch.autograd.Function):
    """The autograd function log(1 + e^x), a few times faster on CPUs than torch's.

    With s the sigmoid, which is also the derivative, it is max(x, 0) - log max(s, 1 - s). Its error
    is absolute, of the size of rounding.
    """

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        slope = x.sigmoid()
        ctx.save_for_backward(slope)
        likelier = torch.sub(1, slope)
        torch.maximum(slope, likelier, out=likelier)
        return x.clamp(min=0).sub_(likelier.log_())

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0]


softplus = _Softplus.apply


def draw_bernoulli(probability: Tensor) -> Tensor:
    """Sample zeros and ones, a few times faster on CPUs than torch.bernoulli."""
    return torch.rand_like(probability).lt_(probability)


class FastBernoulli(dist.Bernoulli):
    """A Bernoulli distribution by `logits`, faster on CPUs than torch's."""

    def sample(self, sample_shape: torch.Size = torch.Size()) -> Tensor:
        with torch.no_grad():
            return draw_bernoulli(self.probs.expand(self._extended_shape(sample_shape)))

    def log_prob(self, value: Tensor) -> Tensor:
        return value * self.logits - softplus(self.logits)


class Units(PyroModule):
    """A set of independent units of one family, each with a bias.

    Fields are added to the biases, so they broadcast against `shape` on the right. Every method
    works unit by unit and keeps the shape of the field.

    Args:
        shape: shape of the units, such as (channels, height, width).

    Attributes:
        discrete: whether the support is countable.
        value_range: smallest and largest value of a unit.
    """

    discrete = True
    value_range = (0.0, math.inf)

    def __init__(self, *shape: int) -> None:
        super().__init__()
        check_at_least(1, shape=shape)
        self.bias = nn.Parameter(torch.zeros(shape))

    def distribution(self, field: Tensor | float = 0.0) -> dist.TorchDistribution:
        """Return the distribution of the units under a field, with all dims as batch dims."""
        raise NotImplementedError

    def sample(self, field: Tensor | float = 0.0) -> Tensor:
        """Sample the units under a field."""
        return self.distribution(field).sample()

    def log_partition(self, field: Tensor | float = 0.0) -> Tensor:
        """Compute the log partition function A(bias + field), in nats."""
        raise NotImplementedError

    def mean(self, field: Tensor | float = 0.0) -> Tensor:
        """Compute the mean A'(bias + field) of the units under a field."""
        raise NotImplementedError

    def link(self, mean: Tensor) -> Tensor:
        """Compute the natural parameter of units with a given mean, the inverse of A'."""
        raise NotImplementedError

    def log_base(self, value: Tensor) -> Tensor:
        """Compute bias u + log f(u), the negative energy of the units without fields, in nats."""
        raise NotImplementedError


class BernoulliUnits(Units):
    """Binary units; values between 0 and 1 count as probabilities, as usual for pixels."""

    value_range = (0.0, 1.0)

    def distribution(self, field: Tensor | float = 0.0) -> dist.TorchDistribution:
        return FastBernoulli(logits=self.bias + field, validate_args=False)  # admits gray pixels

    @torch.no_grad()
    def sample(self, field: Tensor | float = 0.0) -> Tensor:
        return draw_bernoulli(self.mean(field))

    def log_partition(self, field: Tensor | float = 0.0) -> Tensor:
        return softplus(self.bias + field)

    def mean(self, field: Tensor | float = 0.0) -> Tensor:
        return torch.sigmoid(self.bias + field)

    def link(self, mean: Tensor) -> Tensor:
        return torch.logit(mean)

    def log_base(self, value: Tensor) -> Tensor:
        return self.bias * value


class GaussianUnits(Units):
    """Real units, each with a learned precision.

    A neighbor may act on both natural parameters. The `narrowing` of a method, zero if it is not
    given, is added to the logarithm of the precision and broadcasts as the field does.
    """

    discrete = False
    value_range = (-math.inf, math.inf)

    def __init__(self, *shape: int) -> None:
        super().__init__(*shape)
        self.log_precision = nn.Parameter(torch.zeros(shape))

    @property
    def precision(self) -> Tensor:
        return self.log_precision.exp()

    def distribution(
        self, field: Tensor | float = 0.0, narrowing: Tensor | float = 0.0
    ) -> dist.TorchDistribution:
        scale = (-0.5 * (self.log_precision + narrowing)).exp()
        return dist.Normal(self.mean(field, narrowing), scale)

    def sample(self, field: Tensor | float = 0.0, narrowing: Tensor | float = 0.0) -> Tensor:
        return self.distribution(field, narrowing).sample()

    def log_partition(self, field: Tensor | float = 0.0, narrowing: Tensor | float = 0.0) -> Tensor:
        log_precision = self.log_precision + narrowing
        normalizer = 0.5 * (math.log(2 * math.pi) - log_precision)
        return 0.5 * (self.bias + field).square() * (-log_precision).exp() + normalizer

    def mean(self, field: Tensor | float = 0.0, narrowing: Tensor | float = 0.0) -> Tensor:
        return (self.bias + field) * (-self.log_precision - narrowing).exp()

    def link(self, mean: Tensor) -> Tensor:
        return mean * self.precision

    def log_base(self, value: Tensor) -> Tensor:
        return self.bias * value - 0.5 * self.precision * value.square()


class PoissonUnits(Units):
    """Units with counts as values; values between two counts are accepted, like gray pixels."""

    def distribution(self, field: Tensor | float = 0.0) -> dist.TorchDistribution:
        return dist.Poisson(self.mean(field), validate_args=False)

    def log_partition(self, field: Tensor | float = 0.0) -> Tensor:
        return (self.bias + field).exp()

    def mean(self, field: Tensor | float = 0.0) -> Tensor:
        return (self.bias + field).exp()

    def link(self, mean: Tensor) -> Tensor:
        return mean.log()

    def log_base(self, value: Tensor) -> Tensor:
        return self.bias * value - torch.lgamma(value + 1)


FAMILIES: dict[str, type[Units]] = {
    "bernoulli": BernoulliUnits,
    "gaussian": GaussianUnits,
    "poisson": PoissonUnits,
}


def make_units(argument: str, family: str, *shape: int) -> Units:
    """Make units of a named family; ValueError names the `argument` of an unknown family."""
    check_one_of(argument, family, tuple(FAMILIES))
    return FAMILIES[family](*shape)


def base_rates(units: Units, images: Tensor) -> Tensor:
    """Compute the biases by which units have the mean of images (B, C, H, W).

    A pixel that is at the end of its range in all B images is moved off it by half an image.
    """
    mean = images.mean(0)
    rare = 0.5 / (len(images) + 1)
    low, high = units.value_range
    return units.link(mean.clamp(low + rare, high - rare))
