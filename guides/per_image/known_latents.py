"""The guide with a point mass at known values, such as refined ones or samples of MCMC.

    q(z | image n) = delta(z - values[n])

With this guide a function of pairs, such as `intervene`, begins at these values.
"""

from collections.abc import Mapping

import pyro.distributions as dist
from torch import Tensor

from capsule_zoo.data.tensors import accept_arrays
from capsule_zoo.guides.base import Guide
from capsule_zoo.guides.per_image.free_form import draw_sites
from capsule_zoo.models.base import Model


class KnownLatents(Guide[Model]):
    """The guide that sets the latent sites of a model to known values.

    Args:
        model: the model, in the form whose sites have these values: discrete, if presences are 0
            and 1.
        values: the values of every latent site by its name, (N, ...); not of sites that the model
            sums out.

    Raises:
        ValueError: a latent site has no value, or the guide is called with other than N images.
    """

    per_image = True  # the values belong to these images, in this order

    @accept_arrays("values", like="model")
    def __init__(self, model: Model, values: Mapping[str, Tensor]) -> None:
        super().__init__(model)
        names = [site.name for site in model.latent_sites]
        if missing := [name for name in names if name not in values]:
            raise ValueError(
                f"values lacks {', '.join(missing)}; give a value to each of the latent sites "
                f"{', '.join(names)}"
            )
        self.values = {name: values[name] for name in names}

    def discretize(self) -> "KnownLatents":
        """Return the guide for `model.discretize()`, with these values."""
        return KnownLatents(self.model.discretize(), self.values)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Return the values of every site by name."""
        number = len(next(iter(self.values.values())))
        if len(images) != number:
            raise ValueError(
                f"this guide has values for {number} images, not {len(images)}; make a new "
                f"{type(self).__name__} for other images"
            )
        distributions: dict[str, dist.TorchDistribution] = {
            site.name: dist.Delta(self.values[site.name], event_dim=site.event_dim)
            for site in self.model.latent_sites
        }
        return draw_sites(self.model, distributions)
