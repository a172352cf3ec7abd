"""Switched capsules: their distribution under the fields of neighboring layers.

Each of K capsules has a switch z_k and J hidden units h_k. A neighbor that adds m_k to the biases
of the units of a capsule that is on, and d_k to the bias of its switch, leaves

    energy    c_k z_k + b_k.h_k + log g(h_k) + z_k (m_k.h_k + d_k)
    switches  z_k ~ Bernoulli(c_k + d_k + sum_j [B(b_kj + m_kj) - B(b_kj)])
    units     h_k | z_k ~ family(b_k + z_k m_k)
    log Z     sum_k log[exp(sum_j B(b_kj)) + exp(c_k + d_k + sum_j B(b_kj + m_kj))]

with B the log-partition of the units. Everything has a closed form, because no two capsules are
coupled. The lowest layer itself adds fields to the pixels of an image (`CapsuleMachine`).
"""

import math
from typing import TYPE_CHECKING, NamedTuple

import pyro
import torch
from pyro.distributions import TorchDistribution
from pyro.nn import pyro_method
from torch import Tensor

from capsule_zoo.models.base import Model, Site
from capsule_zoo.models.common.plates import refuse_enumeration
from capsule_zoo.models.common.spaces import ImageSpace
from capsule_zoo.models.units.exponential_family import (
    FastBernoulli,
    Units,
    base_rates,
    draw_bernoulli,
    make_units,
    softplus,
)

if TYPE_CHECKING:
    from capsule_zoo.models.units.one_parent import OneParentDistribution


class Fields(NamedTuple):
    """The fields that a neighboring layer, or an image, adds to the biases of capsules.

    Attributes:
        hidden: m, added to the hidden units of a capsule that is on, (B, K, J).
        switch: d, added to the switches, (B, K).
    """

    hidden: Tensor
    switch: Tensor

    def scale_fields(self, beta: float | Tensor) -> "Fields":
        """Scale fields by `beta`, a number or one for each row (B,)."""
        if isinstance(beta, Tensor):
            beta = beta[:, None]
            return Fields(self.hidden * beta[..., None], self.switch * beta)
        return Fields(self.hidden * beta, self.switch * beta)

    @classmethod
    def none(cls, units: Units, batch: int) -> "Fields":
        """Return zero fields for a batch of layers with units (K, J)."""
        hidden = units.bias.new_zeros(batch, *units.bias.shape)
        return cls(hidden, hidden[..., 0])


class CapsuleState(NamedTuple):
    """The values, or expectations, of switches (B, K) and hidden units (B, K, J)."""

    switch: Tensor
    activity: Tensor  # switch times hidden units, which alone acts on a neighbor's units


class CapsuleDistribution(NamedTuple):
    """The distribution p(z, h | fields) of switches and units, for a batch.

    Attributes:
        units: the family and biases of the hidden units.
        field: m, added to the hidden units of capsules that are on, (B, K, J).
        gain: sum_j B(b + m) - B(b), the log-odds that hidden units add to a switch, (B, K).
        switch_logits: logits of the switches; None where they are always on.
        narrowing: added to the log precision of Gaussian units of capsules that are on, (K, J);
            None for units of other families, or of their own precision.
    """

    units: Units
    field: Tensor
    gain: Tensor
    switch_logits: Tensor | None
    narrowing: Tensor | None = None

    def rows(self, rows: slice) -> "CapsuleDistribution":
        """Return the distribution of some rows of the batch."""
        logits = None if self.switch_logits is None else self.switch_logits[rows]
        return self._replace(field=self.field[rows], gain=self.gain[rows], switch_logits=logits)

    @property
    def switch_probability(self) -> Tensor:
        """The probabilities p(z_k = 1), (B, K)."""
        if self.switch_logits is None:
            return torch.ones_like(self.gain)
        return self.switch_logits.sigmoid()

    def log_partition(self) -> Tensor:
        """Compute the log partition function of the capsules, less sum_j B(b), (B,), in nats."""
        if self.switch_logits is None:
            return self.gain.sum(-1)
        return softplus(self.switch_logits).sum(-1)

    def mean(self) -> CapsuleState:
        """Compute the expectations E[z] and E[z h]."""
        switch = self.switch_probability
        return CapsuleState(switch, switch[..., None] * self.units.mean(*self._terms()))

    def sample(self) -> CapsuleState:
        """Sample switches and units exactly; units of capsules that are off have no effect."""
        hidden = self.units.sample(*self._terms())
        if self.switch_logits is None:
            return CapsuleState(torch.ones_like(self.gain), hidden)
        switch = draw_bernoulli(self.switch_probability)
        return CapsuleState(switch, switch[..., None] * hidden)

    def hidden(self, switch: Tensor) -> TorchDistribution:
        """Return the distribution of the units, events of size J, given the switches (B, K)."""
        terms = (switch[..., None] * term for term in self._terms())
        return self.units.distribution(*terms).to_event(1)

    def _terms(self) -> tuple[Tensor, ...]:
        """Return the terms added to the units' parameters in capsules that are on."""
        return (self.field,) if self.narrowing is None else (self.field, self.narrowing)


