"""Capsule Helmholtz machine: layers of capsules, each sampled given the layer above.

Story. The top layer's capsules switch themselves on and fill their units. Every lower
capsule gets its probability of being on, and the distribution of its units, from the layer above.
The lowest layer draws the image. The units of the next layer depend on u = z h only. Layer L is on
top, layer 1 is next to the image:

    z_Lk ~ Bernoulli(c_Lk),  h_Lk ~ family(b_Lk)                                # (B, K), (B, K, J)
    m_k = sum_k' W_kk' u_{l+1,k'},  d = Omega_l z_{l+1}                         # l = L - 1 .. 1
    z_lk ~ Bernoulli(c_lk + d_k + sum_j [B(b_lkj + m_kj) - B(b_lkj)])
    h_lk ~ family(b_lk + z_lk m_k)
    x    ~ family(a + sum_k W_k u_1k + Omega z_1)                               # (B, C, H, W)

With `parents="one"` a capsule does not add up what all capsules above it say. It chooses one parent
among those that are on, or none, and the layers form a tree (the paper's outlook). The choice is
summed out (`models.units.one_parent`):

    a_lk ~ Categorical(none: 1, k': z_{l+1,k'} rho_lk'k)
    m_k = W_kk' u_{l+1,k'},  d_k = Omega_kk'                                    # k' = a_lk

The image still adds up the terms of all capsules of layer 1.

The paper writes each p(h_l, z_l | h_{l+1}, z_{l+1}) as an energy, z_l'(m h_l) and so on, and calls
its partition function intractable. But the energy couples a layer only to the layer above, so the
distribution has the closed form of `models.units.switched_units`. The machine is therefore a
directed model that is drawn exactly from the top, and its ELBO and IWAE are computed from exact
densities.

References:
    Li & Zhu 2019, "Capsule Generative Models" (ICANN). Misprints there: products for
    sums in equations 17, 18 and 21, no log in 22, the sign of the second line of 25, and 11
    descends the likelihood.
    Dayan, Hinton, Neal & Zemel 1995, "The Helmholtz Machine".
"""

import math

import pyro
import torch
import torch.nn.functional as F
from pyro.nn import PyroModule
from torch import Tensor, nn

from capsule_zoo.models.base import Site
from capsule_zoo.models.checks import check_at_least, check_one_of
from capsule_zoo.models.units.exponential_family import make_units
from capsule_zoo.models.units.one_parent import OneParentDistribution
from capsule_zoo.models.units.switched_units import (
    CapsuleDistribution,
    CapsuleMachine,
    CapsuleState,
    Fields,
    capsule_distribution,
    capsule_sites,
    draw_capsules,
)


class Coupling(PyroModule):
    """Weights from a layer or image to the biases of the next layer: m = W u, d = Omega v.

    Args:
        inputs: numbers in u, which acts on the units.
        gates: numbers in v, which acts on the switches.
        capsules, units: K and J of the layer that receives the terms.
    """

    def __init__(self, inputs: int, gates: int, capsules: int, units: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, capsules, units) / math.sqrt(inputs))
        self.switch_weight = nn.Parameter(torch.zeros(gates, capsules))

    def forward(self, inputs: Tensor, gates: Tensor) -> Fields:
        """Compute the fields m and d from u (B, inputs) and v (B, gates)."""
        field = inputs @ self.weight.flatten(1)
        hidden = field.unflatten(-1, self.weight.shape[1:])
        return Fields(hidden, gates @ self.switch_weight)

    def fields_by_parent(self, above: CapsuleState) -> Fields:
        """Compute the fields of no parent and of each parent alone, (1 + parents, B, K, J)."""
        shape = self.weight.shape[1:]
        weight = self.weight.view(above.switch.shape[-1], -1, shape.numel())  # by parent
        # padded with a parent of zeros: to pad the fields, which are large, takes longer
        activity = F.pad(above.activity, (0, 0, 1, 0))
        weight, gates = F.pad(weight, (0, 0) * 2 + (1, 0)), F.pad(self.switch_weight, (0, 0, 1, 0))
        field = torch.einsum("...pj,pjm->p...m", activity, weight)
        switch = torch.einsum("...p,pk->p...k", F.pad(above.switch, (1, 0)), gates)
        return Fields(field.unflatten(-1, shape), switch)


