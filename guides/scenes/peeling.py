"""Peeling: look where most is unexplained, encode an object there, remove it, look again.

For s = 1 .. S, with r what the slots so far leave unexplained:

    focus  = the largest pixel of r, blurred by a Gaussian of about the size of an object; or a
             pixel that is drawn, likelier where more is unexplained, so that draws differ more
    look   : log size, x and y (and angle, color, depth) ~ Normal distributions about the focus, by
             a small network on a glimpse of r and of the image
    read   : the object model's guide encodes the window of that pose, in r (and in the image)
    paint  : the object model paints the encoded object, and r is computed anew

Where objects have one color each, only pixels of the color of the focus count: r is multiplied by
exp(-|image - color|^2 / 2 .15^2), so that a window holds one object though others touch it.

No order is learned and no state is carried along: attention is routed by what is left to explain.
Every slot then holds a proposal, and the presences are summed out; see `guides.scenes.proposals`.

A second sweep looks at every object again, at what all the others leave.

References:
    Eslami et al. 2016, "Attend, Infer, Repeat" (arXiv 1603.08575), whose guide is a recurrent
    network with score-function gradients. Burgess et al. 2019, "MONet" (arXiv 1901.11390), whose
    attention also masks what is left to explain.
"""

import math
from typing import Any

import pyro
import torch
from pyro.distributions.torch_distribution import TorchDistributionMixin
from pyro.nn import PyroModule, pyro_method
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn

from capsule_zoo.data.progress import track
from capsule_zoo.guides.base import Guide
from capsule_zoo.guides.scenes.proposals import Proposal, SceneProposals
from capsule_zoo.guides.scenes.windows import WindowReader, pose_head
from capsule_zoo.models.checks import check_at_least, check_positive
from capsule_zoo.models.networks.layers import ELU
from capsule_zoo.models.scenes import Scenes
from capsule_zoo.models.scenes.pictures import crop, together

ALIKE = 0.15  # standard deviation of the similarity of colors, in units of their range


class AtMean(Messenger):
    """The context in which sites have the means of their distributions as values."""

    def _pyro_sample(self, msg: Any) -> None:
        if isinstance(msg["fn"], TorchDistributionMixin) and msg["value"] is None:
            msg["value"], msg["done"] = msg["fn"].mean, True


def blur_maps(maps: Tensor, scale: float) -> Tensor:
    """Blur maps (B, 1, H, W) by a Gaussian, standard deviation in pixels; nothing lies outside."""
    height, width = (_gaussian(size, scale, maps) for size in maps.shape[-2:])
    return height @ maps @ width


def _gaussian(size: int, scale: float, like: Tensor) -> Tensor:
    """Return the Gaussian weights of all pairs of pixels along an axis, (size, size)."""
    place = torch.arange(size, dtype=like.dtype, device=like.device) / scale
    return (-0.5 * (place - place[:, None]).square()).exp()


def focus(maps: Tensor, temperature: float = 0.0) -> Tensor:
    """Return x and y, in half canvases, of one pixel of maps (B, 1, H, W), not negative; (B, 2).

    Args:
        temperature: 0 for the largest pixel; else one is drawn, by weights maps^(1 / temperature).
    """
    height, width = maps.shape[-2:]
    index = maps.flatten(1).argmax(1)
    if temperature:
        logits = maps.flatten(1).clamp_min(1e-12).log() / temperature
        index = torch.distributions.Categorical(logits=logits).sample()
    row, column = index // width, index % width
    return torch.stack([(2 * column + 1) / width - 1, (2 * row + 1) / height - 1], -1).to(maps)


def alike(images: Tensor, color: Tensor) -> Tensor:
    """Return how similar each pixel of images (B, C, H, W) is to a color (B, C), (B, 1, H, W)."""
    difference = (images - color[..., None, None]) / ALIKE
    return (-0.5 * difference.square().sum(1, keepdim=True)).exp()


def color_at(images: Tensor, maps: Tensor) -> Tensor:
    """Return the color (B, C) of images (B, C, H, W) where maps (B, 1, H, W) are largest."""
    index = maps.flatten(2).argmax(-1, keepdim=True).expand(-1, images.shape[1], -1)
    return images.flatten(2).gather(2, index)[..., 0]


