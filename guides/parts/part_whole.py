"""Guides to part-whole capsules: a part reader, and a module that infers the levels above.

    t_part, A_part     ~ q(. | read_parts(image))                   # (B, P), (B, P, 6)
    t_object, A_object ~ q(. | infer_objects({A_i, t_i}))           # (B, K), (B, K, 6)

Deeper models are inferred level by level. Poses are points (`pose="delta"`, the paper's choice),
`"normal"`, or `"low_rank"` (a low-rank plus diagonal covariance over a pose's six numbers). With
points the loss is a MAP objective, not a bound.

References:
    Smith, Schut, Gal & van der Wilk 2020 (arXiv 2004.03553); encoder and sizes after
    Kosiorek et al. 2019 (arXiv 1906.06818), appendix.
"""

from collections.abc import Callable

import pyro
from pyro.nn import PyroModule
from torch import Tensor, nn

from capsule_zoo.guides.parts.guide import FIT_SETTINGS, PartsGuide, PoseHead
from capsule_zoo.guides.parts.part_reader import OUTPUTS, PartReader, move_capsules
from capsule_zoo.guides.parts.set_transformers import SetTransformers
from capsule_zoo.models.checks import check_at_least
from capsule_zoo.models.common.remembering import Submodule
from capsule_zoo.models.part_whole import PartWholeCapsules
from capsule_zoo.models.parts import poses
from capsule_zoo.models.parts.parent_selection import Capsules


class PartWholeGuide(PartsGuide[PartWholeCapsules]):
    """The guide that encodes an image as parts and infers all higher levels from the parts.

    It is described at the top of this file.

    Args:
        model: the model to invert.
        pose: "delta", "normal" or "low_rank".
        reader: the class of the part reader: `PartReader` or a partial of it.
        above: the class that infers the other levels: `SetTransformers`, `EMObjects` or a partial.
        rank: columns of the low-rank factor where `pose="low_rank"`.

    Raises:
        ValueError: another kind of model, an unknown `pose`, a rank below 1, or images that are to
            be rotated and are not square.
    """

    fit_settings = FIT_SETTINGS
    poses = ("delta", "normal", "low_rank")

    def __init__(
        self,
        model: PartWholeCapsules,
        pose: str = "delta",
        *,
        reader: Callable[..., PartReader] = PartReader,
        above: Callable[..., Submodule] = SetTransformers,
        rank: int = 2,
    ) -> None:
        check_at_least(1, rank=rank)
        super().__init__(model, pose, reader, above)
        self.rank = rank
        self.of_parts = ("read_parts.", f"pose_heads.{len(model.levels) - 1}.")
        self.infer_objects = above(model)
        features = [self.infer_objects.features] * (len(model.levels) - 1) + [OUTPUTS]
        self.pose_heads = PyroModule[nn.ModuleList](
            PoseHead(read, level.size, pose, rank)
            for read, level in zip(features, model.levels, strict=True)
        )

    def forward(
        self, images: Tensor, labels: Tensor | None = None, angle: Tensor | None = None
    ) -> Capsules:
        """Sample every level and return the presences and poses of the objects.

        Args:
            angle: rotation of each image, (B,), in radians, at which networks see the image and the
                parts; by default the best of the reader's `rotations`.
        """
        levels, heads = self.model.levels, self.pose_heads
        view, frame = self._view(images, angle)
        with pyro.plate("images", len(images), dim=-2):
            capsules = self._draw(levels[-1], heads[-1], self.read_parts(view), frame)
            for index in reversed(range(len(levels) - 1)):
                below = capsules if frame is None else move_capsules(capsules, poses.inverse(frame))
                above = self.infer_objects(self.model, index, below)
                capsules = self._draw(levels[index], heads[index], above, frame)
        return capsules
