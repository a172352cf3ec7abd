"""The base class of guides that encode an image as parts and infer the objects from the parts.

Such a guide has two halves, modules that it makes from its model. To change one of them is to
change one argument, the class of the module or a partial of it:

>>> reader = partial(PartReader, channels=32)
>>> PartWholeGuide(model, reader=reader, above=partial(SetTransformers, width=48))
>>> PartWholeGuide(model, reader=reader, above=EMObjects)
>>> guide.with_above(EMObjects)                        # the trained reader, other objects

Either way what stands above sees the image only through the parts that were drawn.
"""

from collections.abc import Callable
from types import MappingProxyType
from typing import Any, Self, TypeVar

import pyro
import pyro.distributions as dist
import torch
from pyro.nn import PyroModule
from torch import Tensor, nn

from capsule_zoo.data.registration import without_partials
from capsule_zoo.guides.base import Guide
from capsule_zoo.guides.parts.part_reader import OUTPUTS, PartReader, Proposal, move_capsules
from capsule_zoo.guides.parts.rotations import best_rotation
from capsule_zoo.models.checks import check_one_of
from capsule_zoo.models.common.remembering import Submodule
from capsule_zoo.models.parts.painted_parts import PartsModel
from capsule_zoo.models.parts.parent_selection import Capsules, Level
from capsule_zoo.models.specification import is_submodule, spec

# A raw output moves by rate x width in one of Adam's first updates, and a raw 0.1 rotates an object
# by 36 degrees. At the full rates the first updates therefore move the objects far from their
# prior. The gradient of the prior then drives the parts off the image, and they never return.
FIT_SETTINGS = MappingProxyType(
    dict(lr={"model": 7.5e-3, "guide": 1.5e-3}, schedule="linear", warmup=50, clip=1e4)
)
_INITIAL_SCALE = (
    0.02  # standard deviation of a fresh normal distribution: close to the point that it replaces
)
P = TypeVar("P", bound=PartsModel)
_Copy = TypeVar("_Copy", bound=nn.Module)


class PoseHead(PyroModule):
    """The module with the distribution of a level's poses, or other vectors, around given centers.

    Args:
        features: size of the vector from which standard deviations are computed, for each capsule.
        capsules: capsules of the level.
        kind: "delta", "normal" or "low_rank" (a low-rank plus diagonal covariance).
        rank: columns of the low-rank factor.
        size: size of the vectors.
    """

    def __init__(
        self, features: int, capsules: int, kind: str, rank: int = 2, size: int = 6
    ) -> None:
        super().__init__()
        self.kind = kind
        self.rank = rank
        self.features = features
        self.size = size
        numbers = {"delta": 0, "normal": size, "low_rank": size * (1 + rank)}[kind]
        if numbers:
            self.weight = nn.Parameter(torch.zeros(capsules, features, numbers))
            self.bias = nn.Parameter(torch.zeros(capsules, numbers))
            if kind == "low_rank":  # at zero the factor would have no gradient
                nn.init.normal_(self.bias[:, size:], std=_INITIAL_SCALE / 2)

    def forward(self, loc: Tensor, features: Tensor) -> dist.TorchDistribution:
        if self.kind == "delta":
            return dist.Delta(loc, event_dim=1)
        raw = torch.einsum("...cf,cfo->...co", features, self.weight) + self.bias
        scale = _INITIAL_SCALE * raw[..., : self.size].exp()
        if self.kind == "normal":
            return dist.Normal(loc, scale).to_event(1)
        factor = raw[..., self.size :].unflatten(-1, (self.size, self.rank))
        return dist.LowRankMultivariateNormal(loc, factor, scale.square())


