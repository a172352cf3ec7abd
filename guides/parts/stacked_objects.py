"""Encoders for stacked capsule autoencoders that infer the objects from the parts.

    PerceptronObjects      one perceptron reads all parts together
    SetTransformerObjects  the paper's; parts are members of a set
    EMConstellations       EM steps by the model's own votes, no network

Parts have identities, so a perceptron may take them side by side. Poses of parts differ by a few
hundredths between images. The perceptron standardizes its inputs, and sees such differences
from the start. By default it also balances the presences over the images, as the encoders of
part-whole capsules do (`BalancedLogits`): each object differs between images from the start. What
it proposes for presences of random networks hardly differs between images, and the losses of the
paper only bring its mean to 1 / classes.

References:
    Kosiorek, Sabour, Teh & Hinton 2019 (arXiv 1906.06818), appendix, for the set transformer.
    EM on votes: Hinton, Sabour & Frosst 2018, "Matrix capsules with EM routing".
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from pyro.nn import PyroModule
from torch import Tensor, nn

from capsule_zoo.guides.parts.em import Evidence, route
from capsule_zoo.guides.parts.set_transformers import FULL_SIZE, as_set, upright
from capsule_zoo.models.checks import check_at_least, check_positive
from capsule_zoo.models.common.remembering import Submodule
from capsule_zoo.models.networks.layers import ELU, BalancedLogits, SetTransformer, elu, perceptron
from capsule_zoo.models.networks.leading import over_leading
from capsule_zoo.models.parts import poses
from capsule_zoo.models.parts.object_votes import (
    FeaturedCapsules,
    component_distribution,
    mixing_logits,
    place_votes,
)
from capsule_zoo.models.parts.parent_selection import as_presence
from capsule_zoo.models.stacked_capsule_autoencoder import StackedCapsuleAutoencoder


class FeaturedProposal(NamedTuple):
    """The parameters of the distribution of one level's capsules and features.

    Attributes:
        logits: logits of the presences, (B, capsules).
        pose: centers of the poses, (B, capsules, 6).
        feature: centers of the features, (B, capsules, F).
        numbers: numbers from which standard deviations are computed, (B, capsules, N).
    """

    logits: Tensor
    pose: Tensor
    feature: Tensor
    numbers: Tensor


class PerceptronObjects(Submodule, PyroModule):
    """The perceptron that infers objects from all parts together.

    Args:
        model: a stacked capsule autoencoder.
        width: units of each hidden layer.
        hidden: number of hidden layers.
        spread: standard deviation over images of the logit of each presence, around the prior's;
            None for logits that are not balanced.

    Raises:
        ValueError: a number below 1, or a spread that is not positive.
    """

    model_class = StackedCapsuleAutoencoder

    def __init__(
        self,
        model: StackedCapsuleAutoencoder,
        *,
        width: int = 256,
        hidden: int = 2,
        spread: float | None = 2.0,
    ) -> None:
        super().__init__()
        check_at_least(1, width=width, hidden=hidden)
        if spread is not None:
            check_positive(spread=spread)
        objects, parts = (level.size for level in model.levels)
        self.numbers = 7 + model.object_features
        in_features = parts * (7 + model.part_features)
        self.standard = BalancedLogits(in_features, spread=1.0)
        sizes = [in_features, *[width] * hidden]
        self.body, inputs = perceptron(*sizes, unit=ELU, last=True), sizes[-1]
        self.read = PyroModule[nn.Linear](inputs, objects * self.numbers)
        weight, bias = (x.data.unflatten(0, (objects, -1)) for x in self.read.parameters())
        weight[:, 1:7] *= 0.1  # objects start upright, in the middle, at full size
        bias[:, 1:7] = 0
        bias[:, 1:3] = FULL_SIZE
        self.objects = objects
        self.balance = None if spread is None else BalancedLogits(objects, spread)

    def forward(
        self, model: StackedCapsuleAutoencoder, parts: FeaturedCapsules
    ) -> FeaturedProposal:
        presence = as_presence(parts.presence, model.relaxed)[..., None]
        inputs = torch.cat(
            [presence, presence * parts.pose, presence * parts.feature], dim=-1
        ).flatten(-2)
        read = self.read(self.body(self.standard(inputs))).unflatten(-1, (self.objects, -1))
        logits = read[..., 0]
        if self.balance is not None:
            logits = model.prior_logit + self.balance(logits)
        return FeaturedProposal(
            logits, poses.from_parameters(read[..., 1:7]), read[..., 7:], elu(read)
        )


class SetTransformerObjects(Submodule, PyroModule):
    """The set transformer that infers objects from parts, as in the paper.

    Args:
        model: a stacked capsule autoencoder.
        width, heads, blocks, inducing: see `SetTransformer`.

    Raises:
        ValueError: a size out of range.
    """

    model_class = StackedCapsuleAutoencoder

    def __init__(
        self,
        model: StackedCapsuleAutoencoder,
        *,
        width: int = 64,
        heads: int = 4,
        blocks: int = 2,
        inducing: int = 16,
    ) -> None:
        super().__init__()
        objects, parts = (level.size for level in model.levels)
        self.numbers = 7 + model.object_features
        inputs = 7 + model.part_features + parts
        sizes = width, heads, blocks, inducing
        self.transformer = upright(SetTransformer(inputs, objects, self.numbers, *sizes))

    def forward(
        self, model: StackedCapsuleAutoencoder, parts: FeaturedCapsules
    ) -> FeaturedProposal:
        members = as_set(model.levels[-1], parts.pose, parts.presence, model.relaxed, parts.feature)
        read = over_leading(self.transformer, members, 2)  # (B, objects, numbers)
        pose = poses.from_parameters(read[..., 1:7])
        return FeaturedProposal(read[..., 0], pose, read[..., 7:], elu(read))


class EMConstellations(Submodule, PyroModule):
    """The module that infers objects by EM: soft assignments, best poses, then odds of presence.

    No network sees the parts. The feature of an object is one learned vector for all images, so
    that its constellation is rigid. Parts that are absent have no say.

    Args:
        model: a stacked capsule autoencoder.
        iterations: number of EM steps, by the model's own votes.

    Raises:
        ValueError: `iterations` below 1.
    """

    model_class = StackedCapsuleAutoencoder

    def __init__(self, model: StackedCapsuleAutoencoder, *, iterations: int = 3) -> None:
        super().__init__()
        check_at_least(1, iterations=iterations)
        self.iterations = iterations
        self.numbers = 7
        self.feature = nn.Parameter(0.1 * torch.randn(model.levels[0].size, model.object_features))

    def forward(
        self, model: StackedCapsuleAutoencoder, parts: FeaturedCapsules
    ) -> FeaturedProposal:
        relation = model.relation_of(self.feature)
        transform = relation.pose - poses.identity_like(parts.pose)  # (K, M, 6)
        affinity = F.logsigmoid(relation.presence_logits).T, model.clutter.epsilon
        prior = parts.pose.new_full((model.levels[0].size,), model.prior_logit)
        precision = parts.pose.new_tensor([model.sigma_top**-2] * 3)
        presence = as_presence(parts.presence, model.relaxed)[..., None]

        def part_evidence(logits: Tensor, pose: Tensor) -> Evidence:
            votes = place_votes(relation, pose, F.logsigmoid(logits))
            distribution = component_distribution(votes, model.clutter.sigma_dummy)
            density = presence * distribution.log_prob(
                parts.pose[..., None, :]
            )  # zero for absent parts
            weights = mixing_logits(votes, model.clutter.epsilon)
            return Evidence(density, weights, presence / votes.scale.square())

        steps = transform.transpose(0, 1), affinity, prior, precision, self.iterations
        proposal = route(part_evidence, parts.pose, *steps)
        feature = self.feature.expand(*parts.presence.shape[:-1], *self.feature.shape)
        return FeaturedProposal(proposal.logits, proposal.pose, feature, proposal.features)
