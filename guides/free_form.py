"""Free-form inference: separate variational parameters for every image, and no network.

    discrete site      z ~ the model's own family(logits[image, ...]), relaxed where it is relaxed
    continuous site    z ~ Delta(transform(loc[image, ...]))                    # law="delta"
                       z ~ transform(Normal(loc[image, ...], scale[image, ...]))  # law="normal"

`transform` maps the reals to the support of the site. The guide serves every model: it reads the
sites that the model declares and the laws that it draws them from. All sites are independent given
the image, also where the model draws one given another.

If it starts at another guide's result, it measures the cost of amortization and corrects the errors
of the encoder. If it starts at the prior, it checks that a result does not depend on an encoder.
Train it with `inference.fit(..., freeze="model")` on the images it was made for, in their order, or
with `inference.refine`.

References:
    Smith, Schut, Gal & van der Wilk 2020 (arXiv 2004.03553), for part-whole capsules.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.nn import PyroModule
from torch import Tensor, nn

from capsule_zoo.guides.base import Guide
from capsule_zoo.guides.site_laws import ByLogits, Continuous, UnservedSite, family_of
from capsule_zoo.models.base import Model, Site
from capsule_zoo.models.blocks.modes import in_eval_mode
from capsule_zoo.models.blocks.spaces import tiled
from capsule_zoo.models.checks import check_one_of

LAWS = ("delta", "normal")
_INITIAL_SCALE = 0.02  # deviation where the start is a point: close to the point
_Families = Mapping[str, ByLogits | Continuous]


class FreeForm(Guide[Model]):
    """The guide with per-image variational parameters for all latent sites of a model.

    Args:
        model: the model.
        images: (B, C, H, W), the images whose posterior this is.
        init: a guide to start from; None for a draw from the prior.
        law: the law of continuous sites, "delta" (points) or "normal".

    Attributes:
        logits: parameters of discrete and of relaxed sites, by site, (B, ...).
        locs: points or means of the other sites, in unconstrained coordinates, (B, ...).
        log_scales: logarithms of their deviations where `law="normal"`, (B, ...).

    Raises:
        UnservedSite: no free-form law fits a site of the model; the message names it.
        ValueError: unknown `law`, or a guide to start from that lacks a site.
    """

    per_image = True  # its parameters belong to these images, in this order

    def __init__(
        self, model: Model, images: Tensor, init: Guide | None = None, law: str = "delta"
    ) -> None:
        super().__init__(model)
        check_one_of("law", law, LAWS)
        self.continuous_law = law
        self.num_images = len(images)
        self.families = families_of(model)
        discrete = model.discretized()
        self.discrete_families = self.families if discrete is model else families_of(discrete)
        with torch.no_grad(), poutine.block():
            if init is None:
                start = poutine.trace(model).get_trace(batch_size=len(images)).nodes
            else:
                with in_eval_mode(init):
                    start = poutine.trace(init).get_trace(images).nodes
        self.logits = PyroModule[nn.ParameterDict]()
        self.locs = PyroModule[nn.ParameterDict]()
        self.log_scales = PyroModule[nn.ParameterDict]()
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
            if law == "normal":
                scale = torch.where(scale > 0, scale, _INITIAL_SCALE)  # a point has none
                self.log_scales[name] = nn.Parameter(scale.log())

    @property
    def differentiable(self) -> bool:
        """True if gradients pass through the draws of all sites; they do unless one is discrete."""
        families = self.families.values()
        return all(f.family.has_rsample for f in families if isinstance(f, ByLogits))

    def select(self, index: Tensor) -> FreeForm:
        """Return the guide to `images[index]`, with copies of the parameters of these images."""
        chosen = self.sharing_parameters(num_images=len(index))
        chosen._modules = dict(self._modules)
        for kind in ("logits", "locs", "log_scales"):
            tensors = getattr(self, kind).items()
            chosen._modules[kind] = PyroModule[nn.ParameterDict](
                {name: nn.Parameter(tensor.detach()[index]) for name, tensor in tensors}
            )
        chosen._rename()
        return chosen

    def discretized(self) -> FreeForm:
        """Return the guide with the same parameters for the model's `discretized()`."""
        model = self.model.discretized()
        if model is self.model:
            return self
        return self.sharing_parameters(_model=(model,), families=self.discrete_families)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Draw every site and return the values by name.

        `images` may be the guide's own images several times over, as evaluation passes them.
        """
        repeats = self._repeats(images)
        laws = {site.name: self._law(site, repeats) for site in self.model.latent_sites}
        return draw_sites(self.model, laws)

    def _law(self, site: Site, repeats: int) -> dist.TorchDistribution:
        """Return the law of a site for all images, as many times over."""
        family = self.families[site.name]
        if isinstance(family, ByLogits):
            return family.law(tiled(self.logits[site.name], repeats), site.event_dim)
        loc = tiled(self.locs[site.name], repeats)
        if self.continuous_law == "delta":
            return family.point(loc, site.event_dim)
        scale = tiled(self.log_scales[site.name].exp(), repeats)
        return family.normal(loc, scale, site.event_dim)

    def _repeats(self, images: Tensor) -> int:
        """Return how many times over `images` are the images that the parameters belong to.

        Raises:
            ValueError: they are not a multiple of the guide's own images.
        """
        repeats, rest = divmod(len(images), self.num_images)
        if rest or not repeats:
            raise ValueError(
                f"this guide belongs to {self.num_images} images, not {len(images)}; make a new "
                f"{type(self).__name__} for other images"
            )
        return repeats


def draw_sites(model: Model, laws: Mapping[str, dist.TorchDistribution]) -> dict[str, Tensor]:
    """Draw the latent sites of a model from given laws, in the plates of the model.

    Args:
        laws: the law of every latent site, by its name; sites are independent of each other.
    """
    plates: dict[str, pyro.plate] = {}
    drawn = {}
    for site in model.latent_sites:
        law = laws[site.name]
        with contextlib.ExitStack() as stack:
            for plate in site.plates:
                if plate not in plates:
                    dim = model.plate_dims[plate]
                    plates[plate] = pyro.plate(plate, law.batch_shape[dim], dim=dim)
                stack.enter_context(plates[plate])
            drawn[site.name] = pyro.sample(site.name, law)
    return drawn


def families_of(model: Model) -> _Families:
    """Return the family that serves each latent site, read from a draw of one image.

    Raises:
        UnservedSite: a site that no family serves, or that belongs to no image.
    """
    with torch.no_grad(), poutine.block(), torch.random.fork_rng(), in_eval_mode(model):
        nodes = poutine.trace(model).get_trace(batch_size=1).nodes
    found = {}
    for site in model.latent_sites:
        if "images" not in site.plates:
            raise UnservedSite(
                f"site {site.name!r} of {type(model).__name__} lies outside the plate 'images', so "
                "it belongs to no image; draw it inside the plate, or make it a parameter"
            )
        try:
            found[site.name] = family_of(site.name, nodes[site.name]["fn"])
        except UnservedSite as error:
            raise UnservedSite(f"{type(model).__name__}: {error}") from None
    return found
