"""Capsules that depend on one parent each, whose choice of the parent is summed out exactly.

A capsule chooses a parent among the capsules above that are on, or none. Only the parent that it
chooses adds fields to its biases:

    a_k ~ Categorical(none: 1, parent i: z_i rho_ik)
    z_k, h_k ~ the capsule of `models.units.switched_units` under the fields of a_k, or under none

Given the layer above capsules are independent, and each sums over its parents.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from pyro.distributions import Categorical, TorchDistribution
from torch import Tensor
from torch.distributions import constraints

from capsule_zoo.models.units.exponential_family import Units
from capsule_zoo.models.units.switched_units import CapsuleDistribution, CapsuleState


class OneParentDistribution(NamedTuple):
    """The distribution of switches and units with the choice of a parent summed out.

    Attributes:
        log_choice: log p(a_k), (1 + parents, B, K); the first choice is none.
        conditional: the distribution of capsules for each choice; its batch is (1 + parents, B).
    """

    log_choice: Tensor
    conditional: CapsuleDistribution

    @property
    def units(self) -> Units:
        return self.conditional.units

    @property
    def switch_logits(self) -> Tensor:
        """The logits of p(z_k = 1), (B, K)."""
        on, off = (self.choice_and_switch(on).logsumexp(0) for on in (True, False))
        return on - off

    @property
    def switch_probability(self) -> Tensor:
        """The probabilities p(z_k = 1), (B, K)."""
        return self.switch_logits.sigmoid()

    def choice_and_switch(self, on: bool | Tensor) -> Tensor:
        """Compute log p(a_k, z_k), (1 + parents, B, K), of switches that are on or off."""
        logits = self.conditional.switch_logits
        assert logits is not None  # machines with layers have switches
        sign = 2 * torch.as_tensor(on, dtype=logits.dtype, device=logits.device) - 1
        return self.log_choice + F.logsigmoid(sign * logits)

    def mean(self) -> CapsuleState:
        """Compute the expectations E[z] and E[z h]."""
        probability, state = self.log_choice.exp(), self.conditional.mean()
        switch = (probability * state.switch).sum(0)
        return CapsuleState(switch, (probability[..., None] * state.activity).sum(0))

    def hidden(self, switch: Tensor) -> TorchDistribution:
        """Return the distribution of the units, events of size J, given the switches (B, K)."""
        log_weight = self.choice_and_switch(switch).log_softmax(0)
        return OneParentUnits(self.conditional, log_weight, switch)


class OneParentUnits(TorchDistribution):
    """The distribution of the units of capsules, a mixture over the parents of each capsule.

    Batch shape (B, K), event shape (J,).

    Args:
        conditional: the distribution of the capsules for each choice of a parent.
        log_weight: log probability of each choice, (1 + parents, B, K).
        switch: switches of the capsules, (B, K).
    """

    arg_constraints = {}

    def __init__(
        self, conditional: CapsuleDistribution, log_weight: Tensor, switch: Tensor
    ) -> None:
        self.conditional = conditional
        self.log_weight = log_weight
        self.switch = switch
        batch = torch.broadcast_shapes(switch.shape, log_weight.shape[1:])
        super().__init__(batch, conditional.field.shape[-1:], validate_args=False)

    @constraints.dependent_property(event_dim=1)
    def support(self) -> Any:
        return constraints.independent(self.conditional.units.distribution().support, 1)

    def expand(self, batch_shape: torch.Size, _instance: None = None) -> "OneParentUnits":
        """Return the distribution expanded to other batch dims (*batch, K)."""
        return OneParentUnits(self.conditional, self.log_weight, self.switch.expand(batch_shape))

    def log_prob(self, value: Tensor) -> Tensor:
        """Compute the log density (B, K) of units (B, K, J), in nats."""
        units, field = self.conditional.units, self.conditional.field
        without = (units.log_base(value) - units.log_partition()).sum(-1)
        pull = torch.einsum("c...kj,...kj->c...k", field, self.switch[..., None] * value)
        return without + (self.log_weight + pull - self.switch * self.conditional.gain).logsumexp(0)

    @torch.no_grad()
    def sample(self, sample_shape: torch.Size = torch.Size()) -> Tensor:
        """Sample units (*sample_shape, B, K, J): for each capsule a parent, then its units."""
        shape = len(self.log_weight), *self.batch_shape
        logits = self.log_weight.expand(shape).movedim(0, -1)
        selected = F.one_hot(Categorical(logits=logits).sample(sample_shape), shape[0])
        field = torch.einsum("c...kj,...kc->...kj", self.conditional.field, selected.to(logits))
        return self.conditional.units.sample(self.switch[..., None] * field)
