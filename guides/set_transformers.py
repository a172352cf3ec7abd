"""Objects from parts by networks: one set transformer for each level above the parts.

    t_object, A_object = set_transformer({A_i, t_i, identity i})       # (B, K), (B, K, 6)

The children of a level are a set of poses, presences and one-hot identities. Presences are balanced
over the batch (`BalancedLogits`). Otherwise each of them becomes always on or always off within a
few hundred steps, and stays so.

References:
    Lee et al. 2019, "Set Transformer" (arXiv 1810.00825); sizes after Kosiorek et al. 2019
    (arXiv 1906.06818), appendix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from pyro.nn import PyroModule
from torch import Tensor, nn

from capsule_zoo.guides.part_reader import OUTPUTS, Proposal
from capsule_zoo.models.blocks import poses
from capsule_zoo.models.blocks.layers import BalancedLogits, SetTransformer
from capsule_zoo.models.blocks.leading import over_leading
from capsule_zoo.models.blocks.parent_selection import Capsules, Level
from capsule_zoo.models.blocks.selection import as_presence
from capsule_zoo.models.checks import check_at_least
from capsule_zoo.models.part_whole import PartWholeCapsules

_FULL_SIZE = 3.0  # a raw scale that gives a size of nearly 1, where the prior has the objects


@dataclass(frozen=True)
class SetTransformers:
    """The settings of the set transformers that infer each level from the level below.

    Args:
        width, heads, blocks, inducing: sizes of each transformer; see `SetTransformer`.

    Raises:
        ValueError: a size out of range.
    """

    width: int = 96
    heads: int = 4
    blocks: int = 2
    inducing: int = 16

    def __post_init__(self) -> None:
        check_at_least(1, width=self.width, heads=self.heads, inducing=self.inducing)
        check_at_least(0, blocks=self.blocks)

    @property
    def features(self) -> int:
        """The number of features from which the deviations of each pose are computed."""
        return OUTPUTS

    def build(self, levels: Sequence[Level]) -> SetTransformerParents:
        """Return new networks for these levels, from the top down."""
        return SetTransformerParents(self, levels)


class SetTransformerParents(PyroModule):
    """The networks of `SetTransformers` for the levels of one model."""

    def __init__(self, settings: SetTransformers, levels: Sequence[Level]) -> None:
        super().__init__()
        sizes = settings.width, settings.heads, settings.blocks, settings.inducing
        self.transformers = PyroModule[nn.ModuleList](
            SetTransformer(7 + child.size, parent.size, OUTPUTS, *sizes)
            for parent, child in pairwise(levels)
        )
        for transformer in self.transformers:  # parents start upright, in the middle, at full size
            transformer.read_weight.data[..., 1:7] *= 0.1
            transformer.read_bias.data[:, 1:3] += _FULL_SIZE
        self.balance = PyroModule[nn.ModuleList](BalancedLogits(p.size) for p in levels[:-1])

    def forward(self, model: PartWholeCapsules, index: int, children: Capsules) -> Proposal:
        """Return the proposal for level `index`, given the capsules drawn one level down."""
        members = _as_set(children, model.relaxed)
        read = over_leading(self.transformers[index], members, 2)  # (B, parents, OUTPUTS)
        logits = self.balance[index](read[..., 0])
        return Proposal(logits, poses.from_parameters(read[..., 1:7]), F.elu(read))


def _as_set(capsules: Capsules, relaxed: bool) -> Tensor:
    """Return capsules as a set of pose, presence and one-hot identity, (B, n, 7 + n)."""
    there = as_presence(capsules.presence, relaxed)[..., None]
    *batch, n = capsules.presence.shape
    identity = torch.eye(n, dtype=there.dtype, device=there.device).expand(*batch, n, n)
    return torch.cat([capsules.pose, there, identity], dim=-1)
