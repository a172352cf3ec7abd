"""Free-form inference: separate variational parameters for every image, and no network.

    discrete site      z ~ the model's own family(logits[image, ...]), relaxed where it is relaxed
    continuous site    z ~ Delta(transform(loc[image, ...]))                    #
                       distribution="delta" z ~ transform(Normal(loc[image, ...], scale[image,
                       ...]))  # distribution="normal"
    all continuous     u ~ Normal(loc[image], diag(scale) (F F' + I) diag(scale)), F = factor[image]
    sites together     z = transform(u's part of the site)                       #
    distribution="low_rank"

`transform` maps the reals to the support of the site. The guide serves every model: it reads the
sites that the model declares and the distributions that it draws them from. Sites are independent
given the image, also where the model draws one given another. With distribution="low_rank" the
continuous numbers of an image are correlated, within and between sites; F has a row for each of
them and `rank` columns. It is Pyro's `AutoLowRankMultivariateNormal` with a distribution for each
image, so that each has its bound.

If it starts at another guide's result, it measures the cost of amortization and corrects the errors
of the encoder. If it starts at the prior, it checks that a result does not depend on an encoder.
Train it with `inference.fit(..., freeze="model")` on the images it was made for, in their order, or
let `inference.fit_guide("free_form", ...)` make and train it.

References:
    Smith, Schut, Gal & van der Wilk 2020 (arXiv 2004.03553), for part-whole capsules.
"""

import contextlib
from collections.abc import Mapping

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from torch import Tensor, nn

from capsule_zoo.data.tensors import accept_arrays
from capsule_zoo.guides.base import Guide
from capsule_zoo.guides.per_image.base import PerImageGuide, families_of
from capsule_zoo.guides.per_image.site_distributions import ByLogits, UnservedSite
from capsule_zoo.models.base import Model, Site
from capsule_zoo.models.checks import check_at_least, check_one_of
from capsule_zoo.models.common.modes import eval_mode
from capsule_zoo.models.common.spaces import tile_batch

DISTRIBUTIONS = ("delta", "normal", "low_rank")
_INITIAL_SCALE = 0.02  # first standard deviation around a point of the start
_INITIAL_FACTOR = 0.3  # first low-rank factor, in standard deviations; 0 has no gradient


