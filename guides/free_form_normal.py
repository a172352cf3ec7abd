"""A separate normal law for every image, over the latents of any model with real latents.

    z ~ Normal(mean[image], scale[image])        # at every site, coordinate by coordinate

This guide is the counterpart of `FreeForm` for models such as the autoencoders. It starts at a draw
of another guide and is fitted to the given images. It needs no network that was trained on such
images, which is useful where pixels are missing.
"""

from __future__ import annotations

import contextlib

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.nn import PyroModule
from torch import Tensor, nn
from torch.distributions import constraints

from capsule_zoo.guides.base import Guide
from capsule_zoo.guides.free_form import repeats_of
from capsule_zoo.models.base import Model, Site
from capsule_zoo.models.modes import in_eval_mode

_INITIAL_SCALE = 0.1


class FreeFormNormal(Guide):
    """The guide with a mean and deviation for every image and coordinate of the latents.

    Args:
        model: the model.
        images: (B, C, H, W), the images whose posterior this is.
        init: the guide to start from, whose draws become the means.

    Raises:
        ValueError: a latent site is discrete or bounded, or the model does not take the images.
    """

    model_class = Model
    per_image = True  # its parameters belong to these images, in this order

    def __init__(self, model: Model, images: Tensor, init: Guide) -> None:
        super().__init__(model)
        with torch.no_grad(), poutine.block(), in_eval_mode(init):
            drawn = poutine.trace(init).get_trace(images).nodes
        self.num_images = len(images)
        self.means = PyroModule[nn.ParameterDict]()
        self.log_scales = PyroModule[nn.ParameterDict]()
        discrete = {site.name for site in model.latent_sites if site.discrete}
        for name in self.covers:
            if name in discrete or not _is_real(drawn[name]["fn"].support):
                raise ValueError(
                    f"site {name!r} of {type(model).__name__} is discrete or bounded, and no "
                    "normal law fits it; use the guide as it is, with more draws"
                )
            mean = drawn[name]["value"]
            self.means[name] = nn.Parameter(mean.clone())
            self.log_scales[name] = nn.Parameter(torch.full_like(mean, _INITIAL_SCALE).log())

    def forward(self, images: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Draw every site and return the values by name.

        `images` may be the guide's own images several times over, as evaluation passes them.
        """
        repeats = repeats_of(self, images)
        sizes = {"images": len(images)}
        for site in self.model.latent_sites:
            dims = {name: self.model.plate_dims[name] for name in site.plates if name != "images"}
            batch = self.means[site.name].shape[: self.means[site.name].dim() - site.event_dim]
            sizes |= {name: batch[dim] for name, dim in dims.items()}
        plates = {
            name: pyro.plate(name, size, dim=self.model.plate_dims[name])
            for name, size in sizes.items()
        }
        return {
            site.name: self._draw(site, repeats, [plates[name] for name in site.plates])
            for site in self.model.latent_sites
        }

    def _draw(self, site: Site, repeats: int, plates: list[pyro.plate]) -> Tensor:
        mean, scale = self.means[site.name], self.log_scales[site.name].exp()
        copies = [repeats] + [1] * (mean.dim() - 1)
        law = dist.Normal(mean.repeat(copies), scale.repeat(copies)).to_event(site.event_dim)
        with contextlib.ExitStack() as stack:
            for plate in plates:
                stack.enter_context(plate)
            return pyro.sample(site.name, law)


def _is_real(support: constraints.Constraint) -> bool:
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    return support is constraints.real
