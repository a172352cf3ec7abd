"""Peeling: look where most is unexplained, read an object there, take it away, look again.

For s = 1 .. S, with r what the slots so far leave unexplained:

    focus  = the largest place of r, blurred by a Gaussian of about the size of an object
    look   : log size, x and y (and angle, color, depth) ~ Normal laws about the focus, by a small
             network on a glimpse of r and of the image
    read   : the object model's guide reads the window of that pose, in r (and in the image)
    paint  : the object model paints what was read, and r is computed anew

No order is learned and no state is carried along: attention is routed by what is left to explain.
Every slot then holds a proposal, and the presences are summed out; see `guides.scenes.proposals`.

A second sweep looks at every object again, at what all the others leave. Narrow slots, which start
anew with a sharper attention, propose the parts of what a wide look took for one object.

References:
    Eslami et al. 2016, "Attend, Infer, Repeat" (arXiv 1603.08575), whose guide is a recurrent
    network with score-function gradients. Burgess et al. 2019, "MONet" (arXiv 1901.11390), whose
    attention also masks what is left to explain.
"""

from __future__ import annotations

import math
from typing import Self

import pyro
import pyro.distributions as dist
import torch
from pyro.nn import PyroModule, pyro_method
from torch import Tensor, nn

from capsule_zoo.guides.base import Guide
from capsule_zoo.guides.scenes.proposals import Found, Proposal, SceneGuide
from capsule_zoo.models.checks import check_at_least, check_positive
from capsule_zoo.models.scenes import Scenes, crop, together


def blurred(maps: Tensor, deviation: float) -> Tensor:
    """Blur maps (B, 1, H, W) by a Gaussian, deviation in pixels; nothing lies outside."""
    rows, columns = (_gaussians(size, deviation, maps) for size in maps.shape[-2:])
    return rows @ maps @ columns


def _gaussians(size: int, deviation: float, like: Tensor) -> Tensor:
    """Return the matrix (size, size) of Gaussian weights of all pairs of pixels."""
    place = torch.arange(size).to(like)
    return (-0.5 * ((place - place[:, None]) / deviation).square()).exp()


def highest(maps: Tensor) -> Tensor:
    """Return the place of the largest pixel of maps (B, 1, H, W): x, y in half canvases, (B, 2)."""
    height, width = maps.shape[-2:]
    index = maps.flatten(1).argmax(1)
    row, column = index // width, index % width
    return torch.stack([(2 * column + 1) / width - 1, (2 * row + 1) / height - 1], -1).to(maps)


