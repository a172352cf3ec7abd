"""The guide with a correlated normal distribution of each image's continuous sites, at a point.

    u ~ Normal(loc[image], S S'),   z = transform(u's part of the site),   S = factor[image]
    discrete, relaxed   the model's own family(logits[image])

S is lower triangular, so that the sites are drawn one after the other, each given those before it,
and the density at given latents is known: the guide can start annealed chains. The distribution of
a site is correlated over plates inside the images' plate, too; there its density is split by
the chain rule. Several modes are a mixture, sum_m w_m q_m, whose weights change as sites are drawn:

    q(z_i | z_1 .. z_{i-1}) = sum_m w_m(z_1 .. z_{i-1}) q_m(z_i | z_1 .. z_{i-1})

`inference.posterior.gauss_newton` finds points and factors: S S' is the inverse of the Gauss-Newton
matrix of the log joint density.
"""

import math
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions.util import sum_rightmost
from torch import Tensor, nn
from torch.distributions import constraints
from torch.distributions.multivariate_normal import _precision_to_scale_tril

from capsule_zoo.guides.per_image.base import PerImageGuide
from capsule_zoo.guides.per_image.free_form import FreeForm, draw_site
from capsule_zoo.guides.per_image.site_distributions import ByLogits
from capsule_zoo.models.base import Site
from capsule_zoo.models.common.spaces import tile_batch

MODES = "modes"  # name of the logits of the modes' weights, stored with the logits of sites


class GaussNewton(PerImageGuide):
    """The guide with one normal distribution, or a mixture, of each image's continuous sites.

    Args:
        points: a `FreeForm` guide to the images M times over, one copy after the other: the
            logits of discrete sites, and the means of the others.
        factors: S by site. The rows of a whole factor, (M B, n, D), in the order of the sites of
            `points`; or a block for each element of the site's plates, (M B, blocks, k, k).
        log_weights: log weights of the modes, up to a constant, (M, B); one mode by default.

    Raises:
        ValueError: `points` are of another class.

    Attributes:
        logits, locs: as in `FreeForm`, with the modes as second dim, (B, M, ...). The logits
            of the modes are `logits["modes"]`, (B, M).
        factors: as above, (B, M, ...).
    """

    def __init__(
        self, points: FreeForm, factors: dict[str, Tensor], log_weights: Tensor | None = None
    ) -> None:
        if not isinstance(points, FreeForm):
            raise ValueError(f"points must be a FreeForm guide, not {type(points).__name__}")
        count = 1 if log_weights is None else len(log_weights)
        number = points.num_images // count
        like = next(points.parameters())
        super().__init__(points.model, like.new_empty(number))
        self.sums = None if points.sums is None else points.sums[:number]
        self.discrete_families = points.discrete_families

        def parameter_by_image(values: Tensor) -> nn.Parameter:
            values = values.detach().to(like).unflatten(0, (count, number))
            return nn.Parameter(values.transpose(0, 1).contiguous())

        for kind in ("logits", "locs"):
            for name, values in getattr(points, kind).items():
                getattr(self, kind)[name] = parameter_by_image(values)
        for name, rows in factors.items():
            self.factors[name] = parameter_by_image(rows)
        flat = like.new_zeros(number) if log_weights is None else log_weights.flatten()
        self.logits[MODES] = parameter_by_image(flat)

    @property
    def whole(self) -> bool:
        """True if all coordinates of an image are correlated, False for independent blocks."""
        return all(rows.dim() == 4 for rows in self.factors.values())

    @torch.no_grad()
    def factor(self) -> Tensor:
        """Return the covariance factor S, (B, D, D), of the mean precision of an image's modes.

        Raises:
            ValueError: the factor is of blocks.
        """
        if not self.whole:
            raise ValueError("the factor is of blocks; make the guide with blocks=False")
        rows = torch.cat(list(self.factors.values()), 2)
        return _precision_to_scale_tril(torch.cholesky_inverse(rows.double()).mean(1)).to(rows)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Sample every site and return the values by name."""
        repeats = self._repeats(images)
        weight = tile_batch(self.logits[MODES], repeats).log_softmax(1).T  # (M, rows)
        several = len(weight) > 1
        noise: list[Tensor] = []  # noise of the sites sampled so far, ([M,] B, n, repeats)
        plates: dict[str, pyro.plate] = {}
        drawn = {}
        for site in self.model.latent_sites:
            distribution: Any = self._distribution(site, repeats, noise)
            mixed = ModeMixture(distribution, weight) if several else distribution
            value = drawn[site.name] = draw_site(self.model, site, mixed, plates)
            if several:
                log_density = distribution.log_prob(value).reshape(*weight.shape, -1).sum(2)
                weight = (weight + log_density).log_softmax(0)
            if site.name in self.locs and self.whole:
                free = self.continuous(site.name).transform.inv(value)
                noise.append(
                    getattr(distribution, "base_dist", distribution).noise(free)[..., 0, :, :]
                )
        return drawn

    def _distribution(
        self, site: Site, repeats: int, noise: list[Tensor]
    ) -> dist.TorchDistribution:
        """Return the distribution of a site given earlier sites' noise, ([M,] rows, ...)."""
        family = self.families[site.name]
        if isinstance(family, ByLogits):
            logits = _modes_first(tile_batch(self.logits[site.name], repeats))
            return family.distribution(logits, site.event_dim)
        loc = _modes_first(tile_batch(self.locs[site.name], repeats))
        rows = _modes_first(self.factors[site.name])
        if self.whole:
            before = sum(tensor.shape[-2] for tensor in noise)
            if noise:
                shift = rows[..., :before] @ torch.cat(noise, -2)  # ([M,] B, n, repeats)
                loc = loc + shift.movedim(-1, -3).reshape(loc.shape)
            rows = rows[..., None, :, before : before + rows.shape[-2]]
        return family.to_support(ChainedNormal(loc, rows, family.free_dim(site.event_dim)))


