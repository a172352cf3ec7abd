"""Segmentation accuracy of scenes of points: inferred objects compared with true ones.

The numbers of objects mean nothing where their templates are equal: two squares may be exchanged.
Points that are absent count nowhere. Clutter, -1, is a separate segment.
"""

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from capsule_zoo.data.tensors import accept_arrays


@accept_arrays("segments", "true", "present")
def segmentation_accuracy(
    segments: Tensor, true: Tensor, present: Tensor, kinds: Sequence[int] | None = None
) -> Tensor:
    """Compute the fraction of each scene's points with the right object, (S,), at best relabeling.

    The best relabeling of the objects counts. It may exchange objects of one kind.

    Args:
        segments, true: numbers of objects, (S, N); -1 for clutter.
        present: (S, N), True where there is a point.
        kinds: kind of each object, equal for equal templates; None if any two objects may be
            exchanged, as for learned templates.

    Raises:
        ValueError: shapes that differ, a scene without points, or a number of an object that is
            out of range.
    """
    objects = _check(segments, true, present, kinds)
    kinds = [0] * objects if kinds is None else list(kinds)
    number = torch.arange(objects, device=segments.device)
    membership = (segments[..., None] == number) & present[..., None]  # (S, N, objects)
    agree = torch.einsum("snf,snt->sft", membership.float(), (true[..., None] == number).float())
    matched = ((segments < 0) & (true < 0) & present).sum(1).float()
    for kind in set(kinds):
        members = [k for k in range(objects) if kinds[k] == kind]
        matched += _best_match(agree[:, members][:, :, members])
    return matched / present.sum(1)


def _best_match(agree: Tensor) -> Tensor:
    """Return the best sum over one-to-one matches of rows to columns, (S,), for (S, n, n)."""
    from scipy.optimize import linear_sum_assignment  # takes a second, and few need it

    tables = agree.cpu().numpy()
    scores = [float(t[linear_sum_assignment(t, maximize=True)].sum()) for t in tables]
    return torch.tensor(scores, device=agree.device)


@accept_arrays("segments", "true")
def relabel(segments: Tensor, true: Tensor, kinds: Sequence[int]) -> Tensor:
    """Renumber equal objects of parses (S, N) for the best agreement with the truth."""
    orders = [
        [*order, -1]  # the last number, -1, stands for clutter
        for order in itertools.permutations(range(len(kinds)))
        if all(kinds[k] == kinds[other] for k, other in enumerate(order))
    ]
    options = torch.tensor(orders, device=segments.device)[:, segments]  # (orders, S, N)
    best = (options == true).sum(-1).argmax(0)
    return options[best, torch.arange(len(segments), device=segments.device)]


@accept_arrays("segments", "true", "present")
def adjusted_rand_index(segments: Tensor, true: Tensor, present: Tensor) -> Tensor:
    """Compute the adjusted Rand index of each scene's segments, (S,); 1 where they are equal."""
    from sklearn.metrics import adjusted_rand_score  # takes a second, and few need it

    scores = [adjusted_rand_score(t, f) for f, t in _scenes(segments, true, present)]
    return torch.tensor(scores)


@accept_arrays("segments", "true", "present")
def variation_of_information(segments: Tensor, true: Tensor, present: Tensor) -> Tensor:
    """Compute H(segments | true) + H(true | segments) of each scene's segments, (S,), in nats."""
    from sklearn.metrics import mutual_info_score as shared  # takes a second, and few need it

    scenes = _scenes(segments, true, present)
    scores = [shared(f, f) + shared(t, t) - 2 * shared(t, f) for f, t in scenes]
    return torch.tensor(scores).clamp(min=0)


def _scenes(segments: Tensor, true: Tensor, present: Tensor) -> list[tuple[np.ndarray, np.ndarray]]:
    _check(segments, true, present, None)
    return [
        (f[p].numpy(), t[p].numpy())
        for f, t, p in zip(segments.cpu(), true.cpu(), present.cpu(), strict=True)
    ]


def _check(segments: Tensor, true: Tensor, present: Tensor, kinds: Sequence[int] | None) -> int:
    """Check the shapes of two segmentations, and return the number of objects."""
    if not segments.shape == true.shape == present.shape or segments.dim() != 2:
        raise ValueError(
            "segments, true and present must be (S, N), all of one shape, not "
            f"{tuple(segments.shape)}, {tuple(true.shape)} and {tuple(present.shape)}"
        )
    if not present.any(1).all():
        raise ValueError("a scene has no point that is present; leave such scenes out")
    most = int(max(segments.max(), true.max())) + 1
    if kinds is not None and most > len(kinds):
        raise ValueError(
            f"objects are numbered up to {most - 1}, but kinds names {len(kinds)} of them; give "
            "one number for each object"
        )
    return len(kinds) if kinds is not None else max(most, 1)
