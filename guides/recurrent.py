"""The guide to recurrent capsules: from image and drawing it samples the code of the next step.

    for t = 1 .. T:
        error = image - sigmoid(c_{t-1})                     # the missing part
        seen = capsules(image, error)                        # capsules="every"
             | capsules(image), read(image, error)           # "once", the capsules before the loop
             | read(image, error)                            # "none": plain DRAW
        e_t, r_t = cell(seen, h_{t-1}, e_{t-1}, r_{t-1})     # h: of the drawing
        z_t ~ Normal(mean, scale),    (mean, log_scale) = linear(e_t)
        drawing = model.step(drawing, z_t)

The canvas belongs to the model, which reuses the guide's drawing. `read` looks through a window
of attention that h_{t-1} places, or at the whole image.

References:
    Sastry, "Recurrent Capsule Network for Image Generation"; to look once is ours.
    Gregor et al. 2015, "DRAW" (arXiv 1502.04623), equations 3 to 6 and 27.
"""

import math

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.nn import PyroModule
from torch import Tensor, nn
from torch.distributions import kl_divergence

from capsule_zoo.guides.base import Guide
from capsule_zoo.models.common.modes import eval_mode
from capsule_zoo.models.common.sharing import share
from capsule_zoo.models.networks.attention_window import Aim
from capsule_zoo.models.networks.layers import CoupledLSTM
from capsule_zoo.models.networks.leading import join_broadcast
from capsule_zoo.models.recurrent_capsules import (
    Drawing,
    Drawn,
    OverlappingCapsules,
    RecurrentCapsules,
    flat,
)
from capsule_zoo.models.routing.vector_capsules import CLASS


class RecurrentEncoder(Guide[RecurrentCapsules]):
    """A recurrent encoder: the guide q(z_1, ..., z_T | image) of `RecurrentCapsules`.

    It is described at the top of this file.

    Raises:
        ValueError: `model` is not a recurrent capsule network.
    """

    def __init__(self, model: RecurrentCapsules) -> None:
        super().__init__(model)
        colors, height, width = model.image_shape
        inputs = 0 if model.capsules == "none" else model.num_classes * CLASS
        self.aim: Aim | None = None
        if model.capsules != "every":
            patch = height, width
            if model.window_size is not None:
                patch = (model.window_size,) * 2
                self.aim = Aim(model.units, model.window_size, (height, width))
            inputs += 2 * colors * math.prod(patch)
        self.cell = CoupledLSTM(inputs + model.units, model.units)
        self.code = PyroModule[nn.Linear](model.units, 2 * model.latent)

    def forward(
        self, images: Tensor, labels: Tensor | None = None, attend: Tensor | None = None
    ) -> list[Drawing]:
        """Sample every code and return the drawing after each step.

        Args:
            labels: not used.
            attend: factors (B, classes) of the class capsules that see the image; zeros mask
                capsules.
        """
        return self.drawings(images, self.model.network_inputs(images), attend)

    def drawings(self, originals: Tensor, images: Tensor, attend: Tensor | None) -> list[Drawing]:
        """Return the drawings of `forward`; the networks see `images`."""
        model = self.model
        drawings: list[Drawing] = [model.begin(len(images))]
        codes: list[Tensor] = []
        hidden = cell = drawings[0].hidden
        vectors = None if model.capsules == "none" else model.look(images, drawings[0])
        length = None if vectors is None else vectors.norm(dim=-1)
        with pyro.plate("images", len(images), dim=-1):
            for name in self.covers:
                drawing, glimpses = drawings[-1], []
                if model.capsules == "every" and codes:
                    vectors = model.look(images, drawing)
                if vectors is not None:
                    glimpses.append(
                        flat(vectors if attend is None else attend[..., None] * vectors)
                    )
                if model.capsules != "every":
                    glimpses.append(self.read(images, drawing))
                hidden, cell = self.cell(
                    join_broadcast([*glimpses, drawing.hidden], -1), hidden, cell
                )
                mean, log_scale = self.code(hidden).chunk(2, dim=-1)
                distribution = dist.Normal(mean, log_scale.exp()).to_event(1)
                codes.append(pyro.sample(name, distribution))
                drawings.append(model.step(drawing, model.plan(codes[-1])))
        drawn = Drawn(drawings[-1], originals, length)
        share(drawn, [*codes, *model.parameters()])
        return drawings[1:]

    def read(self, images: Tensor, drawing: Drawing) -> Tensor:
        """Return the inputs of the cell: image and error, through the window if there is one."""
        pair = join_broadcast([images, images - drawing.mean], -3)
        if self.aim is not None:
            pair = self.aim(drawing.hidden).read(pair)
        return pair.flatten(-3)

    @torch.no_grad()
    def divergences(self, images: Tensor) -> Tensor:
        """Compute KL(q(z_t | z_1 .. z_{t-1}, image) | p(z_t)) of each step, in nats, (T, B)."""
        nodes = poutine.trace(self).get_trace(images).nodes
        distributions = [nodes[name]["fn"] for name in self.covers]
        standard = dist.Normal(torch.zeros_like(distributions[0].mean), 1.0).to_event(1)
        return torch.stack(
            [kl_divergence(distribution, standard) for distribution in distributions]
        )


class OverlappingEncoder(RecurrentEncoder):
    """The guide q(z_1, ..., z_T | image over the one before it) of `OverlappingCapsules`.

    It sees the overlay, and only the capsule of the image's label sees it too, if there is a label.

    Raises:
        ValueError: `model` is not `OverlappingCapsules`.
    """

    model_class = OverlappingCapsules

    def forward(
        self, images: Tensor, labels: Tensor | None = None, attend: Tensor | None = None
    ) -> list[Drawing]:
        if labels is not None:
            attend = self.model.one_hot(labels)
        return super().forward(images, attend=attend)

    @torch.no_grad()
    def take_out(self, pairs: Tensor, labels: Tensor) -> Tensor:
        """Return the mean image of the digits of classes (B,) in overlapping pairs (B, C, H, W)."""
        attend = self.model.one_hot(labels)
        with eval_mode(self):
            return self.drawings(pairs, pairs, attend)[-1].mean
