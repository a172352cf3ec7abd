"""Guides to part-whole capsules: a reader of parts, and what infers the levels above them.

    t_part, A_part     ~ q(. | read_parts(image))                   # (B, P), (B, P, 6)
    t_object, A_object ~ q(. | infer_parents({A_i, t_i}))           # (B, K), (B, K, 6)

The guide is made of two objects, and to change one of them is to change one argument:

>>> PartWholeGuide(model, reader=PartReader(channels=32), above=SetTransformers(width=48))
>>> PartWholeGuide(model, reader=PartReader(channels=32), above=EMObjects(iterations=3))
>>> guide.with_objects(EMObjects(3))                   # the trained reader, other objects

`AmortizedPartWhole` is the first pair, with one argument for each size, and `RoutingPartWhole` the
second. Either way the objects see the image only through the parts that were drawn. Deeper models
are inferred level by level.

Poses are points (`pose="delta"`, the paper's choice), `"normal"`, or `"low_rank"` (a low-rank plus
diagonal covariance over a pose's six numbers). With points the loss is a MAP objective, not a
bound.

References:
    Smith, Schut, Gal & van der Wilk 2020 (arXiv 2004.03553); encoder and sizes after
    Kosiorek et al. 2019 (arXiv 1906.06818), appendix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Protocol, Self

import pyro
import pyro.distributions as dist
import torch
from pyro.nn import PyroModule
from torch import Tensor, nn

from capsule_zoo.guides.base import Guide
from capsule_zoo.guides.parts.part_reader import OUTPUTS, PartReader, Proposal, moved
from capsule_zoo.guides.parts.set_transformers import SetTransformers
from capsule_zoo.guides.parts.turns import best_turn
from capsule_zoo.models.checks import check_at_least, check_one_of
from capsule_zoo.models.part_whole import PartWholeCapsules
from capsule_zoo.models.parts import poses
from capsule_zoo.models.parts.parent_selection import Capsules, Level

# A raw output moves by rate x width in one of Adam's first updates, and a raw 0.1 turns an object
# by 36 degrees. At the full rates the first updates therefore move the objects far from their
# prior. The gradient of the prior then drives the parts off the image, and they never return.
FIT_SETTINGS = MappingProxyType(
    dict(lr={"model": 7.5e-3, "guide": 1.5e-3}, schedule="linear", warmup=50, clip=1e4)
)
POSES = ("delta", "normal", "low_rank")
_INITIAL_SCALE = 0.02  # deviation of a fresh normal pose: close to the point that it replaces

# Names of tensors in weights that were saved before the guide was made of two objects
_FORMER_NAMES = {
    "encoder.": "read_parts.encoder.",
    "pool.": "read_parts.pool.",
    "transformers.": "infer_parents.transformers.",
    "balance.": "infer_parents.balance.",
}


class PoseHead(PyroModule):
    """The law of one level's poses, centered at the encoder's output.

    Args:
        features: size of the vector from which deviations are computed, for each capsule.
        capsules: capsules of the level.
        kind: "delta", "normal" or "low_rank".
        rank: columns of the low-rank factor.
    """

    def __init__(self, features: int, capsules: int, kind: str, rank: int = 2) -> None:
        super().__init__()
        self.kind = kind
        self.rank = rank
        self.features = features
        numbers = {"delta": 0, "normal": 6, "low_rank": 6 * (1 + rank)}[kind]
        if numbers:
            self.weight = nn.Parameter(torch.zeros(capsules, features, numbers))
            self.bias = nn.Parameter(torch.zeros(capsules, numbers))
            if kind == "low_rank":  # at zero the factor would have no gradient
                nn.init.normal_(self.bias[:, 6:], std=_INITIAL_SCALE / 2)

    def forward(self, loc: Tensor, features: Tensor) -> dist.TorchDistribution:
        if self.kind == "delta":
            return dist.Delta(loc, event_dim=1)
        raw = torch.einsum("...cf,cfo->...co", features, self.weight) + self.bias
        scale = _INITIAL_SCALE * raw[..., :6].exp()
        if self.kind == "normal":
            return dist.Normal(loc, scale).to_event(1)
        factor = raw[..., 6:].unflatten(-1, (6, self.rank))
        return dist.LowRankMultivariateNormal(loc, factor, scale.square())

    def copy_from(self, trained: PoseHead) -> None:
        """Copy the weights of another head, if it computes the same numbers."""
        theirs, mine = trained.state_dict(), self.state_dict()
        if {k: v.shape for k, v in theirs.items()} == {k: v.shape for k, v in mine.items()}:
            self.load_state_dict(theirs)


class Above(Protocol):
    """The settings of whatever infers the levels above the parts, such as `SetTransformers`."""

    @property
    def features(self) -> int:
        """The number of features from which the deviations of each pose are computed."""

    def build(
        self, levels: Sequence[Level]
    ) -> Callable[[PartWholeCapsules, int, Capsules], Proposal]:
        """Return what proposes level `index` of a model from the capsules of the level below.

        Args:
            levels: the levels of the model, from the top down.
        """


class PartWholeGuide(Guide[PartWholeCapsules]):
    """The guide that reads parts off the image and infers all other levels from the parts.

    It is described at the top of this file.

    Args:
        model: the model to invert.
        pose: "delta", "normal" or "low_rank".
        reader: the settings of the reader of parts.
        above: the settings of what infers the other levels, `SetTransformers` or `EMObjects`.
        rank: columns of the low-rank factor where `pose="low_rank"`.

    Raises:
        ValueError: another kind of model, an unknown `pose`, a rank below 1, or images that are to
            be turned and are not square.
    """

    fit_settings = FIT_SETTINGS

    def __init__(
        self,
        model: PartWholeCapsules,
        pose: str = "delta",
        *,
        reader: PartReader = PartReader(),  # noqa: B008  # frozen
        above: Above = SetTransformers(),  # noqa: B008  # frozen
        rank: int = 2,
    ) -> None:
        super().__init__(model)
        check_one_of("pose", pose, POSES)
        check_at_least(1, rank=rank)
        self.pose = pose
        self.reader = reader
        self.above = above
        self.rank = rank
        self.read_parts = reader.build(model.image_shape, model.levels[-1].size)
        features = [above.features] * (len(model.levels) - 1) + [OUTPUTS]
        self.pose_heads = PyroModule[nn.ModuleList](
            PoseHead(read, level.size, pose, rank)
            for read, level in zip(features, model.levels, strict=True)
        )
        self.infer_parents = above.build(model.levels)

    def with_poses(self, pose: str) -> PartWholeGuide:
        """Return a guide to the same model with the same weights and another law of the poses.

        A new normal law starts at the delta's point with a deviation of .02. The weights are
        copies. The paper finds that poses which are sampled from the start give a looser bound than
        points that are widened later. The record `part-whole/sensitivity` has the opposite: 393
        nats for sampled poses and 326 for points first, after as many updates in all, but with the
        model frozen in the last sixth of them, and from one seed. Points first find objects that
        say more of the class.
        """
        return self._varied(pose, self.above)

    def with_objects(self, above: Above) -> PartWholeGuide:
        """Return a guide with a copy of the reader of parts, and other objects above the parts.

        >>> routed = guide.with_objects(EMObjects(3))

        Networks of the same settings are copied with their weights; others start untrained.
        """
        return self._varied(self.pose, above)

    def with_turns(self, turns: int) -> Self:
        """Return a guide with the same parameters that tries `turns` turns of the image."""
        reader = replace(self.reader, turns=turns)
        reader.check_images_turn(self.model.image_shape)
        return self.sharing_parameters(reader=reader)

    def _varied(self, pose: str, above: Above) -> PartWholeGuide:
        """Return a guide with copies of all weights that have a place in it."""
        made = PartWholeGuide(self.model, pose, reader=self.reader, above=above, rank=self.rank)
        made.to(next(self.parameters()))
        made.read_parts.load_state_dict(self.read_parts.state_dict())
        made.pose_heads[-1].copy_from(self.pose_heads[-1])
        if above == self.above:
            for head, trained in zip(made.pose_heads, self.pose_heads, strict=True):
                head.copy_from(trained)
            theirs, mine = self.infer_parents, made.infer_parents
            if isinstance(theirs, nn.Module) and isinstance(mine, nn.Module):
                mine.load_state_dict(theirs.state_dict())
        return made

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *others: Any) -> None:
        """Take weights under the names that they had before the guide was made of two objects."""
        for former, name in _FORMER_NAMES.items():
            start = prefix + former
            for key in [key for key in state if key.startswith(start)]:
                state[prefix + name + key.removeprefix(start)] = state.pop(key)
        super()._load_from_state_dict(state, prefix, *others)

    def parents(self, index: int, children: Capsules) -> Proposal:
        """Return the proposal for level `index`, given the capsules drawn one level down."""
        return self.infer_parents(self.model, index, children)

    def forward(
        self, images: Tensor, labels: Tensor | None = None, angle: Tensor | None = None
    ) -> Capsules:
        """Draw every level and return the presences and poses of the objects.

        Args:
            angle: turn of each image, (B,), in radians, at which the networks see the image and the
                parts; by default the best of the reader's `turns`.
        """
        if angle is None and self.reader.turns > 1:
            angle = best_turn(self, images, self.reader.turns)
        seen, frame = self.reader.view(images, angle)
        with pyro.plate("images", len(images), dim=-2):
            capsules = self._draw(-1, self.read_parts(seen), frame)
            for index in reversed(range(len(self.model.levels) - 1)):
                below = capsules if frame is None else moved(capsules, poses.inverse(frame))
                capsules = self._draw(index, self.parents(index, below), frame)
        return capsules

    def _draw(self, index: int, proposal: Proposal, frame: Tensor | None) -> Capsules:
        level = self.model.levels[index]
        if frame is not None:
            proposal = moved(proposal, frame)
        law = self.pose_heads[index](proposal.pose, proposal.features)
        with pyro.plate(level.plate, level.size, dim=-1):
            presence_law = self.model.presence_law(proposal.logits)
            presence = pyro.sample(f"{level.name}_presence", presence_law)
            return Capsules.drawn(level, presence, pyro.sample(f"{level.name}_pose", law))


class AmortizedPartWhole(PartWholeGuide):
    """The guide q(parts | image) q(objects | parts), with one network evaluation for each image.

    It is a `PartWholeGuide` with `SetTransformers` above the parts.

    Args:
        model: the model to invert.
        pose: "delta", "normal" or "low_rank".
        width, heads, blocks, inducing: sizes of the set transformers.
        rank: columns of the low-rank factor where `pose="low_rank"`.
        channels: width of the convolutions.
        max_scale: largest part, in units of half an image.
        anisotropy: bound on a part's stretch, or None. Bounded parts become strokes; free ones
            become blobs that are stretched into strokes (`poses.from_parameters`).
        coordinates: whether the reader of parts gets the position of each feature on the image.
            Otherwise positions follow only from the padding at the image's edge, which is too far
            away on larger images.
        turns: number of turns of the image that are tried; see `capsule_zoo.guides.parts.turns`.
        centered: whether the networks see each image with its ink in the middle. The guide is then
            equivariant under shifts.

    Raises:
        ValueError: another kind of model, an unknown `pose`, a size below 1, or images that are to
            be turned and are not square.
    """

    def __init__(
        self,
        model: PartWholeCapsules,
        pose: str = "delta",
        *,
        width: int = 96,
        heads: int = 4,
        blocks: int = 2,
        inducing: int = 16,
        channels: int = 64,
        max_scale: float = 0.8,
        anisotropy: float | None = 1.6,
        rank: int = 2,
        coordinates: bool = False,
        turns: int = 1,
        centered: bool = False,
    ) -> None:
        super().__init__(
            model,
            pose,
            reader=PartReader(channels, max_scale, anisotropy, coordinates, turns, centered),
            above=SetTransformers(width, heads, blocks, inducing),
            rank=rank,
        )
