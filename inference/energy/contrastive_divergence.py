"""Contrastive divergence: maximum likelihood for energy models, with negatives from Gibbs chains.

    loss = mean F_q(x_data) - mean F(x_model),      x_model: k sweeps of Gibbs, not differentiated

If the negatives follow the model, its gradient equals the gradient of the mean of -log p(x). Its
value is not a bound on anything, and models are never ranked by it: see `log_partition`.

>>> fit(model, ExactSwitches(model), images, objective=ContrastiveDivergence(persistent=True))

It is the default objective of `fit` for an RBM. A loss from an ELBO lacks log Z and falls for ever,
so that `fit`, `SVI.step` and the objectives of the zoo refuse it. Pyro's own ELBO in a loop of
torch, `Trace_ELBO()(model, guide)`, cannot be told from an evaluation: never train an energy model
with it.

The centered gradient does not depend on the position of zero. Let c' = c - sum_j B(b_j). Then F(x)
couples x z h, x z, x, z h and z by W, Omega, a, b and c'. The energy can also be written about the
means mu of x, zeta of z, and lambda of h given z = 1, with other coordinates of the same
parameters:

    sum_k z_k (x - mu)'W_k (h_k - lambda_k) + (x - mu)'Omega~ (z - zeta) + a~.x
        + sum_k z_k b~_k.(h_k - lambda_k) + c~.z

A gradient step in these coordinates is a step along J J' g in the old coordinates. Here g is the
usual gradient, and J is the derivative of old by new coordinates. For an RBM, whose switch is
always on, this is the published gradient with means over the data.

References:
    Hinton 2002, "Training Products of Experts by Minimizing Contrastive Divergence" (CD-k).
    Tieleman 2008, "Training RBMs using Approximations to the Likelihood Gradient" (persistent).
    Desjardins et al. 2010, "Parallel Tempering for Training of RBMs" (AISTATS; tempered).
    Melchior, Fischer & Wiskott 2016, "How to Center Deep Boltzmann Machines" (centered).
    Lee, Ekanadham & Ng 2008, "Sparse Deep Belief Net Model for Visual Area V2" (sparsity; theirs
    is a square about a target).
"""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from capsule_zoo.guides.energy import ExactSwitches, MeanFieldSwitches
from capsule_zoo.inference.energy.tempering import TemperedChains
from capsule_zoo.inference.objectives.base import Objective, with_gradient
from capsule_zoo.inference.other_model import refuse_another_model
from capsule_zoo.models.capsule_rbm import CapsuleRBM
from capsule_zoo.models.checks import check_at_least
from capsule_zoo.models.units.switched_units import CapsuleDistribution, CapsuleState


