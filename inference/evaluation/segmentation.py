"""How well scenes of points are parsed: the object of every point compared with its true object.

The numbers of objects mean nothing where their templates are equal: two squares may be exchanged.
Points that are absent count nowhere. Clutter, -1, is a segment of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from sklearn.metrics import adjusted_rand_score, mutual_info_score
from torch import Tensor


def segmentation_accuracy(
    found: Tensor, true: Tensor, present: Tensor, kinds: Sequence[int] | None = None
) -> Tensor:
    """Compute the share of each scene's points that have the right object, (S,), at best.

    The best relabeling of the objects counts. It may exchange objects of one kind.

    Args:
        found, true: numbers of objects, (S, N); -1 for clutter.
        present: (S, N), True where there is a point.
        kinds: of the objects, the same number for equal templates; None if any two objects may be
            exchanged, as for learned templates.

    Raises:
        ValueError: shapes that differ, a scene without points, or a number of an object that is
            out of range.
    """
    objects = _check(found, true, present, kinds)
    kinds = [0] * objects if kinds is None else list(kinds)
    agree = torch.zeros(len(found), objects, objects)
    for a, b in itertools.product(range(objects), repeat=2):
        agree[:, a, b] = (
            ((found == a) & (true == b) & present).sum(1) if kinds[a] == kinds[b] else 0
        )
    matched = torch.zeros(len(found))
    for kind in set(kinds):
        own = [k for k in range(objects) if kinds[k] == kind]
        for scene, table in enumerate(agree[:, own][:, :, own].numpy()):
            rows, columns = linear_sum_assignment(table, maximize=True)
            matched[scene] += float(table[rows, columns].sum())
    matched += ((found < 0) & (true < 0) & present).sum(1)
    return matched / present.sum(1)


def adjusted_rand_index(found: Tensor, true: Tensor, present: Tensor) -> Tensor:
    """Compute the adjusted Rand index of each scene's segments, (S,); 1 where they are equal."""
    _check(found, true, present, None)
    scores = [adjusted_rand_score(t, f) for f, t in _scenes(found, true, present)]
    return torch.tensor(scores)


def variation_of_information(found: Tensor, true: Tensor, present: Tensor) -> Tensor:
    """Compute H(found | true) + H(true | found) of each scene's segments, (S,), in nats."""
    _check(found, true, present, None)
    scores = [
        mutual_info_score(f, f) + mutual_info_score(t, t) - 2 * mutual_info_score(t, f)
        for f, t in _scenes(found, true, present)
    ]
    return torch.tensor(scores).clamp(min=0)


def _scenes(found: Tensor, true: Tensor, present: Tensor) -> list[tuple[np.ndarray, np.ndarray]]:
    return [
        (f[p].numpy(), t[p].numpy())
        for f, t, p in zip(found.cpu(), true.cpu(), present.cpu(), strict=True)
    ]


def _check(found: Tensor, true: Tensor, present: Tensor, kinds: Sequence[int] | None) -> int:
    """Return the number of objects."""
    if not found.shape == true.shape == present.shape or found.dim() != 2:
        raise ValueError(
            "found, true and present must be (S, N), all of one shape, not "
            f"{tuple(found.shape)}, {tuple(true.shape)} and {tuple(present.shape)}"
        )
    if not present.any(1).all():
        raise ValueError("a scene has no point that is present; leave such scenes out")
    most = int(max(found.max(), true.max())) + 1
    if kinds is not None and most > len(kinds):
        raise ValueError(
            f"objects are numbered up to {most - 1}, but kinds names {len(kinds)} of them; give "
            "one number for each object"
        )
    return len(kinds) if kinds is not None else max(most, 1)