class ChainedNormal(dist.TorchDistribution):
    """A correlated normal distribution of rows, whose density is split over a row's batch dims.

    The term of an element is its log density given the elements before it in the row.

    Args:
        loc: (*lead, rows, *shape).
        factor: lower triangular, (*lead, B, blocks, k, k), where blocks k is the number of
            elements of `shape`, and rows are B images several times over.
        event_dim: number of the last dims that are the event.
    """

    arg_constraints = {}
    has_rsample = True

    def __init__(self, loc: Tensor, factor: Tensor, event_dim: int) -> None:
        self.loc = loc
        self.factor = factor
        self.lead = factor.dim() - 4
        batch, event = loc.shape[: loc.dim() - event_dim], loc.shape[loc.dim() - event_dim :]
        super().__init__(batch, event, validate_args=False)

    @property
    def support(self) -> constraints.Constraint:
        return constraints.independent(constraints.real, len(self.event_shape))

    @property
    def mean(self) -> Tensor:
        """The mean of each coordinate given earlier sites, (*lead, rows, *shape)."""
        return self.loc

    @property
    def variance(self) -> Tensor:
        """The variance of each coordinate, (*lead, rows, *shape)."""
        variance = self.factor.square().sum(-1, keepdim=True)
        images = math.prod(self.factor.shape[self.lead : -1])
        repeats = math.prod(self.loc.shape[self.lead :]) // images
        return self._join_rows(variance.expand(*variance.shape[:-1], repeats))

    def rsample(self, sample_shape: torch.Size = torch.Size()) -> Tensor:
        """Sample rows, (*lead, rows, *shape); several at once only through `expand`."""
        noise = self._split(torch.randn_like(self.loc))
        return self.loc + self._join_rows(self.factor @ noise)

    def noise(self, value: Tensor) -> Tensor:
        """Return the standard normal noise of a value, (*lead, B, blocks, k, repeats)."""
        return torch.linalg.solve_triangular(
            self.factor, self._split(value - self.loc), upper=False
        )

    def log_prob(self, value: Tensor) -> Tensor:
        """Compute the log density (*lead, rows, *batch) in nats; its sum over a row is exact."""
        noise = self.noise(value)
        scale = self.factor.diagonal(dim1=-2, dim2=-1)[..., None]
        log_density = -noise.square() / 2 - scale.log() - math.log(2 * math.pi) / 2
        return sum_rightmost(self._join_rows(log_density), len(self.event_shape))

    def _split(self, value: Tensor) -> Tensor:
        """Reshape values (*lead, rows, *shape) to (*lead, B, blocks, k, repeats)."""
        images, *block = self.factor.shape[self.lead : -1]
        return value.reshape(*value.shape[: self.lead], -1, images, *block).movedim(self.lead, -1)

    def _join_rows(self, value: Tensor) -> Tensor:
        return value.movedim(-1, self.lead).reshape(self.loc.shape)


class ModeMixture(dist.TorchDistribution):
    """A mixture of whole rows, whose density is split over the row's batch dims.

    Args:
        distribution: the distributions of all modes, batch shape (M, rows, *batch).
        log_weight: normalized log weights of the modes, (M, rows).
    """

    arg_constraints = {}

    def __init__(self, distribution: Any, log_weight: Tensor) -> None:
        self.distribution = distribution
        self.log_weight = log_weight
        super().__init__(
            distribution.batch_shape[1:], distribution.event_shape, validate_args=False
        )

    @property
    def support(self) -> Any:
        return self.distribution.support

    def sample(self, sample_shape: torch.Size = torch.Size()) -> Tensor:
        """Sample rows, each from one mode."""
        values = self.distribution.sample()
        mode = dist.Categorical(logits=self.log_weight.T).sample()
        return values[mode, torch.arange(len(mode), device=mode.device)]

    def log_prob(self, value: Tensor) -> Tensor:
        """Compute the log density (rows, *batch) in nats; its sum over a row is exact."""
        log_density = self.distribution.log_prob(value)
        flat = log_density.reshape(*self.log_weight.shape, -1)
        joint = self.log_weight[..., None] + flat.cumsum(-1)
        prefix = torch.cat([self.log_weight[..., None], joint[..., :-1]], -1)
        return (joint.logsumexp(0) - prefix.logsumexp(0)).reshape(log_density.shape[1:])


def _modes_first(values: Tensor) -> Tensor:
    """Move the modes of (rows, M, ...) first: (M, rows, ...), or (rows, ...) for a single mode."""
    return values[:, 0] if values.shape[1] == 1 else values.transpose(0, 1)
