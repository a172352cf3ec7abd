"""Slot attention: S slots compete for the cells of an image, and each attends to one object.

    f      = a convolutional network's features, with their positions       # (cells, channels)
    slot_s ~ Normal(mean, spread), the same for all slots                   # (S, width)
    three times:
    weight = softmax over slots of (key(f) . query(slot_s)) / sqrt(width)   # (cells, S)
    slot_s = GRU(mean of value(f), weighted by weight_s; slot_s), and a residual network
    look   : size, x, y, .. ~ Normal distributions, linear in slot_s, about the middle of what the
             slot attends to and the ground does not explain
    read   : the object model's guide encodes the window of that pose in the image

Slots differ in their first noise alone: permuting it permutes the proposals. Presences are summed
out; see `guides.scenes.proposals`. In the paper every slot paints the whole canvas, and a mask;
positions relative to a slot's center are from Biza et al.

References:
    Locatello, Weissenborn, Unterthiner, Mahendran, Heigold, Uszkoreit, Dosovitskiy & Kipf 2020,
    "Object-Centric Learning with Slot Attention" (arXiv 2006.15055), algorithm 1. Biza et al. 2023,
    "Invariant Slot Attention" (arXiv 2302.04973).
"""

import math

import torch
from pyro.nn import PyroModule, pyro_method
from torch import Tensor, nn
from torch.nn import functional as F

from capsule_zoo.guides.base import Guide
from capsule_zoo.guides.scenes.proposals import SceneProposals
from capsule_zoo.guides.scenes.windows import WindowReader, pose_head
from capsule_zoo.models.checks import check_at_least
from capsule_zoo.models.scenes import Scenes

_LEAST = 1e-8  # smallest weight of a slot at a cell, which keeps weighted means finite


class SlotAttention(WindowReader):
    """The guide by slot attention, in which slots compete for the cells of the image.

    Args:
        model, reader, ground_reader: see `WindowReader`.
        channels: maps of the convolutions; the last one has a fourth of the rows and columns.
        width: units of a slot.
        iterations: rounds of attention.

    Raises:
        ValueError: a size below 1.
    """

    def __init__(
        self,
        model: Scenes,
        reader: Guide,
        *,
        channels: int = 32,
        width: int = 64,
        iterations: int = 3,
        ground_reader: Guide | None = None,
    ) -> None:
        super().__init__(model, reader, ground_reader)
        check_at_least(1, channels=channels, width=width, iterations=iterations)
        self.width, self.iterations = width, iterations
        linear, norm = PyroModule[nn.Linear], PyroModule[nn.LayerNorm]
        layers = []
        for inputs, stride in ((model.image_shape[0], 2), (channels, 2), (channels, 1)):
            layers += [PyroModule[nn.Conv2d](inputs, channels, 5, stride, 2), PyroModule[nn.ReLU]()]
        self.features = PyroModule[nn.Sequential](*layers)
        self.place = linear(4, channels)
        self.inputs = self._perceptron(channels, width, norm(width))
        self.key, self.value = (linear(width, width, bias=False) for _ in range(2))
        self.query = PyroModule[nn.Sequential](norm(width), linear(width, width, bias=False))
        self.update = PyroModule[nn.GRUCell](width, width)
        self.refine = self._perceptron(width, width)
        self.mean = nn.Parameter(0.1 * torch.randn(width))
        self.spread = nn.Parameter(torch.zeros(width))  # log standard deviation
        self.where = pose_head(width, sum(self.numbers))

    def _perceptron(self, inputs: int, outputs: int, *last: nn.Module) -> nn.Module:
        """Return a perceptron with normalized inputs and as many hidden units as outputs."""
        linear = PyroModule[nn.Linear]
        first = PyroModule[nn.LayerNorm](inputs), linear(inputs, outputs), PyroModule[nn.ReLU]()
        return PyroModule[nn.Sequential](*first, linear(outputs, outputs), *last)

    @pyro_method
    def attend(self, images: Tensor, left: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return the slots (B, S, width) and the center of each slot's attention, (B, S, 2).

        Args:
            left: fraction of each pixel that the ground leaves unexplained, (B, 1, H, W).
            noise: a standard normal draw, (B, S, width).
        """
        maps = self.features(images)
        grid = F.affine_grid(
            maps.new_ones(3).diag()[None, :2], [1, 1, *maps.shape[-2:]], align_corners=False
        )
        places = grid.reshape(-1, 2).to(images)  # x and y of the centers of cells
        sides = torch.cat([1 + places, 1 - places], -1) / 2
        features = self.inputs(maps.flatten(2).mT + self.place(sides))  # (B, cells, width)
        key, value = self.key(features) / math.sqrt(self.width), self.value(features)
        slots = self.mean + self.spread.exp() * noise
        for _ in range(self.iterations):
            fraction = (key @ self.query(slots).mT).softmax(-1) + _LEAST  # (B, cells, S)
            slot_values = (fraction / fraction.sum(1, keepdim=True)).mT @ value
            slots = self.update(slot_values.flatten(0, 1), slots.flatten(0, 1)).view_as(slots)
            slots = slots + self.refine(slots)
        ink = fraction * (F.adaptive_avg_pool2d(left, maps.shape[-2:]).flatten(2).mT + _LEAST)
        return slots, (ink / ink.sum(1, keepdim=True)).mT @ places

    @pyro_method
    def draw_proposals(self, images: Tensor) -> SceneProposals:
        """Sample proposals of an object for every slot of images (B, C, H, W)."""
        model = self.model
        noise = torch.randn_like(images.new_empty(len(images), model.slots, self.width))
        ground = self.backdrop(images)
        left = self.measure_residual(images, ground.drawn)
        slots, middles = self.attend(self.whole(images), left, noise)
        about = F.pad(middles, (1, model.pose_size - 3))  # log size 0, x, y, angle 0
        plate = self.plate(images)
        looks = zip(about.unbind(1), self.where(slots).unbind(1), strict=True)
        proposals = [
            self.propose(s, self.read, plate, images, left, *x) for s, x in enumerate(looks)
        ]
        return SceneProposals(proposals, ground)
