"""The recognition half of the capsule Helmholtz machine: its mirror image, from the image upward.

    m_k = W_k x + e_k,  d = Omega x                                 # layer 1; above, x is u_{l-1}
    z_1k ~ Bernoulli(c_k + d_k + sum_j [B(b_kj + m_kj) - B(b_kj)])
    h_1k ~ family(b_k + z_1k m_k)                                   # and so on to the top

b are the generative biases. In the true posterior the units of a capsule that is off follow their
base law, because they affect nothing. They do so here too.

The posterior of Gaussian units becomes narrower as the pixels become more precise. So the precision
of a unit of a capsule that is on is e^r times the precision p of its base law. The number r is
learned, and tanh keeps e^r between 1/1000 and 1000:

    z_1k ~ Bernoulli(c_k + d_k + sum_j [B(b_kj + m_kj; e^r_kj p_kj) - B(b_kj; p_kj)])
    h_1kj ~ Normal((b_kj + m_kj) / (e^r_kj p_kj), variance 1 / (e^r_kj p_kj))    # if z_1k = 1

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
from capsule_zoo.models.blocks.exponential_family import GaussianUnits, Units
from capsule_zoo.models.blocks.switched_units import (
    CapsuleLaw,
    CapsuleState,
    Fields,
    capsule_law,
    draw_capsules,
)
from capsule_zoo.models.capsule_helmholtz import CapsuleHelmholtzMachine, Coupling

NARROWEST = math.log(1000)  # largest |r|


class RecognitionLayer(PyroModule):
    """A layer of the mirror image: the coupling to the layer below, and the biases e and c.

    Args:
        inputs, gates: arguments of `Coupling`.
        units: the units of the generative layer, (K, J). Gaussian ones get a precision, r.
    """

    def __init__(self, inputs: int, gates: int, units: Units) -> None:
        super().__init__()
        capsules, size = units.bias.shape
        self.coupling = Coupling(inputs, gates, capsules, size)
        self.hidden_bias = nn.Parameter(torch.zeros(capsules, size))  # e
        self.switch_bias = nn.Parameter(torch.zeros(capsules))  # c
        gaussian = isinstance(units, GaussianUnits)
        self.narrowing = nn.Parameter(torch.zeros(capsules, size)) if gaussian else None

    def forward(self, inputs: Tensor, gates: Tensor, units: Units) -> CapsuleLaw:
        """Return q(z, h | layer below); `units` are the units of the generative layer."""
        fields = self.coupling(inputs, gates)
        fields = Fields(fields.hidden + self.hidden_bias, fields.switch)
        if self.narrowing is None:
            return capsule_law(units, self.switch_bias, fields)
        narrowing = NARROWEST * (self.narrowing / NARROWEST).tanh()
        return capsule_law(units, self.switch_bias, fields, narrowing)


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
            layers.append(RecognitionLayer(inputs, gates, layer.hidden))
            inputs, gates = layer.hidden.bias.numel(), len(layer.hidden.bias)
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
