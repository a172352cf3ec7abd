"""A layer of capsules under the fields of its neighbours: the law that capsule machines share.

Each of K capsules has a switch z_k and J hidden units h_k. A neighbour that adds m_k to the biases
of the units of a capsule that is on, and d_k to the bias of its switch, leaves

    energy    c_k z_k + b_k.h_k + log g(h_k) + z_k (m_k.h_k + d_k)
    switches  z_k ~ Bernoulli(c_k + d_k + sum_j [B(b_kj + m_kj) - B(b_kj)])
    units     h_k | z_k ~ family(b_k + z_k m_k)
    log Z     sum_k log[exp(sum_j B(b_kj)) + exp(c_k + d_k + sum_j B(b_kj + m_kj))]

with B the log-partition of the units: everything is closed form, for no two capsules are coupled.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import pyro
import torch
from torch import Tensor

from capsule_zoo.models.base import Site
from capsule_zoo.models.exponential_family import (
    FastBernoulli,
    Units,
    draw_bernoulli,
    softplus,
)


class Fields(NamedTuple):
    """What a neighbouring layer, or an image, adds to the biases of capsules.

    Attributes:
        hidden: m, added to the hidden units of a capsule that is on, (B, K, J).
        switch: d, added to the switches, (B, K).
    """

    hidden: Tensor
    switch: Tensor

    def scaled(self, beta: float | Tensor) -> Fields:
        """The fields of couplings scaled by `beta`, a number or one for each row (B,)."""
        if isinstance(beta, Tensor):
            beta = beta[:, None]
            return Fields(self.hidden * beta[..., None], self.switch * beta)
        return Fields(self.hidden * beta, self.switch * beta)


class CapsuleState(NamedTuple):
    """A value of every switch (B, K) and every hidden unit (B, K, J), or their expectations."""

    switch: Tensor
    activity: Tensor  # switch times hidden units: all that a neighbour feels of them


class CapsuleLaw(NamedTuple):
    """p(z, h | fields), a batch of them.

    Attributes:
        units: the family and biases of the hidden units.
        field: m, added to the hidden units of capsules that are on, (B, K, J).
        gain: sum_j B(b + m) - B(b), the log-odds that the hidden units speak for a switch, (B, K).
        switch_logits: of the switches; None where they are always on.
    """

    units: Units
    field: Tensor
    gain: Tensor
    switch_logits: Tensor | None

    def rows(self, rows: slice) -> CapsuleLaw:
        """The laws of some rows of the batch."""
        logits = None if self.switch_logits is None else self.switch_logits[rows]
        return CapsuleLaw(self.units, self.field[rows], self.gain[rows], logits)

    @property
    def switch_probability(self) -> Tensor:
        """p(z_k = 1), (B, K)."""
        if self.switch_logits is None:
            return torch.ones_like(self.gain)
        return self.switch_logits.sigmoid()

    def log_partition(self) -> Tensor:
        """log sum_{z, h} of the capsules' share of exp(-E), less sum_j B(b), in nats, (B,)."""
        if self.switch_logits is None:
            return self.gain.sum(-1)
        return softplus(self.switch_logits).sum(-1)

    def mean(self) -> CapsuleState:
        """E[z] and E[z h]."""
        switch = self.switch_probability
        return CapsuleState(switch, switch[..., None] * self.units.mean(self.field))

    def sample(self) -> CapsuleState:
        """An exact draw; what units of capsules that are off do, nothing feels."""
        hidden = self.units.sample(self.field)
        if self.switch_logits is None:
            return CapsuleState(torch.ones_like(self.gain), hidden)
        switch = draw_bernoulli(self.switch_probability)
        return CapsuleState(switch, switch[..., None] * hidden)


def capsule_law(units: Units, switch_bias: Tensor | None, fields: Fields) -> CapsuleLaw:
    """The law at the top of this file; `switch_bias` is c (K,), None for switches always on."""
    gain = units.log_partition(fields.hidden).sum(-1) - units.log_partition().sum(-1)
    logits = None if switch_bias is None else switch_bias + fields.switch + gain
    return CapsuleLaw(units, fields.hidden, gain, logits)


def draw_capsules(name: str, law: CapsuleLaw) -> CapsuleState:
    """The Pyro statements of one layer, within its images plate at dim -2.

    Its sites are `<name>_switch`, unless switches are always on, and `<name>_hidden`.
    """
    with pyro.plate(f"{name}s", law.gain.shape[1], dim=-1):
        switch = torch.ones_like(law.gain)
        if law.switch_logits is not None:
            switch = pyro.sample(f"{name}_switch", FastBernoulli(logits=law.switch_logits))
        units = law.units.law(switch[..., None] * law.field).to_event(1)
        hidden = pyro.sample(f"{name}_hidden", units)
    return CapsuleState(switch, switch[..., None] * hidden)


def capsule_sites(name: str, units: Units, switched: bool = True) -> tuple[Site, ...]:
    """The sites that `draw_capsules` draws."""
    plates = ("images", f"{name}s")
    hidden = Site(f"{name}_hidden", plates, event_dim=1, discrete=units.discrete)
    return (Site(f"{name}_switch", plates, discrete=True), hidden) if switched else (hidden,)


def image_field(state: CapsuleState, weight: Tensor, switch_weight: Tensor | None) -> Tensor:
    """sum_k W_k u_k + Omega z, which capsules add to the biases of an image, (B, pixels).

    Args:
        weight: W, (pixels, K, J).
        switch_weight: Omega, (pixels, K), or None.
    """
    field = state.activity.flatten(1) @ weight.flatten(1).T
    return field if switch_weight is None else field + state.switch @ switch_weight.T


def image_contributions(
    state: CapsuleState, weight: Tensor, switch_weight: Tensor | None
) -> Tensor:
    """The terms W_k u_k + Omega_k z_k of `image_field`, one for each capsule, (B, K, pixels)."""
    terms = torch.einsum("bkj,mkj->bkm", state.activity, weight)
    return terms if switch_weight is None else terms + state.switch[..., None] * switch_weight.T


def image_shape_of(visible: int | tuple[int, int, int]) -> tuple[int, int, int]:
    """(channels, height, width) from a square number of pixels, or as it is given.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(visible, int):
        side = math.isqrt(max(visible, 0))
        if side * side == visible >= 1:
            return 1, side, side
    elif len(visible) == 3 and min(visible) >= 1:
        channels, height, width = visible
        return channels, height, width
    raise ValueError(
        f"visible must be a square number of pixels or (channels, height, width), not {visible!r}"
    )
