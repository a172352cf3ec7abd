"""Guides to the capsule RBM: the exact posterior in closed form, and the paper's mean field.

    ExactSwitches      z_k ~ Bernoulli(c_k + Omega_k.x + sum_j [B(b + m_k) - B(b)])
                       h_k ~ family(b + z_k m_k)                            # m_k = W_k'x
    MeanFieldSwitches  z_k ~ Bernoulli(pi_k),  h_k ~ family(b + pi_k m_k)   # z and h independent
                       logit pi_k = c_k + Omega_k.x + m_k.B'(b + pi_k m_k)  # iterated

Neither has its own parameters. Both have their variational free energy in closed form,

    E_q[E(x, h, z)] - entropy of q  >=  F(x),  with equality for ExactSwitches,

and `ContrastiveDivergence` lowers this energy on the data.

References:
    Li & Zhu 2019, "Capsule Generative Models" (ICANN): the mean field.
"""

import pyro
import pyro.distributions as dist
import torch
import torch.nn.functional as F
from torch import Tensor

from capsule_zoo.guides.base import Guide
from capsule_zoo.models.capsule_rbm import CapsuleRBM
from capsule_zoo.models.checks import check_at_least
from capsule_zoo.models.units.switched_units import CapsuleState, draw_capsules


class ExactSwitches(Guide[CapsuleRBM]):
    """The guide with the exact posterior of a `CapsuleRBM` or an `RBM`.

    The log weight is the log density of the model less the log density of the guide. Under this
    guide it is the same number for every draw: -F(x) less the model's `log_base_partition`.

    Raises:
        ValueError: `model` is not a capsule RBM.
    """

    def forward(self, images: Tensor, labels: Tensor | None = None) -> None:
        with pyro.plate("images", len(images), dim=-2):
            draw_capsules("capsule", self.model.posterior(images))

    def expectations(self, images: Tensor) -> CapsuleState:
        """Compute E[z | x] and E[z h | x] for images (B, C, H, W)."""
        return self.model.posterior(images).mean()

    def free_energy(self, images: Tensor) -> Tensor:
        """Compute F(x) of images (B, C, H, W), (B,), in nats."""
        return self.model.free_energy(images)


class MeanFieldSwitches(Guide[CapsuleRBM]):
    """The paper's mean field guide: switches and hidden units independent given the image.

    Where couplings are strong the iteration has two fixed points. It starts at pi = 1/2, and the
    start decides which of the two it finds.

    Args:
        model: a `CapsuleRBM`.
        iterations: number of iterations of the fixed-point equation.

    Raises:
        ValueError: `model` is not a capsule RBM or has no switches, or `iterations` is below 1.
    """

    def __init__(self, model: CapsuleRBM, iterations: int = 20) -> None:
        super().__init__(model)
        if not model.switched:
            raise ValueError("model must have switches; for an RBM use ExactSwitches")
        check_at_least(1, iterations=iterations)
        self.iterations = iterations

    def forward(self, images: Tensor, labels: Tensor | None = None) -> None:
        field = self.model.fields(images).hidden
        probability = self.switch_probabilities(images)
        units = self.model.hidden.distribution(probability[..., None] * field)
        capsules = pyro.plate("capsules", self.model.num_capsules, dim=-1)
        with pyro.plate("images", len(images), dim=-2), capsules:
            pyro.sample("capsule_switch", dist.Bernoulli(probability))
            pyro.sample("capsule_hidden", units.to_event(1))

    @torch.no_grad()
    def switch_probabilities(self, images: Tensor) -> Tensor:
        """Compute pi, (B, K), as a constant, because its gradient is 0 at a fixed point."""
        field, switch = self.model.fields(images)
        prior = self.model.switch_bias + switch
        probability = torch.full_like(prior, 0.5)
        for _ in range(self.iterations):
            mean = self.model.hidden.mean(probability[..., None] * field)
            probability = (prior + (field * mean).sum(-1)).sigmoid()
        return probability

    def expectations(self, images: Tensor) -> CapsuleState:
        """Compute E_q[z] = pi and E_q[z h] = pi B'(b + pi m) for images (B, C, H, W)."""
        probability = self.switch_probabilities(images)
        gate = probability[..., None]
        mean = self.model.hidden.mean(gate * self.model.fields(images).hidden)
        return CapsuleState(probability, gate * mean)

    def free_energy(self, images: Tensor) -> Tensor:
        """Compute E_q[E] less the entropy of q, (B,), in nats, for images (B, C, H, W).

        It is -a.x - log f(x) - sum B(b + pi m) - sum_k [pi_k (c_k + Omega_k.x) + H(pi_k)].
        """
        model, probability = self.model, self.switch_probabilities(images)
        field, switch = model.fields(images)
        log_visible = model.visible.log_base(images).flatten(1).sum(1)
        hidden = model.hidden.log_partition(probability[..., None] * field).flatten(1).sum(1)
        logits = model.switch_bias + switch
        entropy = F.binary_cross_entropy(probability, probability, reduction="none")
        return -(log_visible + hidden + (probability * logits + entropy).sum(1))