class GenerativeLayer(PyroModule):
    """A generative layer: its biases and, except at the top, the coupling to the layer above.

    Args:
        family: family of the hidden units.
        capsules, units: K and J.
        above: capsules of the layer above, 0 at the top.
        switch_start: initial bias of the switches, in nats.
        parents: "all" or "one" of the capsules above act on a capsule.
    """

    def __init__(
        self,
        family: str,
        capsules: int,
        units: int,
        above: int = 0,
        switch_start: float = 0.0,
        parents: str = "all",
    ) -> None:
        super().__init__()
        self.hidden = make_units("hidden_family", family, capsules, units)
        self.switch_bias = nn.Parameter(torch.full((capsules,), float(switch_start)))
        self.coupling = Coupling(above * units, above, capsules, units) if above else None
        chooses = above and parents == "one"
        self.log_affinity = nn.Parameter(torch.zeros(above, capsules)) if chooses else None

    def forward(
        self, above: CapsuleState | None, batch: int
    ) -> CapsuleDistribution | OneParentDistribution:
        """Return the distribution p(z, h | layer above)."""
        if self.coupling is None or above is None:
            fields = Fields.none(self.hidden, batch)
        elif self.log_affinity is not None:
            fields = self.coupling.fields_by_parent(above)
            conditional = capsule_distribution(self.hidden, self.switch_bias, fields)
            weight = (above.switch.log()[..., None] + self.log_affinity).movedim(-2, 0)
            weight = torch.cat([torch.zeros_like(weight[:1]), weight])
            return OneParentDistribution(weight.log_softmax(0), conditional)
        else:
            fields = self.coupling(above.activity.flatten(-2), above.switch)
        return capsule_distribution(self.hidden, self.switch_bias, fields)


class CapsuleHelmholtzMachine(CapsuleMachine):
    """The capsule Helmholtz machine, described at the top of this file.

    Args:
        image_shape: (channels, height, width), or a square number of pixels.
        capsules: number of capsules of every layer, from the top down; one layer or more.
        units: hidden units of a capsule, J.
        visible_family: distribution of pixels, "bernoulli" (which may be gray), "gaussian" or
            "poisson".
        hidden_family: distribution of hidden units, "bernoulli", "gaussian" or "poisson".
        switch_start: start of the switches' biases, in nats, 0 or more. At 0 many capsules fall
            silent before they have learned anything; at 3 all of them start on, and few do.
        parents: "all" capsules above a capsule act on it, or "one" that it chooses.

    Raises:
        ValueError: no layer, a size below 1, a negative start, an unknown family or option.

    Called as `model(images=None, labels=None, batch_size=1)` it returns the image (B, C, H, W).
    Without images the result is an ancestral draw. Layer l, counted from the image, has the sites
    `capsule<l>_switch` and `capsule<l>_hidden`.
    """

    def __init__(
        self,
        image_shape: int | tuple[int, int, int] = (1, 28, 28),
        capsules: tuple[int, ...] = (40, 40),
        units: int = 16,
        *,
        visible_family: str = "bernoulli",
        hidden_family: str = "bernoulli",
        switch_start: float = 3.0,
        parents: str = "all",
    ) -> None:
        super().__init__(image_shape, visible_family)
        capsules = tuple(capsules)
        if not capsules:
            raise ValueError("capsules must give the size of one layer or more, from the top down")
        check_at_least(1, capsules=capsules, units=units)
        check_at_least(0, switch_start=switch_start)
        check_one_of("parents", parents, ("all", "one"))
        self.layers = PyroModule[nn.ModuleList](
            GenerativeLayer(hidden_family, size, units, above, switch_start, parents)
            for above, size in zip((0, *capsules), capsules, strict=False)
        )
        pixels, lowest = math.prod(self.image_shape), capsules[-1]
        scale = 1 / math.sqrt(lowest * units)
        self.weight = nn.Parameter(scale * torch.randn(pixels, lowest, units))  # W of the image
        self.switch_weight = nn.Parameter(torch.zeros(pixels, lowest))
        names = self.layer_names
        self.plate_dims = {"images": -2, **{f"{name}s": -1 for name in names}}

    @property
    def layer_names(self) -> tuple[str, ...]:
        """The names of the layers from the top down: `capsule<L>` to `capsule1`."""
        return tuple(f"capsule{level}" for level in range(len(self.layers), 0, -1))

    @property
    def sites(self) -> tuple[Site, ...]:
        layers = zip(self.layer_names, self.layers, strict=True)
        return tuple(site for name, layer in layers for site in capsule_sites(name, layer.hidden))

    @property
    def top_sites(self) -> tuple[str, ...]:
        """The names of the top layer's sites, given which the model samples everything else."""
        return tuple(site.name for site in self.sites[:2])

    def forward(
        self, images: Tensor | None = None, labels: Tensor | None = None, batch_size: int = 1
    ) -> Tensor:
        batch = batch_size if images is None else len(images)
        with pyro.plate("images", batch, dim=-2):
            state = None
            for name, layer in zip(self.layer_names, self.layers, strict=True):
                state = draw_capsules(name, layer(state, batch))
            return self._sample_image(self.visible_field(state), images)
