"""Networks that infer objects from parts: one set transformer for each level above the parts.

    t_object, A_object = set_transformer({A_i, t_i, identity i})       # (B, K), (B, K, 6)

The children of a level are a set of poses, presences and one-hot identities. Presences are balanced
over the batch (`BalancedLogits`). Otherwise each of them becomes always on or always off within a
few hundred steps, and stays so.

References:
    Lee et al. 2019, "Set Transformer" (arXiv 1810.00825); sizes after Kosiorek et al. 2019
    (arXiv 1906.06818), appendix.
"""

from itertools import pairwise

import torch
from pyro.nn import PyroModule
from torch import Tensor, nn

from capsule_zoo.guides.parts.part_reader import OUTPUTS, Proposal
from capsule_zoo.models.common.remembering import Submodule
from capsule_zoo.models.networks.layers import BalancedLogits, SetTransformer, elu
from capsule_zoo.models.networks.leading import over_leading
from capsule_zoo.models.part_whole import PartWholeCapsules
from capsule_zoo.models.parts import poses
from capsule_zoo.models.parts.parent_selection import Capsules, Level, as_presence

FULL_SIZE = 3.0  # raw scale of a size of nearly 1, which is the prior size of objects


class SetTransformers(Submodule, PyroModule):
    """The module of set transformers, each of which infers a level from the level below.

    Args:
        model: part-whole capsules.
        width, heads, blocks, inducing: see `SetTransformer`.

    Attributes:
        features: the number of features from which the standard deviations of each pose are
            computed.

    Raises:
        ValueError: a size out of range.
    """

    model_class = PartWholeCapsules

    features = OUTPUTS

    def __init__(
        self,
        model: PartWholeCapsules,
        *,
        width: int = 96,
        heads: int = 4,
        blocks: int = 2,
        inducing: int = 16,
    ) -> None:
        super().__init__()
        levels, sizes = model.levels, (width, heads, blocks, inducing)
        self.transformers = PyroModule[nn.ModuleList](
            upright(SetTransformer(7 + child.groups, parent.size, OUTPUTS, *sizes))
            for parent, child in pairwise(levels)
        )
        self.balance = PyroModule[nn.ModuleList](BalancedLogits(p.size) for p in levels[:-1])

    def forward(self, model: PartWholeCapsules, index: int, children: Capsules) -> Proposal:
        """Return the proposal for level `index`, given the capsules drawn one level down."""
        level = model.levels[index + 1]
        members = as_set(level, children.pose, children.presence, model.relaxed)
        read = over_leading(self.transformers[index], members, 2)  # (B, parents, OUTPUTS)
        logits = self.balance[index](read[..., 0])
        return Proposal(logits, poses.from_parameters(read[..., 1:7]), elu(read))


@torch.no_grad()
def upright(transformer: SetTransformer) -> SetTransformer:
    """Initialize the raw poses, outputs 1 to 6, to upright, centered and full size, in place."""
    transformer.read_weight[..., 1:7] *= 0.1
    transformer.read_bias[:, 1:3] += FULL_SIZE
    return transformer


def as_set(
    level: Level, pose: Tensor, presence: Tensor, relaxed: bool, *features: Tensor
) -> Tensor:
    """Return capsules as a set (B, n, 7 + f + groups): pose, presence, features, one-hot identity.

    Exchangeable capsules have one identity.

    Args:
        level: level of the n capsules.
        pose: (B, n, 6).
        presence: (B, n), the values of a presence site.
        relaxed: whether the site is relaxed.
        features: further numbers of each capsule, (B, n, f) in all.
    """
    presence_column = as_presence(presence, relaxed)[..., None]
    groups = torch.eye(level.groups, dtype=presence_column.dtype, device=presence_column.device)
    identity = level.spread(groups, -2).expand(*presence.shape, -1)
    return torch.cat([pose, presence_column, *features, identity], dim=-1)
