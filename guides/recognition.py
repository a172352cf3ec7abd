"""The recognition half of the capsule Helmholtz machine: its mirror image, from the image upward.

    m_k = W_k x + e_k,  d = Omega x                                 # layer 1; above, x is u_{l-1}
    z_1k ~ Bernoulli(c_k + d_k + sum_j [B(b_kj + m_kj) - B(b_kj)])
    h_1k ~ family(b_k + z_1k m_k)                                   # and so on to the top

b are the generative biases. In the true posterior the units of a capsule that is off follow their
base law, because they affect nothing. They do so here too.

References:
    Li & Zhu 2019, "Capsule Generative Models" (ICANN).
"""

from __future__ import annotations

import math

import pyro
import torch
from pyro.nn import PyroModule
from torch import Tensor, nn

from capsule_zoo.guides.base import Guide
from capsule_zoo.models.blocks.exponential_family import Units
from capsule_zoo.models.blocks.switched_units import (
    CapsuleLaw,
    CapsuleState,
    Fields,
    capsule_law,
    draw_capsules,
)
from capsule_zoo.models.capsule_helmholtz import CapsuleHelmholtzMachine, Coupling


class RecognitionLayer(PyroModule):
    """A layer of the mirror image: the coupling to the layer below, and the biases e and c."""

    def __init__(self, inputs: int, gates: int, capsules: int, units: int) -> None:
        super().__init__()
        self.coupling = Coupling(inputs, gates, capsules, units)
        self.hidden_bias = nn.Parameter(torch.zeros(capsules, units))  # e
        self.switch_bias = nn.Parameter(torch.zeros(capsules))  # c

    def forward(self, inputs: Tensor, gates: Tensor, units: Units) -> CapsuleLaw:
        """Return q(z, h | layer below); `units` are the units of the generative layer."""
        fields = self.coupling(inputs, gates)
        fields = Fields(fields.hidden + self.hidden_bias, fields.switch)
        return capsule_law(units, self.switch_bias, fields)


class RecognitionMachine(Guide[CapsuleHelmholtzMachine]):
    """The recognition guide of a `CapsuleHelmholtzMachine`, described at the top of this file.

    Raises:
        ValueError: `model` is not a capsule Helmholtz machine.
    """

    def __init__(self, model: CapsuleHelmholtzMachine) -> None:
        super().__init__(model)
        inputs = gates = math.prod(model.image_shape)
        layers = []
        for layer in reversed(model.layers):
            capsules, units = layer.hidden.bias.shape
            layers.append(RecognitionLayer(inputs, gates, capsules, units))
            inputs, gates = capsules * units, capsules
        self.layers = PyroModule[nn.ModuleList](layers)  # from the image upward

    def forward(self, images: Tensor, labels: Tensor | None = None) -> None:
        inputs = gates = images.flatten(1)
        names, generative = self.model.layer_names, self.model.layers
        with pyro.plate("images", len(images), dim=-2):
            for i, layer in enumerate(self.layers, start=1):
                law = layer(inputs, gates, generative[-i].hidden)
                state = draw_capsules(names[-i], law)
                gates, inputs = state.switch, state.activity.flatten(-2)

    def posterior(self, images: Tensor) -> CapsuleLaw:
        """Return q(z_1, h_1 | x) of the lowest layer."""
        pixels = images.flatten(1)
        return self.layers[0](pixels, pixels, self.model.layers[-1].hidden)

    def expectations(self, images: Tensor) -> CapsuleState:
        """Compute E_q[z_1 | x] and E_q[z_1 h_1 | x] of the lowest layer for images (B, C, H, W)."""
        return self.posterior(images).mean()

    @torch.no_grad()
    def gibbs(self, images: Tensor, steps: int = 1) -> Tensor:
        """Alternate recognition of all layers and generation from the top one, (B, C, H, W).

        It is Gibbs sampling to the extent that recognition equals the posterior.
        """
        for _ in range(steps):
            recognized = pyro.poutine.trace(self).get_trace(images)
            for name in set(recognized.nodes) - set(self.model.top_sites):
                recognized.remove_node(name)
            images = pyro.poutine.replay(self.model, trace=recognized)(batch_size=len(images))
        return images
