"""Guides to stacked capsule autoencoders: a part reader, and a module that infers the objects.

    d_m, x_m, z_m     ~ q(. | read_parts(image))            # presence, pose, feature of each part
    t_k, OV_k, c_k    ~ q(. | infer_objects({d, x, z}))     # presence, pose, feature of objects

As in the part-whole guides, what infers the objects is an argument:

>>> StackedCapsuleGuide(model, above=SetTransformerObjects)     # the paper's encoder
>>> StackedCapsuleGuide(model, above=PerceptronObjects)         # one perceptron; learns sooner
>>> StackedCapsuleGuide(model, above=EMConstellations)          # EM steps, no network

Poses and features are points (`pose="delta"`, as in the paper) or normal. A presence is relaxed by
noise on its logit. With `noise="uniform"` it is the paper's, uniform and of width 4; with
`"concrete"` it is the model's own Concrete distribution; `"none"` adds nothing. Of the discrete
model the presences are Bernoulli, whatever the noise.

The encoder of objects sees the presences and poses of the parts without their gradients, as in the
paper, unless `stop_inputs=False`. Features of parts keep their gradients, as in the authors'
program. A one-hot identity stands for the template that the paper shows the encoder.

Parts are encoded without noise, so they may be stored, and objects may be learned from them alone
(`with_scope`):

>>> reads = guide.reads(images)                                   # (N, 1, parts, numbers)
>>> fit(model.with_scope("objects"), guide.with_scope("objects"), Split(reads, labels))

References:
    Kosiorek, Sabour, Teh & Hinton 2019 (arXiv 1906.06818), sections 2.1 to 2.3 and the appendix.
"""

from collections.abc import Callable
from typing import Any, Self

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from capsule_zoo.guides.parts.guide import PartsGuide, PoseHead
from capsule_zoo.guides.parts.part_reader import PartReader, Proposal
from capsule_zoo.guides.parts.stacked_objects import FeaturedProposal, SetTransformerObjects
from capsule_zoo.models.checks import check_one_of, check_positive
from capsule_zoo.models.common.remembering import Submodule
from capsule_zoo.models.parts.object_votes import FeaturedCapsules
from capsule_zoo.models.stacked_capsule_autoencoder import StackedCapsuleAutoencoder

NOISES = ("uniform", "concrete", "none")


class NoisyLogit(dist.Uniform):
    """The distribution of a logit plus uniform noise; probes use the noiseless `logits`.

    Args:
        logits: centers.
        width: width of the noise.
    """

    def __init__(self, logits: Tensor, width: float) -> None:
        self.logits = logits
        self.width = width
        super().__init__(logits - width / 2, logits + width / 2, validate_args=False)

    def expand(self, batch_shape: torch.Size, _instance: None = None) -> "NoisyLogit":
        """Return the distribution expanded to more batch dims."""
        return NoisyLogit(self.logits.expand(batch_shape), self.width)

    def log_prob(self, value: Tensor) -> Tensor:
        """Compute the log density, with a margin at the ends for samples that were rounded."""
        inside = (value - self.logits).abs() <= self.width / 2 * (1 + 1e-5)
        density = torch.full_like(value - self.logits, 1 / self.width)
        return torch.where(inside, density, 0.0).log()


