"""The start of the kinds of shape codes: clusters of parsed images, one for each kind.

Kinds that start alike stay alike, and most of them die: of ten kinds that started at random, four
were used on MNIST. Started from clusters, all are used.
"""

from __future__ import annotations

import torch
from torch import Tensor

from capsule_zoo.models.shape_codes import ShapeCodes, from_part_sets

_CLUSTERED = 20_000  # images that the clusters are fitted to; the others join the nearest cluster


def start_kinds(model: ShapeCodes, sets: Tensor, seed: int = 0) -> Tensor:
    """Set every kind of a model to a cluster of part sets, found by k-means, in place.

    The clusters are of the presences and the poses of the parts that are present.

    Args:
        model: the model, in any scope.
        sets: part sets (N, 1, P, 7) of at least as many images as there are kinds.
        seed: seed of the clusters.

    Returns:
        The cluster of every image, (N,), from 0 to K - 1.

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
    with torch.no_grad():
        model.kind_logits.copy_(model.shapes.start_from(parts, clusters))
    return clusters
