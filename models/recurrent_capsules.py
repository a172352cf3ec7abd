"""Recurrent capsule network: an image drawn in a few steps, each planned by capsules.

Story. Like DRAW, the model adds to a canvas step by step. Each addition is computed from class
capsules. A network unfolds a Gaussian code into maps, primary capsules on the maps vote, and the
routed capsules drive a recurrent state. The canvas is painted from that state, whole or through a
window of attention.

    c_0, h_0, s_0 = learned, 0, 0                   # canvas (B, C, H, W), twice (B, units)
    for t = 1 .. T:
        z_t ~ Normal(0, I)                          # (B, latent)
        v_t = capsules(network(z_t))                # (B, classes, 16); plain DRAW: v_t = z_t
        h_t, s_t = cell(v_t, h_{t-1}, s_{t-1})
        c_t = c_{t-1} + paint(h_t)                  # linear; written through window(h_t)
    image ~ Bernoulli(sigmoid(c_T))                 # or Normal(sigmoid(c_T), sigma_image)
    factor exp(-label_weight L(label, |capsules(image)|))       # where labels are given

The last line is the margin loss on capsules of another kind, which see an image. The guide uses
them to draw codes (`capsule_zoo.guides.RecurrentEncoder`), and the longest of them gives the class.
The last line is a factor, not a distribution of the label. With labels the loss is therefore not a
bound. Without labels it is a bound on log p(image).

The capsules that see an image either see the image alone, once (`capsules="once"`), or they see at
each step the image and the rest that the canvas still lacks, image - sigmoid(c_{t-1})
(`capsules="every"`, as in the paper). In the latter case the class is read at the first step,
before anything is drawn.

The guide runs the model's steps and capsules on its own draws. When the model is replayed on these
draws, it takes the drawing and the capsules' lengths from the guide
(`capsule_zoo.models.common.sharing`).

References:
    Sastry, "Recurrent Capsule Network for Image Generation". The text leaves open the number of
    steps, the size of the code, the aim of attention (its figure shows it) and the lengths that
    the margin loss is applied to. These are arguments here, except the last, which is explained
    above. Its squash keeps lengths under .5, so that the margin loss cannot reach its margin; here
    the squash is from Sabour et al. (2017).
    Gregor, Danihelka, Graves, Rezende & Wierstra 2015, "DRAW" (arXiv 1502.04623): section 2.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import torch
from pyro.nn import PyroModule, pyro_method
from torch import Tensor, nn

from capsule_zoo.data.registration import Settings
from capsule_zoo.models.base import Model, Site
from capsule_zoo.models.checks import check_at_least, check_one_of, check_positive
from capsule_zoo.models.common.sharing import find_value
from capsule_zoo.models.common.spaces import ImageSpace
from capsule_zoo.models.networks.attention_window import Aim, Window
from capsule_zoo.models.networks.convolutional import (
    LIKELIHOODS,
    ConvTranspose2d,
    pixel_distribution,
)
from capsule_zoo.models.networks.layers import ELU, CoupledLSTM
from capsule_zoo.models.networks.leading import ImagesOfClasses, PairsOfImages, join_broadcast
from capsule_zoo.models.routing.parent_distribution import Routing
from capsule_zoo.models.routing.vector_capsules import (
    CLASS,
    VectorCapsules,
    keep_scale,
    margin_loss,
)

KERNEL = 5  # kernel of the convolutions below the primary capsules
LEAST = 17  # least height and width, which the convolutions and primary capsules need


class Drawing(NamedTuple):
    """The state of a drawing after some steps.

    Attributes:
        canvas: logits of the mean pixels, (*batch, C, H, W).
        hidden, cell: state of the recurrent cell, (*batch, units).
    """

    canvas: Tensor
    hidden: Tensor
    cell: Tensor

    @property
    def mean(self) -> Tensor:
        """The mean pixels, (*batch, C, H, W)."""
        return self.canvas.sigmoid()


def flat(vectors: Tensor) -> Tensor:
    """Flatten class capsules (*batch, classes, 16), scaled to order one, for the next layer."""
    return CLASS**0.5 * vectors.flatten(-2)


class Drawn(NamedTuple):
    """The values that the guide shares with the model.

    Attributes:
        drawing: the drawing from the guide's codes, after all steps.
        images: the images that the guide was given.
        length: lengths of the class capsules on these images, (B, classes); None for plain DRAW.
    """

    drawing: Drawing
    images: Tensor
    length: Tensor | None


@dataclass(frozen=True)
class Canvas(Settings):
    """The settings of the canvas: how it is painted, and the likelihood of pixels.

    Args:
        attention: whether the model paints and the guide reads through a window of attention.
            Capsules that look at every step see the whole image.
        window: N, filters of the window along each axis.
        likelihood: "normal" or "bernoulli", as for the `VariationalAutoencoder`.
        sigma_image: standard deviation of a normal pixel.

    Raises:
        ValueError: a standard deviation that is not positive, or an unknown likelihood.
    """

    attention: bool = True
    window: int = 12
    likelihood: str = "bernoulli"
    sigma_image: float = 0.15

    def __post_init__(self) -> None:
        check_positive(sigma_image=self.sigma_image)
        check_one_of("likelihood", self.likelihood, LIKELIHOODS)


PAPER: dict[str, Any] = dict(  # the paper's settings; the defaults are for two cores
    capsules="every", channels=(256, 128), types=32, canvas=Canvas(attention=False)
)


class RecurrentCapsules(ImagesOfClasses, Model):
    """The recurrent capsule network, described at the top of this file.

    Args:
        image_shape: (channels, height, width).
        classes: capsules that are routed to, and labels.
        routing: infers the class capsules, such as `DynamicRouting(3, fair=False)` of
            `capsule_zoo.guides`. None replaces votes and routing by linear layers.
        steps: number of drawing steps, T.
        latent: numbers in a code.
        units: units of the recurrent cell.
        capsules: when capsules see the image: at "every" step, "once", or "none", which is plain
            DRAW and takes no labels.
        channels: maps of the convolution next to the image and of the one next to the capsules.
        types: number of types of primary capsules.
        canvas: settings of the canvas and of the likelihood of pixels.
        label_weight: nats for one unit of the margin loss.

    Raises:
        ValueError: a size out of range, an image under 17x17 pixels where there are capsules, an
            unknown choice.

    Called as `model(images=None, labels=None, batch_size=1)` it returns the image (B, C, H, W).
    """

    def __init__(
        self,
        image_shape: tuple[int, int, int] = (1, 28, 28),
        classes: int = 10,
        *,
        routing: Routing | None,
        steps: int = 10,
        latent: int = 100,
        units: int = 256,
        capsules: str = "once",
        channels: tuple[int, int] = (16, 16),
        types: int = 8,
        canvas: Canvas = Canvas(),
        label_weight: float = 1000.0,
    ) -> None:
        super().__init__()
        check_at_least(1, steps=steps, latent=latent, units=units, classes=classes)
        check_at_least(1, channels=channels, types=types)
        check_at_least(0, label_weight=label_weight)
        check_one_of("capsules", capsules, ("every", "once", "none"))
        self.space = ImageSpace(image_shape)
        self.num_classes = classes
        self.steps = steps
        self.latent = latent
        self.units = units
        self.capsules = capsules
        self.canvas = canvas
        self.label_weight = label_weight
        self.window_size = canvas.window if canvas.attention else None
        self.blank = nn.Parameter(torch.zeros(image_shape))  # c_0
        colors, height, width = image_shape
        inputs = latent
        if capsules != "none":
            check_at_least(LEAST, **{f"image_shape[{i}]": image_shape[i] for i in (1, 2)})
            capsules_of = types, classes, routing
            input_channels = colors if capsules == "once" else 2 * colors
            self.reader = VectorCapsules(
                image_network(input_channels, channels),
                channels[1],
                (height - 8, width - 8),
                *capsules_of,
            )
            self.writer = VectorCapsules(
                code_network(latent, channels), channels[0], (2 * KERNEL - 1,) * 2, *capsules_of
            )
            inputs = classes * CLASS
        self.cell = CoupledLSTM(inputs, units)
        square = (colors, canvas.window, canvas.window)
        self.patch_shape = square if canvas.attention else image_shape
        self.paint = PyroModule[nn.Linear](units, math.prod(self.patch_shape))
        nn.init.normal_(self.paint.weight, std=0.25)  # with less, codes fade before they are used
        if canvas.attention:
            self.aim = Aim(units, canvas.window, (height, width))

    @property
    def sites(self) -> tuple[Site, ...]:
        return tuple(Site(f"z_{t}", ("images",), event_dim=1) for t in range(1, self.steps + 1))

    def forward(
        self, images: Tensor | None = None, labels: Tensor | None = None, batch_size: int = 1
    ) -> Tensor:
        self.check_labels(labels)
        batch = batch_size if images is None else len(images)
        origin = self.blank.new_zeros(self.latent)
        with pyro.plate("images", batch, dim=-1):
            distribution = dist.Normal(origin, 1.0).to_event(1)
            codes = [pyro.sample(site.name, distribution) for site in self.sites]
            drawn = find_value([*codes, *self.parameters()])
            drawing = self.draw(codes) if drawn is None else drawn.drawing
            images = pyro.sample("image", self.image_distribution(drawing), obs=images)
            if labels is not None:
                is_current = drawn is not None and drawn.images is images
                length = drawn.length if is_current else self.classify(self.network_inputs(images))
                pyro.factor("label", -self.label_weight * margin_loss(length, self.present(labels)))
        return images

    @pyro_method
    def draw(self, codes: list[Tensor]) -> Drawing:
        """Decode the codes of all steps, (*batch, latent) each, to the final drawing."""
        codes = list(torch.broadcast_tensors(*codes))
        batch = codes[0].shape[-2]
        drawing = self.begin(batch)
        for plan in self.plan(torch.cat(codes, -2)).split(batch, -2):  # all capsules at once
            drawing = self.step(drawing, plan)
        return drawing

    @pyro_method
    def begin(self, batch: int) -> Drawing:
        """Return a batch of initial drawings."""
        state = self.blank.new_zeros(batch, self.units)
        return Drawing(self.blank.repeat(batch, 1, 1, 1), state, state)

    @pyro_method
    def plan(self, codes: Tensor) -> Tensor:
        """Compute the inputs (*batch, inputs) of the recurrent cell from codes (*batch, latent)."""
        return codes if self.capsules == "none" else flat(self.writer(codes[..., None, None]))

    @pyro_method
    def step(self, drawing: Drawing, plan: Tensor) -> Drawing:
        """Compute the next drawing from a plan, in the model and in the guide."""
        hidden, cell = self.cell(plan, drawing.hidden, drawing.cell)
        patch = self.paint(hidden).unflatten(-1, self.patch_shape)
        if self.window_size is not None:
            patch = self.aim(hidden).write(patch)
        return Drawing(drawing.canvas + patch, hidden, cell)

    def image_distribution(self, drawing: Drawing) -> dist.TorchDistribution:
        """Return p(image | drawing), as if the drawing ended at this step."""
        return pixel_distribution(drawing.canvas, self.canvas.likelihood, self.canvas.sigma_image)

    def window(self, drawing: Drawing) -> Window:
        """Return the window in which the last step painted."""
        return self.aim(drawing.hidden)

    @pyro_method
    def look(self, images: Tensor, drawing: Drawing) -> Tensor:
        """Compute the class capsules (*batch, classes, 16) from images and unfinished drawings."""
        if self.capsules == "every":
            images = join_broadcast([images, images - drawing.mean], -3)
        return self.reader(images)

    @pyro_method
    def classify(self, images: Tensor) -> Tensor:
        """Predict the presence (*batch, classes) of each class in images (*batch, C, H, W).

        The result is the length of the capsule of each class.
        """
        return self.look(images, self.begin(images.shape[-4])).norm(dim=-1)

    @pyro_method
    def predict(self, images: Tensor) -> Tensor:
        """Predict the classes (B,) of images (B, C, H, W), by the longest class capsules.

        Raises:
            ValueError: the model has no capsules.
        """
        if self.capsules == "none":
            raise ValueError(
                "without capsules a model tells no classes; build it with capsules='once', or fit "
                "a linear probe on what its guide infers: capsule_zoo.inference.probes.linear_probe"
            )
        return self.classify(images).argmax(-1)

    @torch.no_grad()
    def set_base_rates(self, images: Tensor) -> None:
        """Initialize the blank canvas to the mean of images (B, C, H, W)."""
        self.space.check(images)
        self.blank.copy_(images.mean(0).logit(eps=0.01))

    def check_labels(self, labels: Tensor | None) -> None:
        """Raise ValueError unless labels, if any, are (B,) classes and there are capsules."""
        super().check_labels(labels)
        if labels is not None and self.capsules == "none":
            raise ValueError(
                "labels need capsules, and this model has none; leave the labels out or build "
                "the model with capsules='once'"
            )


class OverlappingCapsules(PairsOfImages, RecurrentCapsules):
    """The recurrent capsule network for two overlapping images, which it fails to separate.

    The model draws each image, as `RecurrentCapsules` do. The margin loss asks for the classes of
    the image and of the one before it in the batch, whose overlay the capsules see. After three
    minutes of training every capsule draws the same blur (record recurrent-capsules/overlap).
    `OverlappingCapsuleNetwork` separates images.
    """


def image_network(colors: int, channels: tuple[int, int]) -> nn.Module:
    """Return two convolutions that each reduce height and width by 4 pixels."""
    layers = []
    for inputs, outputs in ((colors, channels[0]), channels):
        layers.append(PyroModule[nn.Conv2d](inputs, outputs, KERNEL))
        keep_scale(layers[-1], inputs * KERNEL**2)
    return _bent(layers)


def code_network(latent: int, channels: tuple[int, int]) -> nn.Module:
    """Return two transposed convolutions, from codes (B, latent, 1, 1) to maps of 9 x 9."""
    layers, side = [], 1
    for inputs, outputs in ((latent, channels[1]), (channels[1], channels[0])):
        layers.append(ConvTranspose2d(inputs, outputs, KERNEL))
        taps, side = (side * KERNEL / (side + KERNEL - 1)) ** 2, side + KERNEL - 1
        keep_scale(layers[-1], inputs * taps)
    return _bent(layers)


def _bent(layers: Sequence[nn.Module]) -> nn.Module:
    parts = [part for layer in layers for part in (layer, ELU())]
    return PyroModule[nn.Sequential](*parts)