class SureLogit(dist.Delta):
    """The point mass at a logit; probes use its `logits`."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits
        super().__init__(logits)

    def expand(self, batch_shape: torch.Size, _instance: None = None) -> "SureLogit":
        """Return the distribution expanded to more batch dims."""
        return SureLogit(self.logits.expand(batch_shape))


class StackedCapsuleGuide(PartsGuide[StackedCapsuleAutoencoder]):
    """The guide that encodes an image as parts and infers the objects from the parts.

    It is described at the top of this file.

    Args:
        model: the model to invert.
        pose: the distribution of poses and features, "delta" or "normal".
        reader: the class of the part reader: `PartReader` or a partial of it. It must see each
            image as it is.
        above: the class that infers objects: `SetTransformerObjects`, `PerceptronObjects`,
            `EMConstellations` or a partial of one.
        noise: "uniform", "concrete" or "none".
        noise_width: width of the uniform noise on a logit.
        stop_inputs: whether presences and poses of the parts reach the objects without gradients.

    Raises:
        ValueError: another kind of model, an unknown `pose` or `noise`, a width that is not
            positive, or a reader that rotates or centers images.
    """

    of_parts = ("read_parts.", "part_")

    def __init__(
        self,
        model: StackedCapsuleAutoencoder,
        pose: str = "delta",
        *,
        reader: Callable[..., PartReader] = PartReader,
        above: Callable[..., Submodule] = SetTransformerObjects,
        noise: str = "uniform",
        noise_width: float = 4.0,
        stop_inputs: bool = True,
    ) -> None:
        _check_noise(noise, noise_width)
        outputs = 7 + getattr(model, "part_features", 0)  # other models are refused in the base
        super().__init__(model, pose, reader, above, outputs)
        rotations, centered = self.read_parts.rotations, self.read_parts.centered
        if rotations > 1 or centered:
            raise ValueError(
                f"reader must see each image as it is, not with rotations={rotations} and "
                f"centered={centered}; give a PartReader with rotations=1 and centered=False"
            )
        self.noise = noise
        self.noise_width = noise_width
        self.stop_inputs = stop_inputs
        objects, parts = model.levels
        self.infer_objects = above(model)
        numbers = self.infer_objects.numbers
        self.part_pose_distribution = PoseHead(outputs, parts.size, pose)
        self.part_feature_distribution = PoseHead(
            outputs, parts.size, pose, size=model.part_features
        )
        self.object_pose_distribution = PoseHead(numbers, objects.size, pose)
        features = model.object_features
        self.object_feature_distribution = PoseHead(numbers, objects.size, pose, size=features)

    @torch.no_grad()
    def reads(self, images: Tensor, batch_size: int = 500) -> Tensor:
        """Encode images as part sets, (N, 1, parts, numbers): the data of the scope "objects"."""
        readings = [self.read_parts(batch) for batch in images.split(batch_size)]
        return torch.cat([as_reads(read) for read in readings])

    def with_switches(
        self, stop_inputs: bool | None = None, noise: str | None = None, width: float | None = None
    ) -> Self:
        """Return a guide with shared parameters and other switches; None keeps a switch."""
        noise = self.noise if noise is None else noise
        width = self.noise_width if width is None else width
        _check_noise(noise, width)
        stop_inputs = self.stop_inputs if stop_inputs is None else stop_inputs
        return self.sharing_parameters(noise=noise, noise_width=width, stop_inputs=stop_inputs)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> FeaturedCapsules:
        """Sample parts and objects, and return the objects (in the scope "parts", the parts)."""
        scope = self.model.scope
        read = from_reads(images) if scope == "objects" else self.read_parts(images)
        feature = read.features[..., 7:]  # behind the presence and the pose, from -1 to infinity
        proposal = FeaturedProposal(read.logits, read.pose, feature, read.features)
        with pyro.plate("images", len(images), dim=-2):
            parts = self._draw_level(
                1, proposal, self.part_pose_distribution, self.part_feature_distribution
            )
            if scope == "parts":
                return parts
            if self.stop_inputs:
                still = parts.presence.detach(), parts.pose.detach()
                parts = FeaturedCapsules(*still, parts.feature)
            proposal = self.infer_objects(self.model, parts)
            return self._draw_level(
                0, proposal, self.object_pose_distribution, self.object_feature_distribution
            )

    def _draw_level(
        self,
        index: int,
        proposal: FeaturedProposal,
        pose_distribution: Any,
        feature_distribution: Any,
    ) -> FeaturedCapsules:
        level = self.model.levels[index]
        with pyro.plate(level.plate, level.size, dim=-1):
            presence = pyro.sample(
                f"{level.name}_presence", self._presence_distribution(proposal.logits)
            )
            distribution = pose_distribution(proposal.pose, proposal.numbers)
            pose = pyro.sample(f"{level.name}_pose", distribution)
            distribution = feature_distribution(proposal.feature, proposal.numbers)
            feature = pyro.sample(f"{level.name}_feature", distribution)
        return FeaturedCapsules.from_sites(level, presence, pose, feature)

    def _presence_distribution(self, logits: Tensor) -> dist.TorchDistribution:
        if not self.model.relaxed or self.noise == "concrete":
            return self.model.presence_distribution(logits)
        if self.noise == "uniform":
            return NoisyLogit(logits, self.noise_width)
        return SureLogit(logits)


def as_reads(read: Proposal) -> Tensor:
    """Pack the parts that a reader proposes into one tensor, (B, 1, parts, numbers)."""
    return torch.cat([read.logits[..., None], read.pose, read.features], dim=-1).unsqueeze(-3)


def from_reads(reads: Tensor) -> Proposal:
    """Unpack the parts from the tensor of `as_reads`."""
    logits, pose, features = reads.squeeze(-3).split([1, 6, reads.shape[-1] - 7], dim=-1)
    return Proposal(logits.squeeze(-1), pose, features)


def _check_noise(noise: str, width: float) -> None:
    check_one_of("noise", noise, NOISES)
    check_positive(noise_width=width)
