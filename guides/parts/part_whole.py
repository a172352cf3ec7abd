"""Guides to part-whole capsules: a part reader, and a module that infers the levels above.

    t_part, A_part     ~ q(. | read_parts(image))                   # (B, P), (B, P, 6)
    t_object, A_object ~ q(. | infer_objects({A_i, t_i}))           # (B, K), (B, K, 6)

Deeper models are inferred level by level. They can be trained level by level, too:

>>> deeper = guide.with_level_on_top(32)              # of a trained guide; a new model, too
>>> data = Split(deeper.reads(mnist.train.images), None, "groups")
>>> fit(deeper.model.with_scope("objects"), deeper.with_scope("objects"), data, epochs=2)

Poses are points (`pose="delta"`, the paper's choice),
`"normal"`, or `"low_rank"` (a low-rank plus diagonal covariance over a pose's six numbers). With
points the loss is a MAP objective, not a bound.

References:
    Smith, Schut, Gal & van der Wilk 2020 (arXiv 2004.03553); encoder and sizes after
    Kosiorek et al. 2019 (arXiv 1906.06818), appendix.
"""

from collections.abc import Callable
from typing import Self

import pyro
import torch
from pyro import poutine
from pyro.nn import PyroModule
from torch import Tensor, nn

from capsule_zoo.guides.parts.guide import FIT_SETTINGS, PartsGuide, PoseHead
from capsule_zoo.guides.parts.part_reader import OUTPUTS, PartReader, Proposal, move_capsules
from capsule_zoo.guides.parts.set_transformers import SetTransformers
from capsule_zoo.models.checks import check_at_least
from capsule_zoo.models.common.modes import eval_mode, use_seed
from capsule_zoo.models.common.remembering import Submodule
from capsule_zoo.models.part_whole import PartWholeCapsules, shift_levels
from capsule_zoo.models.parts import poses
from capsule_zoo.models.parts.painted_parts import ObjectPose
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

    @torch.no_grad()
    def with_level_on_top(self, objects: int, pose: ObjectPose | None = None) -> Self:
        """Return a guide to `model.with_level_on_top`, with copies of the weights below it.

        Args: as for `PartWholeCapsules.with_level_on_top`.

        Raises:
            ValueError: `objects` is below 1.
        """
        model = self.model.with_level_on_top(objects, pose)
        deeper = type(self)(**{**self.arguments, "model": model}).to(model.template_logits)
        lists = "infer_objects.transformers", "infer_objects.balance", "pose_heads"
        weights = shift_levels(self.state_dict(), *lists)
        deeper.load_state_dict({**deeper.state_dict(), **weights})
        return deeper

    @torch.no_grad()
    def reads(self, images: Tensor, level: int = 1, batch_size: int = 500, seed: int = 0) -> Tensor:
        """Encode images as capsules of a level, given samples of the levels below it.

        Args:
            level: index of the level. Capsules of level 1 are the data of the scope "objects".

        Returns:
            Logits of presences, and poses, (N, 1, capsules, 7).

        Raises:
            ValueError: the part reader rotates or centers images, so that poses would be in another
                frame than the networks see.
        """
        if self.read_parts.rotations > 1 or self.read_parts.centered:
            raise ValueError(
                "reads needs a part reader that sees images as they are; make the guide with "
                "rotations=1 and centered=False"
            )
        guide, name, rows = self.discretize(), self.model.levels[level].name, []
        with use_seed(seed), eval_mode(guide):
            for batch in images.split(batch_size):
                nodes = poutine.trace(guide).get_trace(batch).nodes
                logits = nodes[f"{name}_presence"]["fn"].logits
                rows.append(torch.cat([logits[..., None], nodes[f"{name}_pose"]["value"]], -1))
        return torch.cat(rows).unsqueeze(-3)

    def forward(
        self, images: Tensor, labels: Tensor | None = None, angle: Tensor | None = None
    ) -> Capsules:
        """Sample every level and return the presences and poses of the objects.

        Args:
            angle: rotation of each image, (B,), in radians, at which networks see the image and the
                parts; by default the best of the reader's `rotations`.
        """
        levels, heads = self.model.levels, self.pose_heads
        frame: Tensor | None = None
        if self.model.scope == "objects":
            levels, read = levels[:2], _from_reads(images)
            head = PoseHead(6, levels[-1].size, "delta")  # the poses are data
        else:
            view, frame = self._view(images, angle)
            read, head = self.read_parts(view), heads[-1]
        with pyro.plate("images", len(images), dim=-2):
            capsules = self._draw(levels[-1], head, read, frame)
            for index in reversed(range(len(levels) - 1)):
                below = capsules if frame is None else move_capsules(capsules, poses.inverse(frame))
                above = self.infer_objects(self.model, index, below)
                capsules = self._draw(levels[index], heads[index], above, frame)
        return capsules


def _from_reads(reads: Tensor) -> Proposal:
    """Unpack the capsules of `PartWholeGuide.reads`."""
    logits, pose = reads.squeeze(-3).split([1, 6], dim=-1)
    return Proposal(logits.squeeze(-1), pose, pose)
