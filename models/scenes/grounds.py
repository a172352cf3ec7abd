"""Grounds (backgrounds) of scenes, and a model of smooth colors."""

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor
from torch.nn import functional as F

from capsule_zoo.models.base import Model, Site
from capsule_zoo.models.common.spaces import ImageSpace

GROUNDS = ("black", "learned", "learned-picture", "color", "picture")
GRIDS = {"color": 1, "picture": 10}  # rows and columns of a ground that differs between scenes
SPREAD = 1.5  # standard deviation of the logits of a color


class Tones(Model):
    """The model of a ground with a grid of colors and smooth transitions.

        logits ~ Normal(0, 1.5)                 # (B, C grid^2)
        image  ~ Normal(sigmoid(logits), enlarged to the canvas, 0.3)

    Args:
        image_shape: (channels, height, width).
        grid: rows and columns.
        plate_dims: dims of the scene's plates.
    """

    sites = (Site("tones", ("images",), 1),)
    origin: Tensor

    def __init__(
        self, image_shape: tuple[int, int, int], grid: int, plate_dims: dict[str, int]
    ) -> None:
        super().__init__()
        self.space, self.grid, self.plate_dims = ImageSpace(image_shape), grid, plate_dims
        self.register_buffer("origin", torch.zeros(image_shape[0] * grid**2), persistent=False)

    def forward(
        self, images: Tensor | None = None, labels: Tensor | None = None, batch_size: int = 1
    ) -> Tensor:
        number = batch_size if images is None else len(images)
        with pyro.plate("images", number, dim=self.plate_dims["images"]):
            logits = pyro.sample("tones", dist.Normal(self.origin, SPREAD).to_event(1))
            colors = logits.sigmoid().unflatten(-1, (-1, self.grid, self.grid))
            mean = enlarge_pictures(colors, self.image_shape[1:])
            return self.sample_image(dist.Normal(mean, 0.3).to_event(3), images)


def enlarge_pictures(pictures: Tensor, size: tuple[int, int]) -> Tensor:
    """Enlarge pictures (*batch, C, h, w) smoothly to a size, (*batch, C, H, W)."""
    if pictures.shape[-2:] == size:
        return pictures
    if pictures.shape[-2:] == (1, 1):
        return pictures.expand(*pictures.shape[:-2], *size)
    flat = F.interpolate(pictures.flatten(0, -4), size, mode="bilinear")
    return flat.unflatten(0, pictures.shape[:-3])