def capsule_distribution(
    units: Units, switch_bias: Tensor | None, fields: Fields, narrowing: Tensor | None = None
) -> CapsuleDistribution:
    """Return the distribution of capsules at the top of this file.

    Args:
        switch_bias: c (K,), None for always on.
        narrowing: see `CapsuleDistribution`.
    """
    terms = (fields.hidden,) if narrowing is None else (fields.hidden, narrowing)
    gain = units.log_partition(*terms).sum(-1) - units.log_partition().sum(-1)
    logits = None if switch_bias is None else switch_bias + fields.switch + gain
    return CapsuleDistribution(units, fields.hidden, gain, logits, narrowing)


def draw_capsules(
    name: str, distribution: "CapsuleDistribution | OneParentDistribution"
) -> CapsuleState:
    """Sample the sites of one layer, within its images plate at dim -2.

    The sites are `<name>_switch`, unless switches are always on, and `<name>_hidden`.

    Raises:
        EnumeratedPresence: a site varies along a dim of enumeration.
    """
    logits = distribution.switch_logits
    with pyro.plate(f"{name}s", len(distribution.units.bias), dim=-1):
        if logits is None:
            switch = distribution.switch_probability
        else:
            switch = pyro.sample(f"{name}_switch", FastBernoulli(logits=logits))
        hidden = pyro.sample(f"{name}_hidden", distribution.hidden(switch))
    refuse_enumeration(f"{name}_switch", switch)
    refuse_enumeration(f"{name}_hidden", hidden[..., 0])
    return CapsuleState(switch, switch[..., None] * hidden)


def capsule_sites(name: str, units: Units, switched: bool = True) -> tuple[Site, ...]:
    """Return the sites that `draw_capsules` draws."""
    plates = ("images", f"{name}s")
    hidden = Site(f"{name}_hidden", plates, event_dim=1, discrete=units.discrete)
    return (Site(f"{name}_switch", plates, discrete=True), hidden) if switched else (hidden,)


class CapsuleMachine(Model):
    """The base class of capsule machines, whose capsules add fields to the visible biases.

    Subclasses hold `weight`, W (pixels, K, J), and where capsules are `switched`, `switch_weight`,
    Omega (pixels, K).

    Args:
        image_shape: (channels, height, width), or a square number of pixels.
        visible_family: "bernoulli", "gaussian" or "poisson".

    Raises:
        ValueError: sizes that are neither, or an unknown family.
    """

    switched = True
    weight: Tensor
    switch_weight: Tensor

    def __init__(self, image_shape: int | tuple[int, int, int], visible_family: str) -> None:
        super().__init__()
        shape = _image_shape(image_shape)
        self.visible = make_units("visible_family", visible_family, *shape)
        self.space = ImageSpace(shape, self.visible.value_range)

    @pyro_method
    def visible_field(self, capsules: CapsuleState) -> Tensor:
        """Compute the field phi = sum_k W_k u_k + Omega z of visible units, (B, C, H, W)."""
        field = capsules.activity.flatten(-2) @ self.weight.flatten(1).T
        if self.switched:
            field = field + capsules.switch @ self.switch_weight.T
        return field.unflatten(-1, self.image_shape)

    @pyro_method
    def contributions(self, capsules: CapsuleState) -> Tensor:
        """Compute each capsule's term of the visible field phi, (B, K, C, H, W)."""
        terms = torch.einsum("...kj,mkj->...km", capsules.activity, self.weight)
        if self.switched:
            terms = terms + capsules.switch[..., None] * self.switch_weight.T
        return terms.unflatten(-1, self.image_shape)

    @pyro_method
    def mean_image(self, capsules: CapsuleState) -> Tensor:
        """Compute the mean image E[x | h, z], (B, C, H, W)."""
        return self.visible.mean(self.visible_field(capsules))

    def _sample_image(self, field: Tensor, images: Tensor | None) -> Tensor:
        """Sample the image site under a field (B, C, H, W), in the images plate."""
        distribution = self.visible.distribution(field.unsqueeze(-4)).to_event(3)  # (B, 1, C, H, W)
        return self.sample_image(distribution, images)

    @torch.no_grad()
    def set_base_rates(self, images: Tensor) -> None:
        """Set the visible biases to the mean of images (B, C, H, W), as Hinton (2010) advises."""
        self.space.check(images)
        self.visible.bias.copy_(base_rates(self.visible, images))


def _image_shape(image_shape: int | tuple[int, int, int]) -> tuple[int, int, int]:
    """Return (channels, height, width) from itself or from a square number of pixels.

    Raises:
        ValueError: the argument is neither of the two.
    """
    if isinstance(image_shape, int):
        side = math.isqrt(max(image_shape, 0))
        if side * side == image_shape >= 1:
            return 1, side, side
    elif len(image_shape) == 3 and min(image_shape) >= 1:
        channels, height, width = image_shape
        return channels, height, width
    raise ValueError(
        "image_shape must be a square number of pixels or (channels, height, width), not "
        f"{image_shape!r}"
    )
