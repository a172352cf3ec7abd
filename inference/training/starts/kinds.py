"""The initialization of shape codes by a mixture of factor analyzers of parsed images.

Kinds that are equal at first stay equal, and most of them die: of ten kinds with random initial
values, four were used on MNIST. The mixture starts from clusters, is fitted in a minute, and all
its kinds are used. It is the model of shape codes except for the object's pose and the dummy, so
that learning by gradients begins near the optimum of the model.
"""

import torch
from torch import Tensor

from capsule_zoo.inference.training.starts.factor_analyzers import (
    FactorAnalyzers,
    cluster_parts,
    fit_factor_analyzers,
)
from capsule_zoo.models.parts.part_sets import from_part_sets
from capsule_zoo.models.shape_codes import ShapeCodes

_CLUSTERED = 20_000  # images to which clusters are fitted; other images join the nearest cluster
_FLOORS = (
    3.2,
    1.6,
    1.0,
)  # least standard deviations of poses in each round, in units of the model's
_FLOORS_OF_ROTATIONS = (6.4, 6.4, 4.8, 3.2, 3.2, 2.4, 1.6, 1.6, 1.2, 1.0)  # _FLOORS with rotations
_UPDATES, _UPDATES_OF_ROTATIONS = 8, 4  # updates of the mixture in each round


@torch.no_grad()
def start_kinds(model: ShapeCodes, sets: Tensor, seed: int = 0) -> Tensor:
    """Initialize the kinds of a model, in place, by a mixture of factor analyzers of part sets.

    The mixture starts from clusters, by k-means, of the presences and the poses of the parts that
    are present.

    Args:
        model: the model, in any scope.
        sets: part sets (N, 1, P, 7) of at least as many images as there are kinds.
        seed: seed of the clusters.

    Returns:
        The likeliest kind of every image, (N,), from 0 to K - 1.

    Raises:
        ValueError: there are fewer images than kinds.
    """
    _check_number(sets, model)
    clusters = _clusters(sets, model.kinds, seed)
    floors = [model.shapes.sigma_min * floor for floor in _FLOORS]
    parts = from_part_sets(sets)
    mixture = fit_factor_analyzers(parts, clusters, model.kinds, model.codes, floors, _UPDATES)
    _set_kinds(model, mixture, parts.presence)
    return mixture.log_joint(parts).argmax(-1)


@torch.no_grad()
def start_rotated_kinds(model: ShapeCodes, views: Tensor, seed: int = 0) -> Tensor:
    """Initialize the kinds of a model, in place, by a mixture that infers each image's rotation.

    No image says which of its rotations is upright. The mixture starts from every image's first
    rotation. Then it is fitted, and every image is given the rotation at which the mixture explains
    its parts best, again and again, while the least standard deviation falls. Turns at which many
    images are alike win, so that images of one shape end upright in the same way, whatever way that
    is. Give more
    kinds than there are shapes: two shapes in one kind may never part.

    Args:
        model: the model, in any scope.
        views: part sets of every image, seen at each of T rotations, (T, N, 1, P, 7).
        seed: seed of the clusters.

    Returns:
        The rotation of every image, (N,), from 0 to T - 1.

    Raises:
        ValueError: there are fewer images than kinds.

    References:
        Frey & Jojic 2003, "Transformation-invariant clustering using the EM algorithm": the same
        choice among transformations, for pixels.
    """
    _check_number(views[0], model)
    images = torch.arange(views.shape[1], device=views.device)
    best_view = torch.zeros_like(images)
    clusters = _clusters(views[0], model.kinds, seed)
    for floor in _FLOORS_OF_ROTATIONS:
        parts = from_part_sets(views[best_view, images])
        floors = [model.shapes.sigma_min * floor]
        mixture = fit_factor_analyzers(
            parts, clusters, model.kinds, model.codes, floors, _UPDATES_OF_ROTATIONS
        )
        joint = torch.stack(
            [mixture.log_joint(from_part_sets(view)) for view in views]
        )  # (T, N, K)
        best_view = joint.logsumexp(-1).argmax(0)
        clusters = joint[best_view, images].argmax(-1)
    _set_kinds(model, mixture, parts.presence)
    return best_view


def _check_number(sets: Tensor, model: ShapeCodes) -> None:
    if len(sets) < model.kinds:
        raise ValueError(
            f"sets holds {len(sets)} images, but the model has {model.kinds} kinds; give more "
            "images, or make a model with fewer kinds"
        )


def _clusters(sets: Tensor, kinds: int, seed: int) -> Tensor:
    """Cluster part sets by k-means, and return the cluster of each, (N,)."""
    order = torch.randperm(len(sets), generator=torch.Generator().manual_seed(seed))
    return cluster_parts(from_part_sets(sets), kinds, seed, order[: max(_CLUSTERED, kinds)])


def _set_kinds(model: ShapeCodes, mixture: FactorAnalyzers, presence: Tensor) -> None:
    """Copy a fitted mixture into the kinds of a model."""
    mask = presence.sum(0) >= 2
    model.shapes.start_from(
        mixture.presence, mixture.mean, mixture.loadings, mixture.variance.sqrt(), mask
    )
    model.kind_logits.copy_(mixture.fraction.log())