class Peeling(SceneGuide):
    """The guide that peels objects off a scene, described at the top of this file.

    Args:
        model: the scenes.
        reader: a guide of the object model, `model.thing`. If it has `context` channels it reads
            the image too.
        glimpse: height and width of a glimpse, in its own pixels.
        hidden: units of the network that looks.
        wide: size of a glimpse, in usual sizes of an object.
        blur: deviation of the blur through which attention sees, in usual sizes.
        sweeps: 2 to look at and read every object again, given all the others.

    Raises:
        ValueError: a size below 1, a length that is not positive.
    """

    def __init__(
        self,
        model: Scenes,
        reader: Guide,
        *,
        glimpse: int = 20,
        hidden: int = 200,
        wide: float = 1.4,
        blur: float = 0.23,
        sweeps: int = 1,
    ) -> None:
        super().__init__(model)
        check_at_least(1, glimpse=glimpse, hidden=hidden, sweeps=sweeps)
        check_positive(wide=wide, blur=blur)
        self.reader = reader
        self.glimpse, self.wide, self.blur, self.sweeps = glimpse, wide, blur, sweeps
        self.narrow: tuple[int, float] = (0, blur)
        layers = [PyroModule[nn.Flatten]()]
        for inputs in ((1 + model.image_shape[0]) * glimpse**2, hidden):
            layers += [PyroModule[nn.Linear](inputs, hidden), PyroModule[nn.ELU]()]
        self.look = PyroModule[nn.Sequential](*layers)
        numbers = sum(self._numbers)
        self.where = PyroModule[nn.Linear](hidden, 2 * numbers)
        with torch.no_grad():  # it starts at the focus, with small deviations
            self.where.weight.mul_(0.1)
            self.where.bias.copy_(torch.tensor([0.0, -2.0]).repeat_interleave(numbers))
        if model.toned:
            self.ground_spread = nn.Parameter(torch.full((model.image_shape[0],), -2.0))

    @property
    def _numbers(self) -> tuple[int, int, int]:
        """The numbers of an object's pose, color and depth that a look gives laws of."""
        model = self.model
        return model.pose_size, model.image_shape[0] if model.tinted else 0, int(model.colored)

    def with_narrow_slots(self, slots: int, blur: float = 0.125) -> Self:
        """Return the guide, with the same parameters, whose last `slots` slots look sharply.

        They start anew at the whole image. The guide is for a model with as many slots more, see
        `Scenes.with_slots`. It is meant for weights that were trained without them: objects that
        are learned through sharp looks are pieces.

        Args:
            blur: the same as `blur`, for these slots.
        """
        check_at_least(0, slots=slots)
        check_positive(blur=blur)
        model = self.model.with_slots(self.model.slots + slots)
        return self.sharing_parameters(_model=(model,), narrow=(slots, blur))

    def on_model(self, model: Scenes) -> Self:
        """Return the guide with the same parameters for `model.on_canvas(...)` or another form."""
        return self.sharing_parameters(_model=(model,))

    def discretized(self) -> Self:
        """Return a guide with the same parameters for the model's `discretized()`."""
        model = self.model.discretized()
        if model is self.model:
            return self
        return self.sharing_parameters(_model=(model,), reader=self.reader.discretized())

    def unexplained(self, images: Tensor, canvas: Tensor) -> Tensor:
        """Return how much of each pixel a canvas leaves unexplained, (B, 1, H, W), in [0, 1]."""
        if images.shape[1] == 1 and self.model.ground == "black":
            return (images - canvas).clamp(0, 1)
        return (4 * (images - canvas).square().sum(1, keepdim=True)).clamp(max=1)

    @pyro_method
    def found(self, images: Tensor) -> Found:
        """Draw proposals for all slots of images (B, C, H, W)."""
        model = self.model
        law = self._ground_law(images) if model.toned else None
        tone = None if law is None else law.rsample()
        ground = model.ground_of(tone, images)
        extra, narrow = self.narrow
        proposals = self._peeled(images, ground, model.slots - extra, self.blur)
        for _ in range(self.sweeps - 1):
            proposals = self._again(images, ground, proposals)
        proposals += self._peeled(images, ground, extra, narrow)
        return self.collected(images, proposals, ground, law, tone)

    def _ground_law(self, images: Tensor) -> dist.TorchDistribution:
        """Return the law of the ground's color, about the median pixel."""
        median = images.flatten(2).median(-1).values.clamp(0.01, 0.99).logit()
        return dist.Normal(median, self.ground_spread.exp()).to_event(1)

    def _peeled(self, images: Tensor, ground: Tensor, number: int, blur: float) -> list[Proposal]:
        """Return proposals for `number` slots, one after the other, at what the others leave."""
        proposals: list[Proposal] = []
        canvas = ground.expand_as(images)
        for _ in range(number):
            left = self.unexplained(images, canvas).detach()
            about = images.new_zeros(len(images), self.model.pose_size)
            about[:, 1:3] = highest(blurred(left, max(1.0, self.model.size * blur)))
            proposals.append(self.propose(self._read, images, left, about))
            canvas = self._canvas(proposals, ground, images.new_ones(len(images), len(proposals)))
        return proposals

    def _again(self, images: Tensor, ground: Tensor, proposals: list[Proposal]) -> list[Proposal]:
        """Return the proposals after each was looked at and read again given all the others."""
        proposals = list(proposals)
        with torch.no_grad():
            present = self.presence_law(images, self.collected(images, proposals, ground)).mean
        for number, proposal in enumerate(proposals):
            others = present.clone()
            others[:, number] = 0
            left = self.unexplained(images, self._canvas(proposals, ground, others))
            proposals[number] = self.propose(self._read, images, left, proposal.drawn.pose.detach())
        return proposals

    @torch.no_grad()
    def _canvas(self, proposals: list[Proposal], ground: Tensor, presence: Tensor) -> Tensor:
        """Return the picture of proposals, (B, C, H, W), with presences (B, S)."""
        pictures = together([p.placed for p in proposals])
        return self.model.blend(presence[:, None], pictures, ground)[:, 0]

    def _read(self, images: Tensor, left: Tensor, about: Tensor, plate: pyro.plate) -> None:
        """Draw an object of each scene from a look about a pose at what is left unexplained."""
        model = self.model
        usual = model.usual(images)
        around = torch.cat([about[:, :1] + math.log(self.wide), about[:, 1:]], -1)
        seen = crop(torch.cat([left, images], 1), around, (self.glimpse,) * 2, usual)
        means, deviations = self.where(self.look(seen)).chunk(2, -1)
        means, deviations = (x.split(self._numbers, -1) for x in (means, deviations.exp()))
        unit = torch.ones_like(about)
        unit[:, 1:3] = usual

        def draw(name: str, mean: Tensor, deviation: Tensor, event: int = 1) -> Tensor:
            law = dist.Normal(*(model.with_inner(x, event) for x in (mean, deviation)))
            return model.draw(name, law.to_event(event), plate)

        pose = draw("scene_pose", about + unit * means[0], unit * deviations[0])
        if model.tinted:
            draw("scene_color", self._color_at(images, left, pose) + means[1], deviations[1])
        if model.colored:
            draw("scene_depth", means[2][:, 0], deviations[2][:, 0], event=0)
        source = left if model.thing.image_shape[0] == 1 else torch.cat([images, left], 1)
        if getattr(self.reader, "context", 0):
            source = torch.cat([source, images], 1)
        window = crop(source, pose, model.thing.image_shape[1:], usual).clamp(0, 1)
        self.reader.forward(
            window
        )  # not called, which would check pixels that are known to be right

    def _color_at(self, images: Tensor, left: Tensor, pose: Tensor) -> Tensor:
        """Return logits of the mean color of what is left unexplained in a window, (B, C)."""
        seen = crop(torch.cat([images, left], 1), pose, (self.glimpse,) * 2, self.model.usual(pose))
        color, weight = seen[:, :-1].detach(), seen[:, -1:].detach() + 1e-4
        mean = (color * weight).sum((-2, -1)) / weight.sum((-2, -1))
        return mean.clamp(0.02, 0.98).logit()
