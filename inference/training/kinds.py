"""The start of shape codes: a mixture of factor analyzers of parsed images.

Kinds that start alike stay alike, and most of them die: of ten kinds that started at random, four
were used on MNIST. The mixture starts from clusters, is fitted in a minute, and all its kinds are
used. It is the model of shape codes but for the object's pose and the dummy, and what is then
learned by gradients begins near the best that the model can do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from capsule_zoo.inference.training.factor_analyzers import fit_factor_analyzers
from capsule_zoo.models.shape_codes import ShapeCodes, from_part_sets

_CLUSTERED = 20_000  # images that the clusters are fitted to; the others join the nearest cluster
_FLOORS = (3.2, 1.6, 1.0)  # least deviations of poses in each round, in units of the model's


@torch.no_grad()
def start_kinds(model: ShapeCodes, sets: Tensor, seed: int = 0, updates: int = 8) -> Tensor:
    """Set the kinds of a model to a mixture of factor analyzers of part sets, in place.

    The mixture starts from clusters, by k-means, of the presences and the poses of the parts that
    are present.

    Args:
        model: the model, in any scope.
        sets: part sets (N, 1, P, 7) of at least as many images as there are kinds.
        seed: seed of the clusters.
        updates: updates of the mixture in each of three rounds; with 0 kinds are the clusters.

    Returns:
        The likeliest kind of every image, (N,), from 0 to K - 1.

    Raises:
        ValueError: there are fewer images than kinds.
    """
    from sklearn.cluster import KMeans  # takes a second, and few need it

    if len(sets) < model.kinds:
        raise ValueError(
            f"sets holds {len(sets)} images, but the model has {model.kinds} kinds; give more "
            "images, or make a model with fewer kinds"
        )
    parts = from_part_sets(sets)
    there = parts.presence[..., None]
    features = torch.cat([there, there * parts.pose], dim=-1).flatten(1).cpu().double().numpy()
    order = torch.randperm(len(sets), generator=torch.Generator().manual_seed(seed))
    chosen = order[: max(_CLUSTERED, model.kinds)].numpy()
    means = KMeans(model.kinds, n_init=1, random_state=seed).fit(features[chosen])
    clusters = torch.from_numpy(means.predict(features)).long().to(sets.device)
    floors = [model.shapes.sigma_min * floor for floor in _FLOORS]
    found = fit_factor_analyzers(parts, clusters, model.kinds, model.codes, floors, updates)
    known = parts.presence.sum(0) >= 2
    model.shapes.start_from(
        found.presence, found.mean, found.loadings, found.variance.sqrt(), known
    )
    model.kind_logits.copy_(found.share.log())
    return found.log_joint(parts).argmax(-1)