class Peeling(WindowReader):
    """The guide that peels objects off a scene, described at the top of this file.

    Args:
        model, reader, ground_reader: see `WindowReader`.
        glimpse: height and width of a glimpse, in its own pixels.
        hidden: units of the network that looks.
        wide: size of a glimpse, relative to the default size of an object.
        blur: standard deviation of the blur of attention, relative to the default size.
        sweeps: 2 to look at and read every object again, given all the others.
        temperature: randomness of the positions of attention; 0 for the largest residual. Random
            positions are worth it where objects can be cut apart in several ways, and several draws
            are combined.

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
        temperature: float = 0.0,
        ground_reader: Guide | None = None,
    ) -> None:
        super().__init__(model, reader, ground_reader)
        check_at_least(1, glimpse=glimpse, hidden=hidden, sweeps=sweeps)
        check_positive(wide=wide, blur=blur)
        check_at_least(0, temperature=temperature)
        self.glimpse, self.wide, self.blur, self.sweeps = glimpse, wide, blur, sweeps
        self.temperature = temperature
        layers = [PyroModule[nn.Flatten]()]
        for inputs in ((1 + model.image_shape[0]) * glimpse**2, hidden):
            layers += [PyroModule[nn.Linear](inputs, hidden), ELU()]
        self.look = PyroModule[nn.Sequential](*layers)
        self.where = pose_head(hidden, sum(self.numbers))

    @pyro_method
    def draw_proposals(self, images: Tensor) -> SceneProposals:
        """Sample proposals of an object for every slot of images (B, C, H, W)."""
        ground = self.backdrop(images)
        proposals = self._peel_slots(images, ground)
        for _ in range(self.sweeps - 1 if self.auxiliary else 0):  # a site can be sampled only once
            proposals = self._again(images, ground, proposals)
        return SceneProposals(proposals, ground)

    def _peel_slots(self, images: Tensor, ground: Proposal) -> list[Proposal]:
        """Propose objects slot by slot, each where the earlier ones leave most unexplained."""
        proposals: list[Proposal] = []
        sums: list[Tensor] = []
        whole, plate = self.whole(images), self.plate(images)
        scale = max(1.0, self.model.size * self.blur)
        drawn = self.temperature if self.auxiliary else 0.0  # a site needs its density
        for slot in track(range(self.model.slots), "looking for objects", "slots"):
            canvas = ground.drawn.expand_as(images)
            if slot:  # add the last slot to the running sums of the picture
                with torch.no_grad():
                    last = self.model.layers(proposals[-1].placed)
                    sums = [a + b for a, b in zip(sums, last, strict=True)] if sums else last
                    canvas = self.model.mix_layers(sums, ground.drawn)[:, 0]
            left = self.measure_residual(images, canvas).detach()
            residual = blur_maps(left, scale)
            if self.model.is_tinted:
                left = left * alike(whole, color_at(whole, blur_maps(left, 1.0) * residual))
                residual = blur_maps(left, scale)
            about = images.new_zeros(len(images), self.model.pose_size)
            about[:, 1:3] = focus(residual, drawn)
            proposals.append(self.propose_at(slot, images, left, about, plate))
        return proposals

    def _again(self, images: Tensor, ground: Proposal, proposals: list[Proposal]) -> list[Proposal]:
        """Propose the object of every slot again, given the objects of all other slots."""
        proposals, plate = list(proposals), self.plate(images)
        with torch.no_grad():
            present = self.presence_distribution(images, SceneProposals(proposals, ground)).mean
        for number, proposal in enumerate(proposals):
            others = present.clone()
            others[:, number] = 0
            left = self.measure_residual(images, self._canvas(proposals, ground, others))
            if proposal.drawn.color is not None:
                left = left * alike(self.whole(images), proposal.drawn.color.detach().sigmoid())
            about = proposal.drawn.pose.detach()
            proposals[number] = self.propose_at(number, images, left, about, plate)
        return proposals

    def propose_at(
        self,
        slot: int,
        images: Tensor,
        left: Tensor,
        about: Tensor,
        plate: pyro.plate | None = None,
        draw: bool = True,
    ) -> Proposal:
        """Look at poses `about` (B, 3 or 4) of images, and propose the object of a slot there.

        Args:
            left: unexplained fraction of each pixel, (B, 1, H, W).
            draw: draw the sites; otherwise they have the means of their distributions.
        """
        looked, read = (
            self._look_at(images, left, about),
            self.read if draw else AtMean()(self.read),
        )
        return self.propose(slot, read, plate or self.plate(images), images, left, about, looked)

    @torch.no_grad()
    def _canvas(self, proposals: list[Proposal], ground: Proposal, presence: Tensor) -> Tensor:
        """Paint the proposals with presences (B, S), as images (B, C, H, W)."""
        pictures = together([p.placed for p in proposals])
        return self.model.blend(presence[:, None], pictures, ground.drawn)[:, 0]

    def _look_at(self, images: Tensor, left: Tensor, about: Tensor) -> Tensor:
        """Infer the parameters of an object's pose from a glimpse around `about`; see `read`."""
        around = torch.cat([about[:, :1] + math.log(self.wide), about[:, 1:]], -1)
        both, usual = torch.cat([left, self.whole(images)], 1), self.model.usual(images)
        return self.where(self.look(crop(both, around, (self.glimpse,) * 2, usual)))
