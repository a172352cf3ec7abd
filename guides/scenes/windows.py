"""The base class of guides to scenes that infer every slot's pose and encode its window.

    look   : m, v = a network's numbers for the slot
    w      ~ Normal(about + unit m, unit e^v)      # log size, x, y (and angle); likewise the color,
                                                   # about the window's mean color, and the depth
    read   : the object model's guide encodes the window of w

`unit` is the default size of an object for x and y, and 1 for all else.
"""

from typing import Self

import pyro
import pyro.distributions as dist
import torch
from pyro.nn import PyroModule
from pyro.poutine import Trace
from torch import Tensor, nn
from torch.nn import functional as F

from capsule_zoo.guides.base import Guide
from capsule_zoo.guides.scenes.proposals import Proposal, SceneGuide
from capsule_zoo.models.scenes import Scenes
from capsule_zoo.models.scenes.grounds import Tones, enlarge_pictures
from capsule_zoo.models.scenes.pictures import crop


def pose_head(inputs: int, numbers: int) -> nn.Linear:
    """Return a linear layer to `numbers` means near 0 and log standard deviations near -2."""
    head = PyroModule[nn.Linear](inputs, 2 * numbers)
    with torch.no_grad():
        head.weight.mul_(0.1)
        head.bias.copy_(torch.tensor([0.0, -2.0]).repeat_interleave(numbers))
    return head


def medians(images: Tensor, grid: int) -> Tensor:
    """Return the median colors of images (B, C, H, W) around the cells of a grid, (B, C grid^2).

    A neighborhood is three cells wide, so that a stroke covers less than half of it. Pixels that
    are NaN are left out.
    """
    if grid == 1:
        return images.flatten(2).nanmedian(-1).values
    cells = F.interpolate(images, (2 * grid, 2 * grid), mode="area")
    near = F.pad(cells, (2, 2, 2, 2), mode="replicate").unfold(2, 6, 2).unfold(3, 6, 2)
    return near.flatten(4).nanmedian(-1).values.flatten(1)


class MedianTones(Guide[Tones]):
    """The guide to `Tones`: normal distributions about the median colors of cells and neighbors."""

    def __init__(self, model: Tones) -> None:
        super().__init__(model)
        self.spread = nn.Parameter(torch.full_like(model.origin, -2.0))

    def forward(self, images: Tensor, labels: Tensor | None = None) -> None:
        """Sample the logits of the ground's colors of images (B, C, H, W)."""
        dim = self.model.plate_dims["images"]
        median = medians(images, self.model.grid).nan_to_num(0.5).clamp(0.01, 0.99).logit()
        mean = median.reshape(len(median), *(1,) * (-1 - dim), -1)
        with pyro.plate("images", len(images), dim=dim):
            pyro.sample("tones", dist.Normal(mean, self.spread.exp()).to_event(1))


