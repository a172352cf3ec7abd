"""The recognition network of the capsule Helmholtz machine, from the image upward.

    m_k = W_k (x - x_0) + e_k,  d = Omega (x - x_0)    # layer 1; above, u_{l-1} and z_{l-1}
    z_1k ~ Bernoulli(c_k + d_k + sum_j [B(b_kj + m_kj) - B(b_kj)])
    h_1k ~ family(b_k + z_1k m_k)                      # and so on to the top

b are the generative biases, and x_0 is the mean image when all capsules are off (0 unless
`centered`). The posterior of Gaussian capsules with Gaussian pixels depends on this difference, and
with other families learning is faster from it than from the image. In the true posterior the units
of a capsule that is off follow their base distribution, because they affect nothing. They do so
here too.

The posterior of Gaussian units becomes narrower as the pixels become more precise. So the precision
of a unit of a capsule that is on is e^r times the precision p of its base distribution. The number
r is learned, and tanh keeps e^r between 1/1000 and 1000:

    z_1k ~ Bernoulli(c_k + d_k + sum_j [B(b_kj + m_kj; e^r_kj p_kj) - B(b_kj; p_kj)])
    h_1kj ~ Normal((b_kj + m_kj) / (e^r_kj p_kj), variance 1 / (e^r_kj p_kj))    # if z_1k = 1

References:
    Li & Zhu 2019, "Capsule Generative Models" (ICANN).
"""

import math

import pyro
import torch
from pyro.nn import PyroModule
from torch import Tensor, nn

from capsule_zoo.guides.base import Guide
from capsule_zoo.models.capsule_helmholtz import CapsuleHelmholtzMachine, Coupling, GenerativeLayer
from capsule_zoo.models.units.exponential_family import GaussianUnits, Units
from capsule_zoo.models.units.switched_units import (
    CapsuleDistribution,
    CapsuleState,
    Fields,
    capsule_distribution,
    draw_capsules,
)

NARROWEST = math.log(1000)  # largest |r|, the log factor of a unit's precision


class RecognitionLayer(PyroModule):
    """One layer of the recognition network: weights to the layer below and biases e, c.

    Args:
        inputs, gates: arguments of `Coupling`.
        layer: the generative layer, (K, J). Its Gaussian units get a precision, r.
    """

    def __init__(self, inputs: int, gates: int, layer: GenerativeLayer) -> None:
        super().__init__()
        capsules, size = layer.hidden.bias.shape
        self.coupling = Coupling(inputs, gates, capsules, size)
        self.hidden_bias = nn.Parameter(torch.zeros(capsules, size))  # e
        self.switch_bias = nn.Parameter(layer.switch_bias.detach().clone())  # c
        gaussian = isinstance(layer.hidden, GaussianUnits)
        self.narrowing = nn.Parameter(torch.zeros(capsules, size)) if gaussian else None

    def forward(self, inputs: Tensor, gates: Tensor, units: Units) -> CapsuleDistribution:
        """Return q(z, h | layer below); `units` are the units of the generative layer."""
        fields = self.coupling(inputs, gates)
        fields = Fields(fields.hidden + self.hidden_bias, fields.switch)
        if self.narrowing is None:
            return capsule_distribution(units, self.switch_bias, fields)
        narrowing = NARROWEST * (self.narrowing / NARROWEST).tanh()
        return capsule_distribution(units, self.switch_bias, fields, narrowing)


class RecognitionMachine(Guide[CapsuleHelmholtzMachine]):
    """The recognition network of a `CapsuleHelmholtzMachine`, from the image to the top layer.

    It is described at the top of this file. The switches' biases start at the model's.

    Args:
        model: a capsule Helmholtz machine.
        centered: whether x_0 is subtracted from the image.

    Raises:
        ValueError: `model` is not a capsule Helmholtz machine.
    """

    def __init__(self, model: CapsuleHelmholtzMachine, centered: bool = True) -> None:
        super().__init__(model)
        self.centered = centered
        inputs = gates = math.prod(model.image_shape)
        layers = []
        for layer in reversed(model.layers):
            layers.append(RecognitionLayer(inputs, gates, layer))
            inputs, gates = layer.hidden.bias.numel(), len(layer.hidden.bias)
        self.layers = PyroModule[nn.ModuleList](layers)  # ordered from the image upward

    def forward(self, images: Tensor, labels: Tensor | None = None) -> None:
        inputs = gates = self._pixels(images)
        names, generative = self.model.layer_names, self.model.layers
        with pyro.plate("images", len(images), dim=-2):
            for i, layer in enumerate(self.layers, start=1):
                distribution = layer(inputs, gates, generative[-i].hidden)
                state = draw_capsules(names[-i], distribution)
                gates, inputs = state.switch, state.activity.flatten(-2)

    def posterior(self, images: Tensor) -> CapsuleDistribution:
        """Return q(z_1, h_1 | x) of the lowest layer."""
        pixels = self._pixels(images)
        return self.layers[0](pixels, pixels, self.model.layers[-1].hidden)

    def _pixels(self, images: Tensor) -> Tensor:
        """Return the pixels x - x_0, or x if not centered, (B, pixels)."""
        return (images - self.model.visible.mean() if self.centered else images).flatten(1)

    def expectations(self, images: Tensor) -> CapsuleState:
        """Compute E_q[z_1 | x] and E_q[z_1 h_1 | x] of the lowest layer for images (B, C, H, W)."""
        return self.posterior(images).mean()

    @torch.no_grad()
    def reconstruct(self, images: Tensor) -> Tensor:
        """Return the mean images (B, C, H, W), computed from the means of the top layer.

        The means of each layer are computed from the means of the layer before it: up to the top,
        and down again.
        """
        inputs = gates = self._pixels(images)
        for layer, model_layer in zip(self.layers, reversed(self.model.layers), strict=True):
            state = layer(inputs, gates, model_layer.hidden).mean()
            gates, inputs = state.switch, state.activity.flatten(-2)
        for model_layer in self.model.layers[1:]:
            state = model_layer(state, len(images)).mean()
        return self.model.mean_image(state)

    @torch.no_grad()
    def gibbs(self, images: Tensor, steps: int = 1) -> Tensor:
        """Return images (B, C, H, W) after alternating recognition and generation of all layers.

        It is Gibbs sampling to the extent that recognition equals the posterior.
        """
        for _ in range(steps):
            recognized = pyro.poutine.trace(self).get_trace(images)
            for name in set(recognized.nodes) - set(self.model.top_sites):
                recognized.remove_node(name)
            images = pyro.poutine.replay(self.model, trace=recognized)(batch_size=len(images))
        return images