class FreeForm(PerImageGuide):
    """The guide with per-image variational parameters for all latent sites of a model.

    Args:
        model: the model.
        images: (B, C, H, W), the images whose posterior this is.
        init: a guide to start from; None for a draw from the prior.
        distribution: the distribution of continuous sites, "delta" (points), "normal" or
            "low_rank".
        rank: columns of the factor where `distribution="low_rank"`, at most as many as rows.

    Attributes:
        logits: parameters of discrete and of relaxed sites, by site, (B, ...).
        locs: points or means of the other sites, in unconstrained coordinates, (B, ...).
        log_scales: logarithms of their standard deviations unless `distribution="delta"`, (B, ...).
        factors: rows of the factor where `distribution="low_rank"`, in units of the standard
            deviations, (B, ..., rank).

    Raises:
        UnservedSite: no free-form distribution fits a site of the model; the message names it. Or
            no site is continuous where `distribution="low_rank"`.
        ValueError: unknown `distribution`, a rank below 1, or a guide to start from that lacks a
        site.
    """

    @accept_arrays("images", like="model")
    def __init__(
        self,
        model: Model,
        images: Tensor,
        init: Guide | None = None,
        distribution: str = "delta",
        rank: int = 10,
    ) -> None:
        super().__init__(model, images)
        check_one_of("distribution", distribution, DISTRIBUTIONS)
        check_at_least(1, rank=rank)
        self.continuous_distribution = distribution
        discrete = model.discretize()
        self.discrete_families = self.families if discrete is model else families_of(discrete)
        with torch.no_grad(), poutine.block():
            if init is None:
                start = poutine.trace(model).get_trace(batch_size=len(images)).nodes
            else:
                with eval_mode(init):
                    start = poutine.trace(init).get_trace(images).nodes
        for name, family in self.families.items():
            if name not in start:
                raise ValueError(
                    f"init, a {type(init).__name__}, draws no site {name!r}; give a guide to this "
                    f"{type(model).__name__}, or None to start from the prior"
                )
            fn = None if init is None else start[name]["fn"]
            value = start[name]["value"]
            if isinstance(family, ByLogits):
                self.logits[name] = nn.Parameter(family.start(fn, value).clone())
                continue
            loc, scale = family.start(fn, value)
            self.locs[name] = nn.Parameter(loc.clone())
            if distribution == "delta":
                continue
            scale = torch.where(scale > 0, scale, _INITIAL_SCALE)  # a point has scale 0
            self.log_scales[name] = nn.Parameter(scale.log())
        if distribution == "low_rank":
            if not self.locs:
                raise UnservedSite(
                    f"{type(model).__name__} has no continuous site that could be correlated; give "
                    "distribution='normal', the kind free_form"
                )
            rank = min(rank, sum(loc[0].numel() for loc in self.locs.values()))
            for name, scale in self.log_scales.items():
                rows = torch.randn(*scale.shape, rank).to(scale.detach())
                self.factors[name] = nn.Parameter(_INITIAL_FACTOR * rank**-0.5 * rows)

    def point_values(self) -> dict[str, Tensor]:
        """Return the points or means of continuous sites, (B, ...) on their supports, by site."""
        return {name: self.continuous(name).transform(loc) for name, loc in self.locs.items()}

    def forward(self, images: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Sample every site and return the values by name."""
        repeats = self._repeats(images)
        plates: dict[str, pyro.plate] = {}
        distributions = self._draw_together(repeats, plates) if self.factors else {}
        for site in self.model.latent_sites:
            if site.name not in distributions:
                distributions[site.name] = self._distribution(site, repeats)
        return draw_sites(self.model, distributions, plates)

    def _draw_together(
        self, repeats: int, plates: dict[str, pyro.plate]
    ) -> dict[str, dist.TorchDistribution]:
        """Sample the continuous sites jointly, and return a point mass at each site's value.

        The auxiliary site `_continuous` has the joint density. The density of a point is the
        volume that its transform adds.
        """
        names = list(self.locs)
        sizes = [self.locs[name][0].numel() for name in names]
        loc, scale = (
            torch.cat([parameters[name].reshape(self.num_images, -1) for name in names], 1)
            for parameters in (self.locs, self.log_scales)
        )
        scale = scale.exp()
        factors = [self.factors[name] for name in names]
        factor = torch.cat([rows.reshape(len(rows), -1, rows.shape[-1]) for rows in factors], 1)
        dim = self.model.plate_dims["images"]
        inner = (1,) * (-1 - dim)  # plates inside the images plate
        distribution = dist.LowRankMultivariateNormal(
            *(
                tile_batch(parameter, repeats).unflatten(0, (-1, *inner))
                for parameter in (loc, scale[..., None] * factor, scale.square())
            )
        )
        plates["images"] = pyro.plate("images", distribution.batch_shape[dim], dim=dim)
        with plates["images"]:
            drawn = pyro.sample("_continuous", distribution, infer={"is_auxiliary": True})
        pieces = drawn.flatten(0, -2).split(sizes, -1)
        events = {site.name: site.event_dim for site in self.model.latent_sites}
        return {
            name: self.continuous(name).moved_point(
                piece.view(-1, *self.locs[name].shape[1:]), events[name]
            )
            for name, piece in zip(names, pieces, strict=True)
        }

    def _distribution(self, site: Site, repeats: int) -> dist.TorchDistribution:
        """Return the distribution of a site for all images, `repeats` times over."""
        family = self.families[site.name]
        if isinstance(family, ByLogits):
            return family.distribution(tile_batch(self.logits[site.name], repeats), site.event_dim)
        loc = tile_batch(self.locs[site.name], repeats)
        if self.continuous_distribution == "delta":
            return family.point(loc, site.event_dim)
        scale = tile_batch(self.log_scales[site.name].exp(), repeats)
        return family.normal(loc, scale, site.event_dim)


def draw_sites(
    model: Model,
    distributions: Mapping[str, dist.TorchDistribution],
    plates: dict[str, pyro.plate] | None = None,
) -> dict[str, Tensor]:
    """Sample the latent sites of a model from given distributions, in the plates of the model.

    Args:
        distributions: the distribution of every latent site, by its name; sites are independent of
            each other.
        plates: plates that exist already, by name.
    """
    plates = {} if plates is None else plates
    return {
        site.name: draw_site(model, site, distributions[site.name], plates)
        for site in model.latent_sites
    }


def draw_site(
    model: Model, site: Site, distribution: dist.TorchDistribution, plates: dict[str, pyro.plate]
) -> Tensor:
    """Sample one site from a distribution in the model's plates; plates not yet made are added."""
    with contextlib.ExitStack() as stack:
        for plate in site.plates:
            if plate not in plates:
                dim = model.plate_dims[plate]
                plates[plate] = pyro.plate(plate, distribution.batch_shape[dim], dim=dim)
            stack.enter_context(plates[plate])
        return pyro.sample(site.name, distribution)