class WindowReader(SceneGuide):
    """The base class of guides that infer a pose and encode its window; see `draw_proposals`.

    Args:
        model: the scenes.
        reader: a guide of the object model, `model.thing`. If it has `context` channels it sees
            the image too.
        ground_reader: a guide of the ground model, if there is one; for `Tones` it is made.

    Raises:
        ValueError: there is a ground model, and no guide that reads it.
    """

    def __init__(self, model: Scenes, reader: Guide, ground_reader: Guide | None = None) -> None:
        super().__init__(model)
        self.reader = reader
        if isinstance(model.ground, Tones):
            ground_reader = MedianTones(model.ground)
        if model.ground_model is not None and ground_reader is None:
            raise ValueError(
                f"the ground is a {type(model.ground).__name__}; give its guide as ground_reader"
            )
        self.ground_reader = ground_reader

    @property
    def numbers(self) -> tuple[int, int, int]:
        """The number of coordinates of an object's pose, color and depth that a look infers."""
        model = self.model
        return (
            model.pose_size,
            model.image_shape[0] if model.is_tinted else 0,
            int(model.has_colors),
        )

    def discretize(self) -> Self:
        """Return the guide for `model.discretize()`, with shared parameters."""
        ground = self.ground_reader and self.ground_reader.discretize()
        readers = dict(reader=self.reader.discretize(), ground_reader=ground)
        return self.on_model(self.model.discretize(), **readers)

    @property
    def residual_is_linear(self) -> bool:
        """True if `measure_residual` is the difference of pixels, and False if it is squared."""
        return self.model.image_shape[0] == 1 and self.model.ground == "black"

    def measure_residual(self, images: Tensor, canvas: Tensor) -> Tensor:
        """Return the fraction of each pixel that a canvas leaves unexplained, (B, 1, H, W)."""
        if self.fill is not None:
            images = torch.where(images.isnan(), canvas, images)
        if self.residual_is_linear:
            return (images - canvas).clamp(0, 1)
        return (4 * (images - canvas).square().sum(1, keepdim=True)).clamp(max=1)

    def backdrop(self, images: Tensor) -> Proposal:
        """Return the proposal for the ground; a ground shared by all scenes has no site."""
        if self.model.ground_model is None:
            ground = self.model.shared_ground()
            return Proposal(Trace(), ground, ground, images.new_zeros(len(images)))
        return self.propose(None, self._read_ground, self.plate(images), images)

    def _read_ground(self, images: Tensor, plate: pyro.plate) -> None:
        """Sample the sites of the ground, if it has any."""
        if self.ground_reader is not None and self.model.ground_model is not None:
            inputs = images if isinstance(self.model.ground, Tones) else self.whole(images)
            self.ground_reader.forward(
                enlarge_pictures(inputs, self.model.ground_model.image_shape[1:])
            )

    def read(
        self, images: Tensor, left: Tensor, about: Tensor, looked: Tensor, plate: pyro.plate
    ) -> None:
        """Sample the sites of one object of each scene: pose, color, depth and encoded window.

        Args:
            left: unexplained fraction of each pixel, (B, 1, H, W).
            about: poses, (B, 3 or 4).
            looked: means and log standard deviations, (B, 2 * sum of `numbers`).
        """
        model, images = self.model, self.whole(images)
        usual = model.usual(images)
        means, scales = looked.chunk(2, -1)
        means, scales = (x.split(self.numbers, -1) for x in (means, scales.exp()))
        unit = F.pad(usual, (1, model.pose_size - 3), value=1.0)

        def draw(name: str, mean: Tensor, scale: Tensor, event: int = 1) -> Tensor:
            distribution = dist.Normal(
                model.with_inner(mean, event), model.with_inner(scale, event)
            )
            return model.draw(name, distribution.to_event(event), plate)

        pose = draw("scene_pose", about + unit * means[0], unit * scales[0])
        if model.is_tinted:
            draw("scene_color", self._color_at(images, left, pose) + means[1], scales[1])
        if model.has_colors:
            draw("scene_depth", means[2][:, 0], scales[2][:, 0], event=0)
        source = left if model.thing.image_shape[0] == 1 else torch.cat([images, left], 1)
        if getattr(self.reader, "context", 0):
            source = torch.cat([source, images], 1)
        window = crop(source, pose, model.thing.image_shape[1:], usual).clamp(0, 1)
        self.reader.forward(window)  # a call would check pixels that are known to be valid

    def _color_at(self, images: Tensor, left: Tensor, pose: Tensor) -> Tensor:
        """Return logits of the mean color of a window's unexplained pixels, (B, C)."""
        size = self.model.thing.image_shape[1:]
        patch = crop(torch.cat([images, left], 1), pose, size, self.model.usual(pose))
        color, weight = patch[:, :-1].detach(), patch[:, -1:].detach() + 1e-4
        mean = (color * weight).sum((-2, -1)) / weight.sum((-2, -1))
        return mean.clamp(0.02, 0.98).logit()
