"""The base class of guides that have separate parameters for every image, instead of a network."""

import warnings
from typing import NamedTuple, Self

import torch
from pyro import poutine
from pyro.nn import PyroModule
from torch import Tensor, nn

from capsule_zoo.guides.base import Guide
from capsule_zoo.guides.per_image.site_distributions import (
    ByLogits,
    Continuous,
    UnservedSite,
    family_of,
)
from capsule_zoo.models.base import Model
from capsule_zoo.models.common.modes import eval_mode

_KINDS = ("logits", "locs", "log_scales", "factors")


class Refinement(NamedTuple):
    """The objective along a fit of a guide to given images.

    Attributes:
        path: mean over images of the objective before each step and after the last, each under
            noise of its own, (steps + 1,), in nats per image.
        start, end: each image's objective before and after, (B,), under the same noise, to which
            nothing was fitted; `end >= start`.
    """

    path: Tensor
    start: Tensor
    end: Tensor


class PerImageGuide(Guide[Model]):
    """The base class of guides with parameters for given images, which are called in their order.

    `images` in a call may be these images several times over, as evaluation passes them.

    Args:
        model: the model.
        images: (B, C, H, W).

    Attributes:
        logits, locs, log_scales, factors: parameters by site, (B, ...).
        families: the family that serves each latent site of the model, by name.
        discrete_families: the family of each latent site of the discrete model, by name.
        refinement: the objective along the fit, if `inference.fit_guide` took gradient steps.
    """

    per_image = True
    refinement: Refinement | None = None
    sums: Tensor | None = None  # of the pixels of each image, by which other images are noticed
    discrete_families: dict[str, ByLogits | Continuous]

    def __init__(self, model: Model, images: Tensor) -> None:
        super().__init__(model)
        self.num_images = len(images)
        self.sums = _sum_pixels(images) if images.dim() > 1 else None
        self.families = families_of(model)
        self.logits = PyroModule[nn.ParameterDict]()
        self.locs = PyroModule[nn.ParameterDict]()
        self.log_scales = PyroModule[nn.ParameterDict]()
        self.factors = PyroModule[nn.ParameterDict]()

    @property
    def differentiable(self) -> bool:
        """True if all sites can be reparametrized, which discrete sites cannot."""
        families = self.families.values()
        return all(f.family.has_rsample for f in families if isinstance(f, ByLogits))

    def discretize(self) -> Self:
        """Return the guide for `model.discretize()`, with shared parameters."""
        return self.on_model(self.model.discretize(), families=self.discrete_families)

    def select(self, index: Tensor) -> Self:
        """Return the guide for `images[index]`, with copies of these images' parameters."""
        sums = None if self.sums is None else self.sums[index]
        subset = self.sharing_parameters(num_images=len(index), refinement=None, sums=sums)
        subset._modules = dict(self._modules)
        for kind in _KINDS:
            tensors = getattr(self, kind).items()
            subset._modules[kind] = PyroModule[nn.ParameterDict](
                (name, nn.Parameter(tensor.detach()[index])) for name, tensor in tensors
            )  # pairs: ParameterDict sorts the names of a dict, but the order of sites counts
        subset._rename()
        return subset

    def continuous(self, name: str) -> Continuous:
        """Return the family of a site that is neither discrete nor relaxed."""
        family = self.families[name]
        assert isinstance(family, Continuous)
        return family

    def not_finite(self) -> dict[str, Tensor]:
        """Return a mask of the images with parameters that are not finite, (B,) for each site.

        Logits may be infinite, for values that are certain.
        """
        masks: dict[str, Tensor] = {}
        for kind in _KINDS:
            for name, values in getattr(self, kind).items():
                wrong = values.isnan() if kind == "logits" else ~values.isfinite()
                rows = wrong.reshape(self.num_images, -1).any(1)
                masks[name] = masks[name] | rows if name in masks else rows
        return masks

    def _repeats(self, images: Tensor) -> int:
        """Return how many times `images` repeats the guide's own images.

        Warns of other images, which are noticed by the sums of their pixels.

        Raises:
            ValueError: they are not a multiple of the guide's own images.
        """
        repeats, rest = divmod(len(images), self.num_images)
        if rest or not repeats:
            raise ValueError(
                f"this guide belongs to {self.num_images} images, not {len(images)}; make a new "
                f"{type(self).__name__} for other images"
            )
        if self.sums is not None:
            sums = _sum_pixels(images).view(repeats, -1)
            if not torch.allclose(sums, self.sums.to(sums), rtol=1e-3, atol=1e-3):
                warnings.warn(
                    f"this {type(self).__name__} was fitted to other images, or to these in "
                    "another order, and infers the latents of those; make a new one for these",
                    stacklevel=2,
                )
        return repeats


def _sum_pixels(images: Tensor) -> Tensor:
    """Return the sum over the pixels of each image, (B,), without missing ones."""
    return images.detach().flatten(1).nansum(1, dtype=torch.float64)


def families_of(model: Model) -> dict[str, ByLogits | Continuous]:
    """Return the family that serves each latent site, found by sampling one image.

    Raises:
        UnservedSite: a site that no family serves, or that belongs to no image.
    """
    with torch.no_grad(), poutine.block(), torch.random.fork_rng(), eval_mode(model):
        nodes = poutine.trace(model).get_trace(batch_size=1).nodes
    families: dict[str, ByLogits | Continuous] = {}
    for site in model.latent_sites:
        if "images" not in site.plates:
            raise UnservedSite(
                f"site {site.name!r} of {type(model).__name__} lies outside the plate 'images', so "
                "it belongs to no image; draw it inside the plate, or make it a parameter"
            )
        try:
            families[site.name] = family_of(site.name, nodes[site.name]["fn"])
        except UnservedSite as error:
            raise UnservedSite(f"{type(model).__name__}: {error}") from None
    return families
