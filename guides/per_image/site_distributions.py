"""The family of a latent site's distribution in a free-form guide, chosen by the site's prior.

    discrete, or relaxed     the model's family, with separate logits
    continuous               Delta(transform(loc))  or  transform(Normal(loc, scale))

`transform` maps the reals to the support of the site (`torch.distributions.biject_to`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyro.distributions as dist
import torch
import torch.nn.functional as F
from pyro.distributions.torch import Independent
from pyro.distributions.torch_distribution import ExpandedDistribution, MaskedDistribution
from pyro.distributions.util import sum_rightmost
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch import distributions as distributions
from torch.distributions import biject_to, constraints
from torch.distributions.relaxed_bernoulli import LogitRelaxedBernoulli
from torch.distributions.relaxed_categorical import ExpRelaxedCategorical
from torch.distributions.transforms import ComposeTransform, Transform, identity_transform

from capsule_zoo.models.common.plates import ImageDistribution

_RELAXED = (
    LogitRelaxedBernoulli,
    distributions.RelaxedBernoulli,
    ExpRelaxedCategorical,
    distributions.RelaxedOneHotCategorical,
)
# A subclass, such as a faster Bernoulli or a distribution of labels, is served by the first of its
# bases
_DISCRETE = {
    distributions.OneHotCategoricalStraightThrough: dist.OneHotCategoricalStraightThrough,
    distributions.OneHotCategorical: dist.OneHotCategorical,
    distributions.Categorical: dist.Categorical,
    distributions.Bernoulli: dist.Bernoulli,
}
_SURE = 3.0  # initial logit of a value that another guide has as a point


class UnservedSite(ValueError):
    """The error raised for a site that no free-form distribution fits."""


class OtherDistributions(Messenger):
    """A messenger that replaces the distributions of sites before they are drawn.

    Args:
        distribution_of: returns the distribution of a site from its name and the distribution that
            it has.
    """

    def __init__(self, distribution_of: Callable[[str, Any], Any]) -> None:
        super().__init__()
        self.distribution_of = distribution_of

    def _pyro_sample(self, msg: Any) -> None:
        msg["fn"] = self.distribution_of(msg["name"], msg["fn"])


def base_distribution(distribution: Any) -> Any:
    """Return the distribution inside `ImageDistribution` and `to_event`, `expand` and `mask`."""
    if isinstance(distribution, ImageDistribution):
        distribution = distribution.distribution
    while isinstance(distribution, (Independent, ExpandedDistribution, MaskedDistribution)):
        distribution = distribution.base_dist
    return distribution


def innermost(distribution: Any) -> Any:
    """Return the family inside wrappers (see `base_distribution`) and mixtures of one family."""
    distribution = base_distribution(distribution)
    mixed = isinstance(distribution, distributions.MixtureSameFamily)
    return innermost(distribution.component_distribution) if mixed else distribution


@dataclass(frozen=True, eq=False)
class ByLogits:
    """A family that logits define: Bernoulli, Categorical, one-hot, or one of these relaxed.

    Attributes:
        family: the class of the distribution.
        dtype: dtype of the logits.
        temperature: temperature of a relaxed distribution, else None.
        categories: number of logits of a choice whose value is their index, else None.
    """

    family: Any
    dtype: torch.dtype
    temperature: Tensor | None
    categories: int | None

    @property
    def has_logits(self) -> bool:
        """Whether the values of the relaxed distribution are logits (reals), not fractions."""
        return issubclass(self.family, LogitRelaxedBernoulli | ExpRelaxedCategorical)

    def distribution(self, logits: Tensor, event_dim: int) -> dist.TorchDistribution:
        """Return the distribution of the family with these logits."""
        if self.temperature is None:
            distribution = self.family(logits=logits)
        else:
            distribution = self.family(self.temperature.to(logits), logits=logits)
        return distribution.to_event(event_dim - distribution.event_dim)

    def start(self, distribution: Any, value: Tensor) -> Tensor:
        """Return the initial logits: zeros, or the logits of another distribution of the site.

        Args:
            distribution: the distribution of the site in another guide, or None.
            value: a draw from it. It decides where the distribution has no logits, as a point has
                none.
        """
        shape = value.shape if self.categories is None else (*value.shape, self.categories)
        if distribution is None:
            return value.new_zeros(shape, dtype=self.dtype)
        logits = getattr(innermost(distribution), "logits", None)
        if isinstance(logits, Tensor):
            return logits.expand(shape)
        if self.categories is not None:
            return _SURE * F.one_hot(value.long(), self.categories).to(self.dtype)
        if self.temperature is None:
            return _SURE * (2 * value - 1)
        return value if self.has_logits else value.logit(eps=1e-3)


@dataclass(frozen=True, eq=False)
class Continuous:
    """The family of points and normal distributions in unconstrained coordinates.

    Attributes:
        transform: the map from the reals to the support, `identity_transform` if that is the reals.
    """

    transform: Transform

    def point(self, loc: Tensor, event_dim: int) -> dist.TorchDistribution:
        """Return the point mass with the unconstrained coordinates `loc`."""
        return dist.Delta(self.transform(loc), event_dim=event_dim)

    def moved_point(self, drawn: Tensor, event_dim: int) -> dist.TorchDistribution:
        """Return the point mass at a sample in unconstrained coordinates.

        Its density is the factor by which the transform changes the density of the sample.
        """
        value = self.transform(drawn)
        volume = self.transform.log_abs_det_jacobian(drawn, value)
        rank = event_dim - self.transform.codomain.event_dim
        return dist.Delta(value, -sum_rightmost(volume, rank), event_dim=event_dim)

    def normal(self, loc: Tensor, scale: Tensor, event_dim: int) -> dist.TorchDistribution:
        """Return the normal distribution in unconstrained coordinates, mapped to the support."""
        return self.to_support(dist.Normal(loc, scale).to_event(self.free_dim(event_dim)))

    def free_dim(self, event_dim: int) -> int:
        """Return the number of event dims of a distribution in unconstrained coordinates."""
        return event_dim + self.transform.domain.event_dim - self.transform.codomain.event_dim

    def to_support(self, distribution: Any) -> dist.TorchDistribution:
        """Map a distribution in unconstrained coordinates to the support."""
        same = self.transform == identity_transform  # equal for a copy, too
        return (
            distribution if same else dist.TransformedDistribution(distribution, [self.transform])
        )

    def start(self, distribution: Any, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the initial unconstrained centers and standard deviations; 0 stands for a point.

        Args:
            distribution: the distribution of the site in another guide, or None.
            value: a draw from it. It is the center where the distribution's mean is unknown.
        """
        loc = self.transform.inv(value)
        if distribution is not None:
            try:
                mean, stddev = self._moments(distribution)
            except NotImplementedError:  # the distribution has no moments in closed form
                return loc, torch.zeros_like(loc)
            if mean.isfinite().all() and stddev.isfinite().all():
                return mean.expand_as(loc), stddev.expand_as(loc)
        return loc, torch.zeros_like(loc)

    def _moments(self, distribution: Any) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation of a distribution in the unconstrained coordinates.

        Raises:
            NotImplementedError: they are unknown.
        """
        if isinstance(distribution, dist.TransformedDistribution):
            mean = distribution.base_dist.mean
            back = self.transform.inv(ComposeTransform(distribution.transforms)(mean))
            if back.shape == mean.shape and torch.allclose(back, mean):
                return mean, distribution.base_dist.stddev
            raise NotImplementedError
        if self.transform != identity_transform:
            raise NotImplementedError
        return distribution.mean, distribution.stddev


def family_of(name: str, distribution: Any) -> ByLogits | Continuous:
    """Return the family that serves a site, from a distribution of the site in the model.

    Raises:
        UnservedSite: none does; the message names the site.
    """
    inner = innermost(distribution)
    logits: Any = getattr(inner, "logits", None)
    if isinstance(inner, _RELAXED):
        return ByLogits(type(inner), logits.dtype, inner.temperature, None)
    for base, family in _DISCRETE.items():
        if isinstance(inner, base):
            categories = logits.shape[-1] if family is dist.Categorical else None
            return ByLogits(family, logits.dtype, None, categories)
    if inner.support.is_discrete:
        raise UnservedSite(
            f"site {name!r} has the distribution {type(inner).__name__}, which is discrete and not "
            "defined "
            "by logits alone, so no free-form distribution fits it; use the guide as it is, "
            "without steps, "
            "or a model that sums the site out (of scenes, model and guide of "
            "`entry.with_enumerated_presences`) or has Bernoulli or Gaussian units"
        )
    support = inner.support
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    if support is constraints.real:
        return Continuous(identity_transform)
    try:
        return Continuous(biject_to(inner.support))
    except NotImplementedError:
        raise UnservedSite(
            f"site {name!r} has the distribution {type(inner).__name__}, and "
            "torch.distributions.biject_to "
            f"has no transform from the reals to its support, {inner.support}; register one, or "
            "use a guide that is made for this model"
        ) from None