class PartsGuide(Guide[P]):
    """The base class of guides to models of parts; subclasses sample the levels above the parts.

    A subclass makes the module `infer_objects`.

    Args:
        model: the model to invert.
        pose: the distribution of the parts' poses, one of `poses`.
        reader: the class of the part reader: `PartReader` or a partial of it.
        above: the class of `infer_objects`, a class of modules called with the model and the
            capsules below, or a partial of one.
        outputs: number of outputs of the part reader for each part.

    Attributes:
        read_parts: the reader of parts.
        poses: the distributions of poses that the guide offers.
        of_parts: prefixes of the names of tensors that belong to the part reader.

    Raises:
        ValueError: another kind of model, an unknown `pose`, no class in `reader` or `above`, or
            images that are to be rotated and are not square.
    """

    poses: tuple[str, ...] = ("delta", "normal")
    of_parts: tuple[str, ...] = ("read_parts.",)

    read_parts: PartReader
    infer_objects: Any

    def __init__(
        self,
        model: P,
        pose: str,
        reader: Callable[..., PartReader],
        above: Callable[..., Submodule],
        outputs: int = OUTPUTS,
    ) -> None:
        super().__init__(model)
        check_one_of("pose", pose, self.poses)
        _check_serves("reader", reader, PartReader, model)
        _check_serves("above", above, Submodule, model)
        self.pose = pose
        self.read_parts = reader(model, outputs)

    def with_poses(self, pose: str) -> Self:
        """Return a guide with copied weights and another distribution of poses.

        A new normal distribution starts at the delta's point with a standard deviation of .02.
        """
        return self._copy_with(pose=pose)

    def with_above(self, above: Callable[..., Submodule]) -> Self:
        """Return a guide with a copy of the part reader and another module above it.

        >>> routed = guide.with_above(partial(EMObjects, iterations=5))

        Networks of the same settings are copied with their weights; others start untrained.
        """
        return self._copy_with(above=above)

    def with_scope(self, scope: str) -> Self:
        """Return the guide for `model.with_scope`, with shared parameters."""
        return self.on_model(self.model.with_scope(scope))

    def _copy_with(self, **changes: Any) -> Self:
        """Return a guide with other arguments and copies of the weights that fit."""
        arguments = {**self.arguments, **changes, "model": self.model}
        same = spec(arguments.get("above")) == spec(self.arguments.get("above"))
        return copy_matching(self, type(self)(**arguments), ("",) if same else self.of_parts)

    def _view(self, images: Tensor, angle: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the images as networks see them: rotated by an angle, or as the reader does."""
        if angle is None and self.read_parts.rotations > 1:
            angle = best_rotation(self, images, self.read_parts.rotations)
        return self.read_parts.view(images, angle)

    def _draw(
        self, level: Level, head: PoseHead, proposal: Proposal, frame: Tensor | None
    ) -> Capsules:
        """Sample the presences and poses of one level's capsules."""
        if frame is not None:
            proposal = move_capsules(proposal, frame)
        with pyro.plate(level.plate, level.size, dim=-1):
            presence_distribution = self.model.presence_distribution(proposal.logits)
            presence = pyro.sample(f"{level.name}_presence", presence_distribution)
            distribution = self._pose_distribution(head, proposal, presence)
            return Capsules.from_sites(
                level, presence, pyro.sample(f"{level.name}_pose", distribution)
            )

    def _pose_distribution(
        self, head: PoseHead, proposal: Proposal, presence: Tensor
    ) -> dist.TorchDistribution:
        """Return the distribution of a level's poses, given the values of its presence site."""
        return head(proposal.pose, proposal.features)


def _check_serves(name: str, maker: Any, base: type, model: PartsModel) -> None:
    """Raise ValueError unless an argument makes modules of a class that serves the model."""
    kind: Any = without_partials(maker)
    if not is_submodule(maker) or not issubclass(kind, base):
        label = kind.__name__ if isinstance(kind, type) else f"{maker!r:.60}"
        raise ValueError(
            f"{name} must be {base.__name__}, a subclass of it or a functools.partial of one, such "
            f"as partial(PartReader, channels=32), not {label}"
        )
    if not isinstance(model, kind.model_class):
        raise ValueError(
            f"{name} is {kind.__name__}, which serves {kind.model_class.__name__}, not "
            f"{type(model).__name__}; leave it out for the usual one"
        )


def copy_matching(source: nn.Module, target: _Copy, prefixes: tuple[str, ...] = ("",)) -> _Copy:
    """Copy into a module every tensor of another module that has an equal name and shape.

    Args:
        source, target: the two modules; the target is moved to the device of the source.
        prefixes: prefixes of the names of tensors that are copied; by default all are copied.
    """
    target.to(next(source.parameters()))
    mine, theirs = target.state_dict(), source.state_dict()
    candidates = {k: v for k, v in theirs.items() if k.startswith(prefixes) and k in mine}
    same = {k: v for k, v in candidates.items() if mine[k].shape == v.shape}
    target.load_state_dict({**mine, **same})
    return target
