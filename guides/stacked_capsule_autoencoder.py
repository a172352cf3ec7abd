"""Guides to stacked capsule autoencoders: a reader of parts, and what infers the objects.

    d_m, x_m, z_m     ~ q(. | read_parts(image))            # presence, pose, feature of each part
    t_k, OV_k, c_k    ~ q(. | infer_objects({d, x, z}))     # the same of each object

As in the part-whole guides, the objects are an argument:

>>> StackedCapsuleGuide(model, objects=SetTransformerObjects())   # the paper's encoder
>>> StackedCapsuleGuide(model, objects=EMConstellations(3))       # EM steps, no network

Poses and features are points (`pose="delta"`, as in the paper) or normal. A presence is relaxed by
noise on its logit. With `noise="uniform"` it is the paper's, uniform and of width 4; with
`"concrete"` it is the model's own Concrete law; `"none"` adds nothing. Of the discrete model the
presences are Bernoulli, whatever the noise.

The encoder of objects sees the presences and poses of the parts without their gradients, as in the
paper, unless `stop_inputs=False`. Features of parts keep their gradients, as in the authors'
program. A one-hot identity stands for the template that the paper shows the encoder.

References:
    Kosiorek, Sabour, Teh & Hinton 2019 (arXiv 1906.06818), sections 2.1 to 2.3 and the appendix.
    EM on votes: Hinton, Sabour & Frosst 2018, "Matrix capsules with EM routing".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

import pyro
import pyro.distributions as dist
import torch
import torch.nn.functional as F
from pyro.nn import PyroModule
from torch import Tensor, nn

from capsule_zoo.guides.base import Guide
from capsule_zoo.guides.part_reader import PartReader
from capsule_zoo.guides.routing_part_whole import activation, best_pose
from capsule_zoo.guides.set_transformers import TransformerSizes, as_set
from capsule_zoo.models.blocks import poses
from capsule_zoo.models.blocks.leading import over_leading
from capsule_zoo.models.blocks.object_votes import (
    FeaturedCapsules,
    component_law,
    mixing_logits,
    placed,
)
from capsule_zoo.models.blocks.selection import as_presence
from capsule_zoo.models.checks import check_at_least, check_one_of, check_positive
from capsule_zoo.models.stacked_capsule_autoencoder import StackedCapsuleAutoencoder

POSES = ("delta", "normal")
NOISES = ("uniform", "concrete", "none")
_INITIAL_SCALE = 0.02  # deviation of a fresh normal law: close to the point that it replaces


class NoisyLogit(dist.Uniform):
    """The law of a logit with uniform noise around it; probes read its `logits`.

    Args:
        logits: centers.
        width: width of the noise.
    """

    def __init__(self, logits: Tensor, width: float) -> None:
        self.logits = logits
        self.width = width
        super().__init__(logits - width / 2, logits + width / 2, validate_args=False)

    def expand(self, batch_shape: torch.Size, _instance: None = None) -> NoisyLogit:
        """Return the same law with more batch dims."""
        return NoisyLogit(self.logits.expand(batch_shape), self.width)

    def log_prob(self, value: Tensor) -> Tensor:
        """Compute the log density, with a margin at the ends for rounded draws."""
        inside = (value - self.logits).abs() <= self.width / 2 * (1 + 1e-5)
        density = torch.full_like(value - self.logits, 1 / self.width)
        return torch.where(inside, density, 0.0).log()


class SureLogit(dist.Delta):
    """The law of a logit without noise; probes read its `logits`."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits
        super().__init__(logits)

    def expand(self, batch_shape: torch.Size, _instance: None = None) -> SureLogit:
        """Return the same law with more batch dims."""
        return SureLogit(self.logits.expand(batch_shape))


class FeaturedProposal(NamedTuple):
    """The numbers that define the law of the capsules of one level.

    Attributes:
        logits: logits of the presences, (B, capsules).
        pose: centers of the poses, (B, capsules, 6).
        feature: centers of the features, (B, capsules, F).
        numbers: numbers from which deviations are computed, (B, capsules, N).
    """

    logits: Tensor
    pose: Tensor
    feature: Tensor
    numbers: Tensor


