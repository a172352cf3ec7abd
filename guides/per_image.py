"""The base of guides that have parameters of their own for every image, in place of a network."""

from __future__ import annotations

from typing import Self

from pyro.nn import PyroModule
from torch import Tensor, nn

from capsule_zoo.guides.base import Guide
from capsule_zoo.models.base import Model

_KINDS = ("logits", "locs", "log_scales", "factors")


class PerImageGuide(Guide[Model]):
    """A guide to the images that it was made for, in their order.

    `images` in a call may be these images several times over, as evaluation passes them.

    Args:
        model: the model.
        images: (B, C, H, W).

    Attributes:
        logits, locs, log_scales, factors: parameters by site, (B, ...).
        differentiable: True if gradients pass through the draws of all sites; they do unless one is
            discrete.
    """

    per_image = True
    differentiable: bool

    def __init__(self, model: Model, images: Tensor) -> None:
        super().__init__(model)
        self.num_images = len(images)
        self.logits = PyroModule[nn.ParameterDict]()
        self.locs = PyroModule[nn.ParameterDict]()
        self.log_scales = PyroModule[nn.ParameterDict]()
        self.factors = PyroModule[nn.ParameterDict]()

    def select(self, index: Tensor) -> Self:
        """Return the guide to `images[index]`, with copies of the parameters of these images."""
        chosen = self.sharing_parameters(num_images=len(index))
        chosen._modules = dict(self._modules)
        for kind in _KINDS:
            tensors = getattr(self, kind).items()
            chosen._modules[kind] = PyroModule[nn.ParameterDict](
                {name: nn.Parameter(tensor.detach()[index]) for name, tensor in tensors}
            )
        chosen._rename()
        return chosen

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
