"""The centered gradient of a capsule RBM, which does not depend on the position of zero.

Let c' = c - sum_j B(b_j). Then F(x) couples x z h, x z, x, z h and z by W, Omega, a, b and c'. The
energy can also be written about the means mu of x, zeta of z, and lambda of h given z = 1, with
other coordinates of the same parameters:

    sum_k z_k (x - mu)'W_k (h_k - lambda_k) + (x - mu)'Omega~ (z - zeta) + a~.x
        + sum_k z_k b~_k.(h_k - lambda_k) + c~.z

A gradient step in these coordinates is a step along J J' g in the old coordinates. Here g is the
usual gradient, and J is the derivative of old by new coordinates. For an RBM, whose switch is
always on, this is the centered gradient of Melchior, Fischer and Wiskott 2016 with means over the
data.
"""

from __future__ import annotations

import torch
from torch import Tensor

from capsule_zoo.inference.objectives.base import with_gradient
from capsule_zoo.models.capsule_rbm import CapsuleRBM
from capsule_zoo.models.units.switched_units import CapsuleLaw

MOMENTUM = 0.99


class RunningMeans:
    """The running means over the data: pixels mu, switches zeta, and hidden units when on, lambda.

    Attributes:
        visible: mu, (pixels,).
        switch: zeta, (K,).
        hidden: lambda, (K, J).
    """

    def __init__(self) -> None:
        self.visible = self.switch = self.hidden = torch.empty(0)

    @torch.no_grad()
    def update(self, images: Tensor, law: CapsuleLaw) -> None:
        """Move towards the means of a batch; the first batch sets them.

        Args:
            images: (B, C, H, W).
            law: the capsules' posterior given the images.
        """
        state = law.mean()
        switch = state.switch.mean(0)
        hidden = state.activity.mean(0) / switch[:, None].clamp(min=1e-3)
        new = {"visible": images.flatten(1).mean(0), "switch": switch, "hidden": hidden}
        for name, value in new.items():
            old = getattr(self, name).to(value)
            setattr(self, name, torch.lerp(value, old, MOMENTUM) if len(old) else value)

    def state_dict(self) -> dict[str, Tensor]:
        return {f"mean_{name}": getattr(self, name) for name in ("visible", "switch", "hidden")}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore the means of `state_dict`; if it has none, the next batch sets them."""
        for name in ("visible", "switch", "hidden"):
            setattr(self, name, state.get(f"mean_{name}", torch.empty(0)))


def centered_gradient(loss: Tensor, model: CapsuleRBM, means: RunningMeans) -> Tensor:
    """Return the same loss with gradient J J' g instead of g."""
    parameters = dict(model.named_parameters())
    found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    gradient = {n: g for n, g in zip(parameters, found, strict=True) if g is not None}
    with torch.no_grad():
        gradient |= _direction(gradient, model, means)
    return with_gradient(loss, [parameters[n] for n in gradient], list(gradient.values()))


def _direction(
    gradient: dict[str, Tensor], model: CapsuleRBM, means: RunningMeans
) -> dict[str, Tensor]:
    """Return J J' g for the parameters that centering mixes."""
    mu, zeta, lam = means.visible, means.switch, means.hidden
    g_weight, g_hidden = gradient["weight"], gradient["hidden.bias"]
    g_visible = gradient["visible.bias"].flatten()
    if not model.switched:
        weight = torch.addcmul(g_weight, mu[:, None, None], g_hidden, value=-1)
        weight.addcmul_(g_visible[:, None, None], lam, value=-1)
        visible = g_visible - torch.einsum("mkj,kj->m", weight, lam)
        hidden = g_hidden - torch.einsum("mkj,m->kj", weight, mu)
        return {
            "weight": weight,
            "visible.bias": visible.view_as(model.visible.bias),
            "hidden.bias": hidden,
        }
    g_couple, g_switch = gradient["switch_weight"], gradient["switch_bias"]
    rate = model.hidden.mean()
    # J': the gradient by W, Omega~, b~ (gradients by a~ and c~ equal those by a and c)
    hidden = g_hidden + rate * g_switch[:, None] - lam * g_switch[:, None]
    weight = torch.addcmul(g_weight, mu[:, None, None], hidden, value=-1)  # no product on the side
    weight.addcmul_(g_couple[..., None], lam, value=-1)
    couple = g_couple - mu[:, None] * g_switch - g_visible[:, None] * zeta
    # J: the effect of a step along it on the old coordinates; c follows from c'
    pull = torch.einsum("mkj,m->kj", weight, mu)
    switch = g_switch - mu @ couple + ((pull - hidden) * lam).sum(1)
    return {
        "weight": weight,
        "switch_weight": couple - torch.einsum("mkj,kj->mk", weight, lam),
        "visible.bias": (g_visible - couple @ zeta).view_as(model.visible.bias),
        "hidden.bias": hidden - pull,
        "switch_bias": switch + (rate * (hidden - pull)).sum(1),
    }
