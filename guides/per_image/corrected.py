"""A guide that corrects the distributions of another guide for every image.

    q(z_i | z_1 .. z_{i-1}, image n) = the distribution of site i in the other guide, moved:
    Normal(mean + scale loc[n, i], scale exp(log_scale[n, i])), logits + logits[n, i], ...

All corrections begin at zero, so that the guide begins as the other one. Unlike a free-form guide
it keeps the order in which the other guide draws its sites, each given those before it: a stroke
given the canvas, a layer of units given the layer below. It shows how far a bound of an amortized
guide can be raised without another form of the posterior.

References:
    Kim, Wiseman, Miller, Sontag & Rush 2018, "Semi-Amortized Variational Autoencoders"
    (arXiv 1802.02550), for one normal site; corrections to distributions of several sites are ours.
"""

from typing import Any

import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.distributions.torch import Independent
from pyro.distributions.torch_distribution import ExpandedDistribution, MaskedDistribution
from torch import Tensor, nn

from capsule_zoo.data.tensors import accept_arrays
from capsule_zoo.guides.base import Guide
from capsule_zoo.guides.per_image.base import PerImageGuide, families_of
from capsule_zoo.guides.per_image.gauss_newton import ChainedNormal
from capsule_zoo.guides.per_image.site_distributions import (
    ByLogits,
    OtherDistributions,
    UnservedSite,
    family_of,
    innermost,
)
from capsule_zoo.models.common.modes import eval_mode, frozen
from capsule_zoo.models.common.spaces import tile_batch


class Corrected(PerImageGuide):
    """The guide with the distributions of another guide, plus corrections for every image.

    Args:
        guide: the guide that is corrected; it is not changed.
        images: (B, C, H, W), the images whose posterior this is.

    Attributes:
        logits: added to the logits of discrete and of relaxed sites, by site, (B, ...).
        locs: added to the means of other sites, in units of their standard deviations, or to
            points, in unconstrained coordinates, (B, ...).
        log_scales: added to the logarithms of their standard deviations, (B, ...); not of points.

    Raises:
        UnservedSite: a distribution of the guide cannot be corrected; the message names its site.
        ValueError: `guide` is no guide of the zoo.
    """

    @accept_arrays("images", like="model")
    def __init__(self, guide: Guide, images: Tensor) -> None:
        if not isinstance(guide, Guide):
            raise ValueError(f"guide must be a Guide, not {type(guide).__name__}")
        super().__init__(guide.model, images)
        self._start = (guide,)  # in a tuple, so that it is not trained with this guide
        with torch.no_grad(), poutine.block(), eval_mode(guide):
            nodes = poutine.trace(guide).get_trace(images).nodes
        for name in guide.covers:
            distribution, value = nodes[name]["fn"], nodes[name]["value"]
            inner = innermost(distribution)
            point = isinstance(inner, dist.Delta)
            if point and (isinstance(self.families[name], ByLogits) or inner.log_density.any()):
                raise UnservedSite(
                    f"{type(guide).__name__} draws {name!r} as a point of a discrete or relaxed "
                    "site, or one with a density, and such a point cannot be moved; use FreeForm"
                )
            family = None if point else family_of(name, distribution)
            if isinstance(family, ByLogits):
                self.logits[name] = nn.Parameter(
                    torch.zeros_like(family.start(distribution, value))
                )
                continue
            transform = (family or self.continuous(name)).transform
            free = torch.zeros_like(transform.inv(value))
            self.locs[name] = nn.Parameter(free)
            if not point:
                self.log_scales[name] = nn.Parameter(free.clone())
            self._correct_distribution(name, distribution, 1)

    @property
    def covers(self) -> tuple[str, ...]:
        return self._start[0].covers

    def discretize(self) -> "Corrected":
        """Return the guide for `model.discretize()`, with shared parameters."""
        return self._to(self._start[0].discretize())

    def with_missing_pixels(self, fill: Tensor | float = 0.0) -> "Corrected":
        """Return the guide for images with missing pixels, with shared parameters.

        Only the guide that is corrected sees `fill`.
        """
        return self._to(self._start[0].with_missing_pixels(fill))

    def _to(self, start: Guide) -> "Corrected":
        if start is self._start[0]:
            return self
        families = families_of(start.model)
        return self.sharing_parameters(_model=(start.model,), _start=(start,), families=families)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Any:
        """Sample every site, and return what the corrected guide returns."""
        start, repeats = self._start[0], self._repeats(images)
        correction = OtherDistributions(
            lambda name, distribution: self._correct_distribution(name, distribution, repeats)
        )
        with eval_mode(start), frozen(start), poutine.block(hide_types=["param"]), correction:
            return start(images)

    def _correct_distribution(
        self, name: str, distribution: Any, repeats: int
    ) -> dist.TorchDistribution:
        """Return the distribution of a site with each image's corrections, `repeats` times over."""
        if name not in self.covers:
            return distribution
        if name in self.logits:
            family = family_of(name, distribution)
            assert isinstance(family, ByLogits)
            logits = innermost(distribution).logits + tile_batch(self.logits[name], repeats)
            return family.distribution(logits, distribution.event_dim)
        shift = tile_batch(self.locs[name], repeats)
        if name not in self.log_scales:
            family = self.continuous(name)
            return family.point(
                family.transform.inv(distribution.mean) + shift, distribution.event_dim
            )
        try:
            return _move_distribution(
                distribution, shift, tile_batch(self.log_scales[name], repeats).exp()
            )
        except UnservedSite as error:
            raise UnservedSite(f"{type(self._start[0]).__name__} draws {name!r}: {error}") from None


def _move_distribution(distribution: Any, shift: Tensor, factor: Tensor) -> dist.TorchDistribution:
    """Shift and scale a normal or transformed normal distribution, before its transforms.

    Raises:
        UnservedSite: the distribution is of another family.
    """
    if isinstance(distribution, Independent):
        return _move_distribution(distribution.base_dist, shift, factor).to_event(
            distribution.reinterpreted_batch_ndims
        )
    if isinstance(distribution, ExpandedDistribution):
        return _move_distribution(distribution.base_dist, shift, factor)
    if isinstance(distribution, MaskedDistribution):
        return _move_distribution(distribution.base_dist, shift, factor).mask(distribution._mask)
    if isinstance(distribution, torch.distributions.TransformedDistribution):
        base = _move_distribution(distribution.base_dist, shift, factor)
        return dist.TransformedDistribution(base, distribution.transforms)
    if isinstance(distribution, torch.distributions.LowRankMultivariateNormal):
        rows, noise = (
            factor[..., None] * distribution.cov_factor,
            factor.square() * distribution.cov_diag,
        )
        return dist.LowRankMultivariateNormal(
            distribution.loc + distribution.stddev * shift, rows, noise
        )
    if isinstance(distribution, ChainedNormal):
        rows = factor.reshape(*distribution.factor.shape[:-1], 1) * distribution.factor
        return ChainedNormal(
            distribution.loc + distribution.stddev * shift, rows, distribution.event_dim
        )
    if isinstance(distribution, torch.distributions.Normal):
        return dist.Normal(
            distribution.loc + distribution.scale * shift, distribution.scale * factor
        )
    raise UnservedSite(
        f"its distribution {type(distribution).__name__} is no normal, transformed normal, "
        "low-rank normal, or distribution of logits, and no other can be corrected; use FreeForm"
    )
