"""Initialization of object capsules: a mixture of factor analyzers of the parts of many images.

After a random initialization objects divide the parts between them, rather than the images: each
explains a few parts of every image, and all are always a little present. The losses of stacked
capsule autoencoders do not change this within thousands of updates. Here each object is initialized
as one cluster of parsed images. Its constellation is the mean of the cluster. Its feature bends the
constellation along the main directions of the cluster. The encoder of objects learns by regression
to predict the cluster, and the numbers along these directions, from the parts.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from capsule_zoo.guides.parts.set_transformers import FULL_SIZE
from capsule_zoo.guides.parts.stacked_capsule_autoencoder import StackedCapsuleGuide, from_reads
from capsule_zoo.guides.parts.stacked_objects import EMConstellations, FeaturedProposal
from capsule_zoo.inference.training.starts.factor_analyzers import (
    FactorAnalyzers,
    cluster_parts,
    fit_factor_analyzers,
)
from capsule_zoo.models import Capsules
from capsule_zoo.models.checks import check_at_least
from capsule_zoo.models.common.modes import use_seed
from capsule_zoo.models.parts import poses
from capsule_zoo.models.parts.object_votes import FeaturedCapsules, VoteNetwork

_CLUSTERED = 20_000  # images that the clusters are fitted to
_FLOORS = (0.2, 0.1, 0.05)  # smallest standard deviation of poses in each round of clustering
_FACTORS = 8  # most directions along which an object bends
_SURE, _UNSURE = 0.9, 0.02  # presence of an object in images of its cluster, and in others
_LEAST, _MOST = 0.02, 0.98  # bounds of the presences of votes, and of inverted sigmoids
_BATCH, _RATE = 128, 2e-3  # batch size and learning rate of the regression


def start_objects(
    guide: StackedCapsuleGuide, reads: Tensor, seed: int = 0, updates: int = 400
) -> Tensor:
    """Initialize the objects of a guide and its model from the parts of images, in place.

    Args:
        guide: the guide. An encoder without parameters of its own is left as it is.
        reads: (N, 1, parts, numbers), see `StackedCapsuleGuide.reads`; at least as many images as
            there are objects.
        seed: seed of the clusters and of the batches.
        updates: updates of the regression.

    Returns:
        The clusters of the clustered images, from 0 to objects - 1. The images have the order of
        the permutation of `torch.randperm` with this seed.

    Raises:
        ValueError: there are fewer images than objects, or `updates` is below 0.
    """
    check_at_least(0, updates=updates)
    objects, factors = guide.model.levels[0].size, _factors(guide.model.relation)
    if len(reads) < objects:
        raise ValueError(
            f"reads holds {len(reads)} images, but the model has {objects} objects; give more "
            "images, or make a model with fewer objects"
        )
    order = torch.randperm(len(reads), generator=torch.Generator().manual_seed(seed))
    subset = reads[order[:_CLUSTERED].to(reads.device)]
    read = from_reads(subset)
    parts = Capsules((read.logits > 0).to(read.pose), read.pose)
    with torch.no_grad():
        clusters = cluster_parts(parts, objects, seed)
        mixture = fit_factor_analyzers(parts, clusters, objects, factors, _FLOORS)
        belief = mixture.log_joint(parts).softmax(-1)
        _start_votes(guide.model.relation, mixture, _first_scale(guide))
        feature = belief[..., None] * posterior_codes(mixture, parts)
        spare = guide.model.object_features - factors
        lesson = _UNSURE + (_SURE - _UNSURE) * belief, F.pad(feature, (0, spare))
    _teach(guide, subset, *lesson, seed, updates)
    return belief.argmax(-1)


def _factors(relation: VoteNetwork) -> int:
    """Return the number of directions that the networks of the votes can represent."""
    _, features, hidden = relation.hidden_weight.shape
    return min(_FACTORS, features, hidden // 2) if relation.deformable else 1


def _first_scale(guide: StackedCapsuleGuide) -> float:
    """Return the size of objects in the poses of the untrained encoder."""
    if isinstance(guide.infer_objects, EMConstellations):
        return 1.0
    raw = torch.zeros(6)
    raw[:2] = FULL_SIZE
    return float(poses.from_parameters(raw)[0])


def posterior_codes(mixture: FactorAnalyzers, parts: Capsules) -> Tensor:
    """Return the posterior mean of the code under every kind with principal codes, (N, K, d).

    The mean is exact where all parts are present.
    """
    weighted = mixture.loadings / mixture.variance[..., None]  # (K, P, 6, d)
    precision = mixture.posterior_precision().diagonal(dim1=-2, dim2=-1)  # (K, d)
    part_presence = parts.presence[:, None, :, None]
    away = part_presence * (parts.pose[:, None] - mixture.mean)  # (N, K, P, 6)
    return torch.einsum("nkpi,kpid->nkd", away, weighted) / precision


def to_parameters(pose: Tensor) -> Tensor:
    """Return the numbers (..., 6) from which `poses.from_parameters` makes the nearest pose."""
    x, y, angle, size, stretch, shear = poses.to_components(pose).unbind(-1)
    width, height = size.abs() * stretch.sqrt(), size.abs() * stretch.rsqrt()
    scales = [(s - 0.01).clamp(_LEAST, _MOST).logit() for s in (width, height)]
    bounded = [v.clamp(-_MOST, _MOST).atanh() / 5 for v in (shear, x, y)]
    return torch.stack([*scales, angle / (2 * math.pi), *bounded], dim=-1).nan_to_num()


def _start_votes(relation: VoteNetwork, mixture: FactorAnalyzers, scale: float) -> None:
    """Initialize the networks of the votes from a mixture, one kind for each object.

    The first 2 d hidden units are the positive and the negative parts of the d numbers of a code.
    """
    factors = mixture.loadings.shape[-1]
    static = to_parameters(mixture.mean / scale)
    relation.static.copy_(static)
    std = mixture.variance.mean(-1).sqrt()  # (K, P)
    relation.scale_bias.copy_((std - 0.01).clamp(min=1e-3).expm1().log() - 0.5)
    relation.presence_bias.copy_(mixture.presence.clamp(_LEAST, _MOST).logit())
    relation.hidden_bias.zero_()
    relation.read_weight.mul_(0.1)
    if not relation.deformable:
        return
    identity = torch.eye(factors).to(static)
    both = torch.cat([identity, -identity], dim=-1)
    relation.hidden_weight[:, :, : 2 * factors] = 0
    relation.hidden_weight[:, :factors, : 2 * factors] = both
    step = mixture.loadings.movedim(-1, 0) / scale  # (d, K, P, 6)
    slope = (to_parameters(mixture.mean / scale + step) - static).movedim(0, 1)  # (K, d, P, 6)
    slope[..., 2] = (slope[..., 2] + 0.5).remainder(1) - 0.5  # a fraction of a circle
    slope = F.pad(slope, (2, 0)).flatten(-2)  # in front, presence and scale of the vote
    relation.read_weight[:, : 2 * factors] = torch.cat([slope, -slope], dim=1)


def _teach(
    guide: StackedCapsuleGuide,
    reads: Tensor,
    presence: Tensor,
    feature: Tensor,
    seed: int,
    updates: int,
) -> None:
    """Train the encoder of objects, by regression, to predict presences and features of images.

    Args:
        presence: probabilities that each object is present, (N, objects).
        feature: features of the objects, (N, objects, features).
    """
    parameters = list(guide.infer_objects.parameters())
    if isinstance(guide.infer_objects, EMConstellations):
        return
    optimizer = torch.optim.Adam(parameters, _RATE)
    with use_seed(seed):
        for _ in range(updates):
            some = torch.randint(len(reads), (_BATCH,)).to(reads.device)
            read = from_reads(reads[some])
            noise = guide.noise_width * (torch.rand_like(read.logits) - 0.5)
            parts = FeaturedCapsules(read.logits + noise, read.pose, read.features[..., 7:])
            proposal: FeaturedProposal = guide.infer_objects(guide.model, parts)
            wrong = F.binary_cross_entropy_with_logits(proposal.logits, presence[some])
            bent = (proposal.feature - feature[some]).square().mean()
            optimizer.zero_grad()
            (wrong + bent).backward()
            optimizer.step()