class ContrastiveDivergence(Objective):
    """The contrastive divergence CD-k for `CapsuleRBM` and `RBM`; see the top of this file.

    The data term is the guide's variational free energy: F(x) itself under `ExactSwitches`, the
    paper's mean field under `MeanFieldSwitches`. Before each loss the objective ensures that the
    model has a partition function (`CapsuleRBM.keep_normalizable`).

    Args:
        k: Gibbs sweeps for each update.
        persistent: continue the chains from update to update, instead of restarting at the data.
        chains: number of persistent chains; they are part of a checkpoint.
        centered: use the gradient in coordinates centered at running means of the data. It does
            not change if "on" and "off" pixels are exchanged. Use it with SGD: an optimizer that
            rescales each parameter undoes it in part.
        tempering: inverse temperatures, 1 first and falling, such as (1, .9, .8), each with
            `chains` persistent chains that exchange their images.
        sparsity: loss added for each switch that is on in an image, in nats. Values above 0 give
            spectra that are easier to read, at the cost of likelihood.

    Raises:
        ValueError: a number out of range, temperatures that do not fall from 1 or without
            `persistent`; on use, a model or a guide that has no free energy, or a guide to
            another model.
    """

    def __init__(
        self,
        k: int = 1,
        *,
        persistent: bool = False,
        chains: int = 100,
        centered: bool = False,
        tempering: tuple[float, ...] | None = None,
        sparsity: float = 0.0,
    ) -> None:
        super().__init__()
        check_at_least(1, k=k, chains=chains)
        check_at_least(0, sparsity=sparsity)
        if tempering is not None:
            tempering = tuple(tempering)
            falling = all(low < high for high, low in pairwise(tempering))
            if len(tempering) < 2 or tempering[0] != 1 or not falling or tempering[-1] < 0:
                raise ValueError(
                    f"tempering must be 1 and then falling numbers, 0 or more, not {tempering}"
                )
            if not persistent:
                raise ValueError("tempering needs persistent=True, for its chains are never reset")
        self.k = k
        self.persistent = persistent
        self.chains = chains
        self.tempering = tempering
        self.sparsity = sparsity
        self.means = RunningMeans() if centered else None
        self._state: CapsuleState | None = None
        self._tempered: TemperedChains | None = None

    def check_pair(self, model: Callable, guide: Callable) -> None:
        """Raise ValueError unless the guide has a free energy and belongs to the model."""
        if not isinstance(model, CapsuleRBM):
            raise ValueError(
                f"ContrastiveDivergence needs a CapsuleRBM or an RBM as model, not a "
                f"{type(model).__name__}"
            )
        if not hasattr(guide, "free_energy"):
            raise ValueError(
                f"ContrastiveDivergence needs a guide with a free energy in closed form, such as "
                f"ExactSwitches, not a {type(guide).__name__}"
            )
        refuse_another_model(model, guide)

    def differentiable_loss(
        self,
        model: CapsuleRBM,
        guide: ExactSwitches | MeanFieldSwitches,
        images: Tensor,
        labels: Tensor | None = None,
    ) -> Tensor:
        """Return mean F_q(data) - mean F(negatives), in nats per image."""
        self.check_pair(model, guide)
        model.keep_normalizable()
        negatives = self._negatives(model, images)
        both = torch.cat([images, negatives])  # one product with W instead of two
        distribution = model.posterior(both)
        energy = model.free_energy(both, distribution)
        if self.persistent and self.tempering is None:
            with torch.no_grad():  # activities for the next update, without another product
                self._state = distribution.rows(slice(len(images), None)).sample()
        data = energy[: len(images)]
        if not isinstance(guide, ExactSwitches):
            data = guide.free_energy(images)
        loss = data.mean() - energy[len(images) :].mean()
        if self.sparsity:
            switches = distribution.rows(slice(len(images))).switch_probability
            loss = loss + self.sparsity * switches.sum(1).mean()
        if self.means is None or not torch.is_grad_enabled():
            return loss
        self.means.update(images, distribution.rows(slice(len(images))))
        return centered_gradient(loss, model, self.means)

    @torch.no_grad()
    def _negatives(self, model: CapsuleRBM, images: Tensor) -> Tensor:
        """Return the images of the chains after k more sweeps, (chains, C, H, W)."""
        if self.tempering is not None:
            if self._tempered is None:
                self._tempered = TemperedChains(self.tempering, model.base_images(self.chains))
            for _ in range(self.k):
                self._tempered.sweep(model)
            return self._tempered.images[0]
        if self._state is None:
            start = model.base_images(self.chains) if self.persistent else images
            state = model.posterior(start).sample()
        else:  # chains from a checkpoint are on the CPU
            state = CapsuleState(*(value.to(model.weight) for value in self._state))
        return model.gibbs(model.draw_images(state), self.k - 1)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the chains and running means, as checkpoints store them."""
        state: dict[str, Tensor] = {} if self.means is None else self.means.state_dict()
        if self._state is not None:
            state |= self._state._asdict()
        if self._tempered is not None:
            state |= self._tempered.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore the chains and means of `state_dict`."""
        self._state = self._tempered = None
        if "activity" in state:
            self._state = CapsuleState(state["switch"], state["activity"])
        if self.tempering is not None and "images" in state:
            self._tempered = TemperedChains(self.tempering, state["images"], state["exchanges"])
        if self.means is not None:
            self.means.load_state_dict(state)


MOMENTUM = 0.99


class RunningMeans:
    """Running means over the data: pixels mu, switches zeta, hidden units of capsules on lambda.

    Attributes:
        visible: mu, (pixels,).
        switch: zeta, (K,).
        hidden: lambda, (K, J).
    """

    def __init__(self) -> None:
        self.visible = self.switch = self.hidden = torch.empty(0)

    @torch.no_grad()
    def update(self, images: Tensor, distribution: CapsuleDistribution) -> None:
        """Move the running means towards a batch's means; the first batch sets them.

        Args:
            images: (B, C, H, W).
            distribution: the capsules' posterior given the images.
        """
        state = distribution.mean()
        switch = state.switch.mean(0)
        hidden = state.activity.mean(0) / switch[:, None].clamp(min=1e-3)
        new = {"visible": images.flatten(1).mean(0), "switch": switch, "hidden": hidden}
        for name, value in new.items():
            old = getattr(self, name).to(value)
            setattr(self, name, torch.lerp(value, old, MOMENTUM) if len(old) else value)

    def state_dict(self) -> dict[str, Tensor]:
        return {f"mean_{name}": getattr(self, name) for name in ("visible", "switch", "hidden")}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore the means of `state_dict`; without any, the next batch sets them."""
        for name in ("visible", "switch", "hidden"):
            setattr(self, name, state.get(f"mean_{name}", torch.empty(0)))


def centered_gradient(loss: Tensor, model: CapsuleRBM, means: RunningMeans) -> Tensor:
    """Return the loss with the centered gradient J J' g instead of its gradient g."""
    parameters = dict(model.named_parameters())
    gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    gradient = {n: g for n, g in zip(parameters, gradients, strict=True) if g is not None}
    with torch.no_grad():
        gradient |= _direction(gradient, model, means)
    return with_gradient(loss, [parameters[n] for n in gradient], list(gradient.values()))


def _direction(
    gradient: dict[str, Tensor], model: CapsuleRBM, means: RunningMeans
) -> dict[str, Tensor]:
    """Return the centered gradient J J' g of the parameters that centering mixes."""
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
    weight = torch.addcmul(g_weight, mu[:, None, None], hidden, value=-1)  # no temporary product
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