class CenteredLaw(PyroModule):
    """A law of vectors around given centers: points, or normal laws with learned deviations.

    Args:
        capsules: capsules of the level.
        numbers: size of the vector from which the deviations of a capsule are computed.
        size: size of the vectors.
        kind: "delta" or "normal".
    """

    def __init__(self, capsules: int, numbers: int, size: int, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind == "normal":
            self.weight = nn.Parameter(torch.zeros(capsules, numbers, size))
            self.bias = nn.Parameter(torch.zeros(capsules, size))

    def forward(self, center: Tensor, numbers: Tensor) -> dist.TorchDistribution:
        if self.kind == "delta":
            return dist.Delta(center, event_dim=1)
        raw = torch.einsum("...cn,cns->...cs", numbers, self.weight) + self.bias
        return dist.Normal(center, _INITIAL_SCALE * raw.exp()).to_event(1)


class Objects(Protocol):
    """The settings of whatever infers the objects, such as `SetTransformerObjects`."""

    def build(self, model: StackedCapsuleAutoencoder) -> Any:
        """Return a module that proposes objects: called on the model and on parts.

        It has an attribute `numbers`, the size of the vectors from which deviations are computed.
        """


@dataclass(frozen=True)
class SetTransformerObjects(TransformerSizes):
    """The settings of a set transformer that infers objects from parts, as in the paper."""

    width: int = 64

    def build(self, model: StackedCapsuleAutoencoder) -> TransformedObjects:
        """Return a new network for the objects and parts of the model."""
        return TransformedObjects(self, model)


class TransformedObjects(PyroModule):
    """The network of `SetTransformerObjects`, from parts to a proposal for the objects."""

    def __init__(self, settings: SetTransformerObjects, model: StackedCapsuleAutoencoder) -> None:
        super().__init__()
        objects, parts = (level.size for level in model.levels)
        self.numbers = 7 + model.object_features
        inputs = 7 + model.part_features + parts
        self.transformer = settings.network(inputs, objects, self.numbers)

    def forward(
        self, model: StackedCapsuleAutoencoder, parts: FeaturedCapsules
    ) -> FeaturedProposal:
        members = as_set(parts.pose, parts.presence, model.relaxed, parts.feature)
        read = over_leading(self.transformer, members, 2)  # (B, objects, numbers)
        pose = poses.from_parameters(read[..., 1:7])
        return FeaturedProposal(read[..., 0], pose, read[..., 7:], F.elu(read))


@dataclass(frozen=True)
class EMConstellations:
    """The settings of EM steps that infer objects from parts by the model's own votes.

    Args:
        iterations: number of EM steps.

    Raises:
        ValueError: `iterations` below 1.
    """

    iterations: int = 3

    def __post_init__(self) -> None:
        check_at_least(1, iterations=self.iterations)

    def build(self, model: StackedCapsuleAutoencoder) -> RoutedObjects:
        """Return the EM steps for the objects of the model."""
        return RoutedObjects(self.iterations, model)


class RoutedObjects(PyroModule):
    """Objects by EM: soft assignments of parts, the best poses, then the odds of each presence.

    No network sees the parts. The feature of an object is one learned vector for all images, so
    that its constellation is rigid. Parts that are absent have no say.
    """

    def __init__(self, iterations: int, model: StackedCapsuleAutoencoder) -> None:
        super().__init__()
        self.iterations = iterations
        self.numbers = 7
        self.feature = nn.Parameter(0.1 * torch.randn(model.levels[0].size, model.object_features))

    def forward(
        self, model: StackedCapsuleAutoencoder, parts: FeaturedCapsules
    ) -> FeaturedProposal:
        relation = model.relation_of(self.feature)
        identity = poses.identity_like(parts.pose)
        transform = (relation.pose - identity).transpose(0, 1)  # (M, K, 6)
        precision = parts.pose.new_tensor([model.sigma_top**-2] * 3)
        there = as_presence(parts.presence, model.relaxed)[..., None]
        batch, number = parts.presence.shape[:-1], model.levels[0].size
        logits = parts.pose.new_full((*batch, number), model.prior_logit)
        pose = identity.expand(*batch, number, 6)
        for _ in range(self.iterations):
            votes = placed(relation, pose, F.logsigmoid(logits))
            density = self._density(model, votes, parts, there)
            share = (density + mixing_logits(votes, model.epsilon)).softmax(-1)[..., 1:]
            weight = there * share / votes.scale.square()
            pose = best_pose(parts.pose, transform, weight, precision)
            votes = placed(relation, pose, F.logsigmoid(logits))
            density = self._density(model, votes, parts, there)
            affinity = F.logsigmoid(relation.presence_logits).T
            logits = model.prior_logit + activation(logits, affinity, density, model.epsilon)
        feature = self.feature.expand(*batch, *self.feature.shape)
        numbers = torch.cat([logits[..., None].tanh(), pose], dim=-1)
        return FeaturedProposal(logits, pose, feature, numbers)

    @staticmethod
    def _density(
        model: StackedCapsuleAutoencoder, votes: Any, parts: FeaturedCapsules, there: Tensor
    ) -> Tensor:
        """Return the log density of each part's pose by its parent, zero for absent parts."""
        law = component_law(votes, model.sigma_dummy)
        return there * law.log_prob(parts.pose[..., None, :])


class StackedCapsuleGuide(Guide[StackedCapsuleAutoencoder]):
    """The guide that reads parts off the image and infers the objects from the parts.

    It is described at the top of this file.

    Args:
        model: the model to invert.
        pose: the law of poses and features, "delta" or "normal".
        reader: the settings of the reader of parts. It must see each image as it is.
        objects: the settings of what infers the objects.
        noise: "uniform", "concrete" or "none".
        noise_width: width of the uniform noise on a logit.
        stop_inputs: whether presences and poses of the parts reach the objects without gradients.

    Raises:
        ValueError: another kind of model, an unknown `pose` or `noise`, a width that is not
            positive, or a reader that turns or centers images.
    """

    def __init__(
        self,
        model: StackedCapsuleAutoencoder,
        pose: str = "delta",
        *,
        reader: PartReader = PartReader(),  # noqa: B008  # frozen
        objects: Objects = SetTransformerObjects(),  # frozen
        noise: str = "uniform",
        noise_width: float = 4.0,
        stop_inputs: bool = True,
    ) -> None:
        super().__init__(model)
        check_one_of("pose", pose, POSES)
        _check_noise(noise, noise_width)
        if reader.turns > 1 or reader.centered:
            raise ValueError(
                f"reader must see each image as it is, not with turns={reader.turns} and "
                f"centered={reader.centered}; give a PartReader with turns=1 and centered=False"
            )
        self.pose = pose
        self.reader = reader
        self.objects = objects
        self.noise = noise
        self.noise_width = noise_width
        self.stop_inputs = stop_inputs
        objects_level, parts_level = model.levels
        outputs = 7 + model.part_features
        self.read_parts = reader.build(model.image_shape, parts_level.size, outputs)
        self.infer_objects = objects.build(model)
        parts = parts_level.size, outputs
        wholes = objects_level.size, self.infer_objects.numbers
        self.part_pose_law = CenteredLaw(*parts, 6, pose)
        self.part_feature_law = CenteredLaw(*parts, model.part_features, pose)
        self.object_pose_law = CenteredLaw(*wholes, 6, pose)
        self.object_feature_law = CenteredLaw(*wholes, model.object_features, pose)

    def with_poses(self, pose: str) -> StackedCapsuleGuide:
        """Return a guide with copies of the weights and another law of poses and features."""
        return self._varied(pose, self.objects)

    def with_objects(self, objects: Objects) -> StackedCapsuleGuide:
        """Return a guide with a copy of the reader of parts, and other objects above the parts."""
        return self._varied(self.pose, objects)

    def with_switches(
        self, stop_inputs: bool | None = None, noise: str | None = None, width: float | None = None
    ) -> Self:
        """Return a guide with the same parameters and other switches; None keeps a switch."""
        noise = self.noise if noise is None else noise
        width = self.noise_width if width is None else width
        _check_noise(noise, width)
        stop_inputs = self.stop_inputs if stop_inputs is None else stop_inputs
        return self.sharing_parameters(noise=noise, noise_width=width, stop_inputs=stop_inputs)

    def _varied(self, pose: str, objects: Objects) -> StackedCapsuleGuide:
        made = StackedCapsuleGuide(
            self.model,
            pose,
            reader=self.reader,
            objects=objects,
            noise=self.noise,
            noise_width=self.noise_width,
            stop_inputs=self.stop_inputs,
        )
        made.to(next(self.parameters()))
        theirs, mine = self.state_dict(), made.state_dict()
        kept = {k: v for k, v in theirs.items() if k in mine and v.shape == mine[k].shape}
        if objects != self.objects:
            kept = {k: v for k, v in kept.items() if k.startswith(("read_parts.", "part_"))}
        made.load_state_dict({**mine, **kept})
        return made

    def forward(self, images: Tensor, labels: Tensor | None = None) -> FeaturedCapsules:
        """Draw parts and objects, and return the objects."""
        read = self.read_parts(images)
        feature = read.features[..., 7:]  # behind the presence and the pose, from -1 to infinity
        proposal = FeaturedProposal(read.logits, read.pose, feature, read.features)
        with pyro.plate("images", len(images), dim=-2):
            parts = self._draw(1, proposal, self.part_pose_law, self.part_feature_law)
            if self.stop_inputs:
                still = parts.presence.detach(), parts.pose.detach()
                parts = FeaturedCapsules(*still, parts.feature)
            proposal = self.infer_objects(self.model, parts)
            return self._draw(0, proposal, self.object_pose_law, self.object_feature_law)

    def _draw(
        self, index: int, proposal: FeaturedProposal, pose_law: Any, feature_law: Any
    ) -> FeaturedCapsules:
        level = self.model.levels[index]
        with pyro.plate(level.plate, level.size, dim=-1):
            presence = pyro.sample(f"{level.name}_presence", self._presence_law(proposal.logits))
            law = pose_law(proposal.pose, proposal.numbers)
            pose = pyro.sample(f"{level.name}_pose", law)
            law = feature_law(proposal.feature, proposal.numbers)
            feature = pyro.sample(f"{level.name}_feature", law)
        return FeaturedCapsules.drawn(level, presence, pose, feature)

    def _presence_law(self, logits: Tensor) -> dist.TorchDistribution:
        if not self.model.relaxed or self.noise == "concrete":
            return self.model.presence_law(logits)
        if self.noise == "uniform":
            return NoisyLogit(logits, self.noise_width)
        return SureLogit(logits)


def _check_noise(noise: str, width: float) -> None:
    check_one_of("noise", noise, NOISES)
    check_positive(noise_width=width)
