"""The law of one latent site in a free-form guide, chosen by the law of the site in the model.

    discrete, or relaxed     the model's own family, with logits of its own
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
from torch import distributions as laws
from torch.distributions import biject_to, constraints
from torch.distributions.relaxed_bernoulli import LogitRelaxedBernoulli
from torch.distributions.relaxed_categorical import ExpRelaxedCategorical
from torch.distributions.transforms import ComposeTransform, Transform, identity_transform

from capsule_zoo.models.common.plates import ImageDistribution

_RELAXED = (
    LogitRelaxedBernoulli,
    laws.RelaxedBernoulli,
    ExpRelaxedCategorical,
    laws.RelaxedOneHotCategorical,
)
# A subclass, such as a faster Bernoulli or a law of labels, is served by the first of its bases
_DISCRETE = {
    laws.OneHotCategoricalStraightThrough: dist.OneHotCategoricalStraightThrough,
    laws.OneHotCategorical: dist.OneHotCategorical,
    laws.Categorical: dist.Categorical,
    laws.Bernoulli: dist.Bernoulli,
}
_SURE = 3.0  # logit of a value that another guide holds for certain


class UnservedSite(ValueError):
    """The error raised for a site that no free-form law fits."""


class OtherLaws(Messenger):
    """A messenger that replaces the laws of sites before they are drawn.

    Args:
        law_of: returns the law of a site from its name and the law that it has.
    """

    def __init__(self, law_of: Callable[[str, Any], Any]) -> None:
        super().__init__()
        self.law_of = law_of

    def _pyro_sample(self, msg: Any) -> None:
        msg["fn"] = self.law_of(msg["name"], msg["fn"])


def base_distribution(law: Any) -> Any:
    """Return the distribution inside `ImageDistribution` and `to_event`, `expand` and `mask`."""
    if isinstance(law, ImageDistribution):
        law = law.law
    while isinstance(law, (Independent, ExpandedDistribution, MaskedDistribution)):
        law = law.base_dist
    return law


def innermost(law: Any) -> Any:
    """Return the family inside wrappers (see `base_distribution`) and mixtures of one family."""
    law = base_distribution(law)
    mixed = isinstance(law, laws.MixtureSameFamily)
    return innermost(law.component_distribution) if mixed else law


@dataclass(frozen=True, eq=False)
class ByLogits:
    """A family that logits define: Bernoulli, Categorical, one-hot, or one of these relaxed.

    Attributes:
        family: the class of the law.
        dtype: of the logits.
        temperature: temperature of a relaxed law, else None.
        categories: number of logits of a choice whose value is their index, else None.
    """

    family: Any
    dtype: torch.dtype
    temperature: Tensor | None
    categories: int | None

    @property
    def of_logits(self) -> bool:
        """True for a relaxed law whose values are logits, on the reals, and not shares."""
        return issubclass(self.family, LogitRelaxedBernoulli | ExpRelaxedCategorical)

    def law(self, logits: Tensor, event_dim: int) -> dist.TorchDistribution:
        """Return the law with these logits."""
        if self.temperature is None:
            law = self.family(logits=logits)
        else:
            law = self.family(self.temperature.to(logits), logits=logits)
        return law.to_event(event_dim - law.event_dim)

    def start(self, law: Any, value: Tensor) -> Tensor:
        """Return logits to start from: even ones, or those of another law of the site.

        Args:
            law: the law of the site in another guide, or None.
            value: a draw from it. It decides where the law has no logits, as a point has none.
        """
        shape = value.shape if self.categories is None else (*value.shape, self.categories)
        if law is None:
            return value.new_zeros(shape, dtype=self.dtype)
        logits = getattr(innermost(law), "logits", None)
        if isinstance(logits, Tensor):
            return logits.expand(shape)
        if self.categories is not None:
            return _SURE * F.one_hot(value.long(), self.categories).to(self.dtype)
        if self.temperature is None:
            return _SURE * (2 * value - 1)
        return value if self.of_logits else value.logit(eps=1e-3)


@dataclass(frozen=True, eq=False)
class Continuous:
    """A continuous law: a point, or a normal law in unconstrained coordinates.

    Attributes:
        transform: the map from the reals to the support, `identity_transform` if that is the reals.
    """

    transform: Transform

    def point(self, loc: Tensor, event_dim: int) -> dist.TorchDistribution:
        """Return the point whose unconstrained coordinates are `loc`."""
        return dist.Delta(self.transform(loc), event_dim=event_dim)

    def moved_point(self, drawn: Tensor, event_dim: int) -> dist.TorchDistribution:
        """Return the point at a draw in unconstrained coordinates.

        Its density is the factor by which the transform changes the density of the draw.
        """
        value = self.transform(drawn)
        volume = self.transform.log_abs_det_jacobian(drawn, value)
        rank = event_dim - self.transform.codomain.event_dim
        return dist.Delta(value, -sum_rightmost(volume, rank), event_dim=event_dim)

    def normal(self, loc: Tensor, scale: Tensor, event_dim: int) -> dist.TorchDistribution:
        """Return the law that is normal in the unconstrained coordinates."""
        return self.moved(dist.Normal(loc, scale).to_event(self.free_dim(event_dim)))

    def free_dim(self, event_dim: int) -> int:
        """Return the event rank of a law in the unconstrained coordinates."""
        return event_dim + self.transform.domain.event_dim - self.transform.codomain.event_dim

    def moved(self, law: Any) -> dist.TorchDistribution:
        """Return the law on the support, from a law in the unconstrained coordinates."""
        same = self.transform == identity_transform  # of a copy too
        return law if same else dist.TransformedDistribution(law, [self.transform])

    def start(self, law: Any, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return unconstrained centers and deviations; a deviation of 0 stands for a point.

        Args:
            law: the law of the site in another guide, or None.
            value: a draw from it. It is the center where the law's mean is unknown.
        """
        loc = self.transform.inv(value)
        if law is not None:
            try:
                mean, stddev = self._moments(law)
            except NotImplementedError:  # of a law without moments in closed form
                return loc, torch.zeros_like(loc)
            if mean.isfinite().all() and stddev.isfinite().all():
                return mean.expand_as(loc), stddev.expand_as(loc)
        return loc, torch.zeros_like(loc)

    def _moments(self, law: Any) -> tuple[Tensor, Tensor]:
        """Return mean and deviation of a law in the unconstrained coordinates.

        Raises:
            NotImplementedError: they are unknown.
        """
        if isinstance(law, dist.TransformedDistribution):
            mean = law.base_dist.mean
            back = self.transform.inv(ComposeTransform(law.transforms)(mean))
            if back.shape == mean.shape and torch.allclose(back, mean):
                return mean, law.base_dist.stddev
            raise NotImplementedError
        if self.transform != identity_transform:
            raise NotImplementedError
        return law.mean, law.stddev


def family_of(name: str, law: Any) -> ByLogits | Continuous:
    """Return the family that serves a site, from a law of the site in the model.

    Raises:
        UnservedSite: none does; the message names the site.
    """
    inner = innermost(law)
    logits: Any = getattr(inner, "logits", None)
    if isinstance(inner, _RELAXED):
        return ByLogits(type(inner), logits.dtype, inner.temperature, None)
    for base, family in _DISCRETE.items():
        if isinstance(inner, base):
            categories = logits.shape[-1] if family is dist.Categorical else None
            return ByLogits(family, logits.dtype, None, categories)
    if inner.support.is_discrete:
        raise UnservedSite(
            f"site {name!r} has the law {type(inner).__name__}, which is discrete and not defined "
            "by logits alone, so no free-form law fits it; use the guide as it is, without steps, "
            "or a model that sums the site out (of scenes, model and guide of `entry.summed`) or "
            "has Bernoulli or Gaussian units"
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
            f"site {name!r} has the law {type(inner).__name__}, and torch.distributions.biject_to "
            f"has no transform from the reals to its support, {inner.support}; register one, or "
            "use a guide that is made for this model"
        ) from None
