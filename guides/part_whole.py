"""The amortised guide to part-whole capsules: an encoder for parts, set transformers above it.

    features           = CNN(image)                                     # four 3x3 convolutions
    t_part, A_part     ~ q(. | attention_pooling(features))             # (B, P), (B, P, 6)
    t_object, A_object ~ q(. | set_transformer({A_i, t_i, identity i})) # (B, K), (B, K, 6)

The objects see the image only through the parts that were drawn. Deeper models have one set
transformer for each level. Presences above the parts are balanced over the batch
(`BalancedLogits`). Otherwise each of them becomes always on or always off within a few hundred
steps, and stays so.

Poses are points (`pose="delta"`, the paper's choice), `"normal"`, or `"low_rank"` (a low-rank plus
diagonal covariance over a pose's six numbers). With points the loss is a MAP objective, not a
bound.

References:
    Smith, Schut, Gal & van der Wilk 2020 (arXiv 2004.03553); encoder and sizes after
    Kosiorek et al. 2019 (arXiv 1906.06818), appendix.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, NamedTuple, Self, TypeVar

import pyro
import pyro.distributions as dist
import torch
import torch.nn.functional as F
from pyro.nn import PyroModule
from torch import Tensor, nn

from capsule_zoo.guides.base import Guide
from capsule_zoo.guides.turns import best_turn, centred, turned
from capsule_zoo.models.blocks import poses
from capsule_zoo.models.blocks.layers import AttentionPooling, BalancedLogits, SetTransformer
from capsule_zoo.models.blocks.leading import over_leading
from capsule_zoo.models.blocks.parent_selection import Capsules
from capsule_zoo.models.blocks.selection import as_presence
from capsule_zoo.models.checks import check_at_least, check_one_of, check_positive
from capsule_zoo.models.part_whole import PartWholeCapsules

# A raw output moves by rate x width in one of Adam's first updates, and a raw 0.1 turns an object
# by 36 degrees. At the full rates the first updates therefore move the objects far from their
# prior. The gradient of the prior then drives the parts off the image, and they never return.
FIT_SETTINGS = MappingProxyType(
    dict(lr={"model": 7.5e-3, "guide": 1.5e-3}, schedule="linear", warmup=50, clip=1e4)
)
POSES = ("delta", "normal", "low_rank")
_OUTPUTS = 7 + 16  # presence logit, raw pose, and features from which deviations are computed
_FULL_SIZE = 3.0  # a raw scale that gives a size of nearly 1, where the prior has the objects
_INITIAL_SCALE = 0.02  # deviation of a fresh normal pose: close to the point that it replaces


class PoseHead(PyroModule):
    """The law of one level's poses, centred at the encoder's output.

    Args:
        features: size of the vector from which deviations are computed, for each capsule.
        capsules: capsules of the level.
        kind: "delta", "normal" or "low_rank".
        rank: columns of the low-rank factor.
    """

    def __init__(self, features: int, capsules: int, kind: str, rank: int = 2) -> None:
        super().__init__()
        self.kind, self.rank, self.features = kind, rank, features
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


class Proposal(NamedTuple):
    """The numbers that define the law of the capsules of one level.

    Attributes:
        logits: logits of the presences, (B, capsules).
        pose: centres of the poses, (B, capsules, 6).
        features: numbers from which deviations are computed, (B, capsules, features).
    """

    logits: Tensor
    pose: Tensor
    features: Tensor


_Posed = TypeVar("_Posed", Capsules, Proposal)


class PartEncoder(Guide):
    """The base of the guides that infer parts from the image and all other levels from the parts.

    Subclasses write `parents`, the proposal for one level given the capsules drawn below it. They
    set `parent_features`, the number of features from which its deviations are computed.

    Args:
        model: the model to invert.
        pose: "delta", "normal" or "low_rank".
        channels: width of the convolutions.
        max_scale: largest part, in units of half an image.
        anisotropy: bound on a part's stretch, or None. Bounded parts become strokes; free ones
            become blobs that are stretched into strokes (`poses.from_parameters`).
        rank: columns of the low-rank factor where `pose="low_rank"`.
        coordinates: whether the pooling gets the position of each feature on the image. Otherwise
            positions follow only from the padding at the image's edge, which is too far away on
            larger images.
        turns: number of turns of the image that are tried; see `capsule_zoo.guides.turns`.
        centred: whether the networks see each image with its ink in the middle. The guide is then
            equivariant under shifts.

    Raises:
        ValueError: another kind of model, an unknown `pose`, a size below 1, or images that are to
            be turned and are not square.
    """

    model_class = PartWholeCapsules
    fit_settings = FIT_SETTINGS
    parent_features: int

    def __init__(
        self,
        model: PartWholeCapsules,
        pose: str = "delta",
        *,
        channels: int = 64,
        max_scale: float = 0.8,
        anisotropy: float | None = 1.6,
        rank: int = 2,
        coordinates: bool = False,
        turns: int = 1,
        centred: bool = False,
    ) -> None:
        super().__init__(model)
        check_one_of("pose", pose, POSES)
        check_at_least(1, channels=channels, rank=rank)
        check_positive(max_scale=max_scale)
        if anisotropy is not None:
            check_positive(anisotropy=anisotropy)
        _check_turns(model, turns)
        self.options: dict[str, Any] = dict(
            channels=channels,
            max_scale=max_scale,
            anisotropy=anisotropy,
            rank=rank,
            coordinates=coordinates,
            turns=turns,
            centred=centred,
        )
        self.pose = pose
        convolutions: list[nn.Module] = []
        inputs = model.image_shape[0]
        for stride in (2, 2, 1, 1):
            convolution = PyroModule[nn.Conv2d](inputs, channels, 3, stride, padding=1)
            convolutions += [convolution, nn.ELU()]
            inputs = channels
        self.encoder = PyroModule[nn.Sequential](*convolutions)
        read = channels + 2 * coordinates
        self.pool = AttentionPooling(read, model.levels[-1].size, _OUTPUTS)
        above = model.levels[:-1]
        features = [self.parent_features] * len(above) + [_OUTPUTS]
        self.pose_heads = PyroModule[nn.ModuleList](
            PoseHead(read, level.size, pose, rank)
            for read, level in zip(features, model.levels, strict=True)
        )

    def with_poses(self, pose: str) -> Self:
        """Return a guide to the same model with the same weights and another law of the poses.

        Train with `"delta"` first, because poses that are sampled from the start underfit. A new
        normal law starts at the delta's point with a deviation of .02.
        """
        return type(self)(self.model, pose, **self.options).copy_matching(self)

    def with_turns(self, turns: int) -> Self:
        """Return a guide with the same parameters that tries `turns` turns of the image."""
        _check_turns(self.model, turns)
        return self.sharing_parameters(options={**self.options, "turns": turns})

    def copy_matching(self, source: PartEncoder) -> Self:
        """Copy every tensor that another guide has under the same name and shape."""
        self.to(next(source.parameters()))
        mine = self.state_dict()
        same = {
            k: v for k, v in source.state_dict().items() if k in mine and mine[k].shape == v.shape
        }
        self.load_state_dict({**mine, **same})
        return self

    def parents(self, index: int, children: Capsules) -> Proposal:
        """Return the proposal for level `index`, given the capsules drawn one level down."""
        raise NotImplementedError(f"{type(self).__name__} must write parents")

    def forward(
        self, images: Tensor, labels: Tensor | None = None, angle: Tensor | None = None
    ) -> Capsules:
        """Draw every level and return the presences and poses of the objects.

        Args:
            angle: turn of each image, (B,), in radians, at which the networks see the image and the
                parts; by default the best of the guide's `turns`.
        """
        if angle is None and self.options["turns"] > 1:
            angle = best_turn(self, images, self.options["turns"])
        seen = images
        frame: Tensor | None = None  # from the view that the networks see to the image
        if self.options["centred"]:
            seen, frame = centred(images)
        if angle is not None:
            seen, turn = turned(seen, angle), poses.rotation(angle)
            frame = turn if frame is None else poses.compose(frame, turn)
        with pyro.plate("images", len(images), dim=-2):
            capsules = self._draw(-1, self._parts(seen), frame)
            for index in reversed(range(len(self.model.levels) - 1)):
                below = capsules if frame is None else _moved(capsules, poses.inverse(frame))
                capsules = self._draw(index, self.parents(index, below), frame)
        return capsules

    def _parts(self, images: Tensor) -> Proposal:
        features = self.encoder(images - 0.5)
        if self.options["coordinates"]:
            features = _with_coordinates(features)
        read = self.pool(features)  # (B, parts, _OUTPUTS)
        bounds = self.options["max_scale"], self.options["anisotropy"]
        pose = poses.from_parameters(read[..., 1:7], 0.01, *bounds)
        return Proposal(read[..., 0], pose, F.elu(read))

    def _draw(self, index: int, proposal: Proposal, frame: Tensor | None) -> Capsules:
        level = self.model.levels[index]
        if frame is not None:
            proposal = _moved(proposal, frame)
        law = self.pose_heads[index](proposal.pose, proposal.features)
        with pyro.plate(level.plate, level.size, dim=-1):
            presence_law = self.model.presence_law(proposal.logits)
            presence = pyro.sample(f"{level.name}_presence", presence_law)
            return Capsules.drawn(level, presence, pyro.sample(f"{level.name}_pose", law))


class AmortizedPartWhole(PartEncoder):
    """The guide q(parts | image) q(objects | parts), with one network evaluation for each image.

    Args:
        model, pose: as for every `PartEncoder`.
        width, heads, blocks, inducing: sizes of the set transformers.
        encoder: other arguments of `PartEncoder`.
    """

    parent_features = _OUTPUTS

    def __init__(
        self,
        model: PartWholeCapsules,
        pose: str = "delta",
        *,
        width: int = 96,
        heads: int = 4,
        blocks: int = 2,
        inducing: int = 16,
        **encoder: Any,
    ) -> None:
        super().__init__(model, pose, **encoder)
        check_at_least(1, width=width, heads=heads, inducing=inducing)
        check_at_least(0, blocks=blocks)
        self.options |= dict(width=width, heads=heads, blocks=blocks, inducing=inducing)
        above = model.levels[:-1]
        self.transformers = PyroModule[nn.ModuleList](
            SetTransformer(7 + child.size, parent.size, _OUTPUTS, width, heads, blocks, inducing)
            for parent, child in zip(above, model.levels[1:], strict=True)
        )
        for transformer in self.transformers:  # parents start upright, in the middle, at full size
            transformer.read_weight.data[..., 1:7] *= 0.1
            transformer.read_bias.data[:, 1:3] += _FULL_SIZE
        self.balance = PyroModule[nn.ModuleList](BalancedLogits(level.size) for level in above)

    def parents(self, index: int, children: Capsules) -> Proposal:
        transformer = self.transformers[index]
        read = over_leading(transformer, self._as_set(children), 2)  # (B, parents, _OUTPUTS)
        logits = self.balance[index](read[..., 0])
        return Proposal(logits, poses.from_parameters(read[..., 1:7]), F.elu(read))

    def _as_set(self, capsules: Capsules) -> Tensor:
        """Return capsules as a set of pose, presence and one-hot identity, (B, n, 7 + n)."""
        there = as_presence(capsules.presence, self.model.relaxed)[..., None]
        *batch, n = capsules.presence.shape
        identity = torch.eye(n, dtype=there.dtype, device=there.device).expand(*batch, n, n)
        return torch.cat([capsules.pose, there, identity], dim=-1)


def _moved(capsules: _Posed, frame: Tensor) -> _Posed:
    """Return the same with poses (B, capsules, 6) moved by one pose for each image, (B, 6)."""
    return capsules._replace(pose=poses.compose(frame[:, None], capsules.pose))


def _with_coordinates(features: Tensor) -> Tensor:
    """Return features (B, channels, H, W) with their x and y as two more channels."""
    identity = poses.identity_like(features).view(1, 2, 3)
    places = F.affine_grid(identity, [1, 1, *features.shape[2:]], align_corners=False)
    places = places.permute(0, 3, 1, 2).expand(len(features), -1, -1, -1)
    return torch.cat([features, places], dim=1)


def _check_turns(model: PartWholeCapsules, turns: int) -> None:
    check_at_least(1, turns=turns)
    _, height, width = model.image_shape
    if turns > 1 and height != width:
        raise ValueError(f"turns above 1 need square images, not {height}x{width}; give turns=1")
