"""Scores of counted objects: inferred centers, segments and numbers compared with true ones.

>>> score_centers(centers, marks, distance=8).recall      # fraction of true objects that were found
>>> circle_overlaps(labels, marks, radii).mean()          # overlap (IoU) of segments and circles
>>> interval_coverage(posteriors, numbers, level=0.9)     # how often intervals hold the true number

Positions are x (to the right) and y (downward) in pixels. The center of the first pixel is (0, 0).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from capsule_zoo.data.tensors import accept_arrays

ROUNDING = 1e-4  # of sums of probabilities in single precision


class CenterScores(NamedTuple):
    """Inferred centers of one picture, compared with true ones.

    Attributes:
        number: inferred objects.
        error: inferred minus true number of objects.
        precision: fraction of the inferred objects with a true one; 1 if none is inferred.
        recall: fraction of the true objects with an inferred one; 1 if there is none.
        repeated: inferred objects without a true one of their own, near one that has another.
    """

    number: int
    error: int
    precision: float
    recall: float
    repeated: int


class Coverage(NamedTuple):
    """Intervals of numbers, compared with true numbers.

    Attributes:
        covered: fraction of the intervals that hold the true number.
        expected: mean probability of the intervals under their posteriors. It is at least the
            level, because numbers are whole. `covered` of exact posteriors is near it.
    """

    covered: float
    expected: float


@accept_arrays("centers", "marks", "distance")
def match_centers(centers: Tensor, marks: Tensor, distance: Tensor | float) -> Tensor:
    """Match inferred centers (m, 2) to true ones (n, 2), one to one, and return pairs (k, 2).

    There are as many pairs as possible, and among these matches the one with the least sum of
    distances is returned (the Hungarian algorithm).

    Args:
        distance: largest distance of a pair, one number or one of each true object, (n,).

    Returns:
        The rows of `centers` and `marks` of each pair, in the order of `centers`, int64.

    Raises:
        ValueError: positions of another shape, or a distance that is not positive.
    """
    from scipy.optimize import linear_sum_assignment  # takes a second, and few need it

    distances, limit = _distances(centers, marks, distance)
    if not distances.numel():
        return torch.zeros(0, 2, dtype=torch.int64)
    too_far = 2 * limit.sum() + 1  # no gain in distance makes up for a pair less
    cost = torch.where(distances <= limit, distances, too_far)
    rows, columns = (torch.from_numpy(k) for k in linear_sum_assignment(cost.numpy()))
    near = distances[rows, columns] <= limit[columns]
    return torch.stack([rows, columns], 1)[near]


@accept_arrays("centers", "marks", "distance")
def score_centers(centers: Tensor, marks: Tensor, distance: Tensor | float) -> CenterScores:
    """Score inferred centers (m, 2) of one picture by true ones (n, 2); see `match_centers`."""
    pairs = match_centers(centers, marks, distance)
    distances, limit = _distances(centers, marks, distance)
    inferred, true = distances.shape
    extra = torch.ones(inferred, dtype=torch.bool)
    extra[pairs[:, 0]] = False
    repeated = (distances <= limit).any(1) & extra
    return CenterScores(
        inferred,
        inferred - true,
        len(pairs) / inferred if inferred else 1.0,
        len(pairs) / true if true else 1.0,
        int(repeated.sum()),
    )


def _distances(centers: Tensor, marks: Tensor, distance: Tensor | float) -> tuple[Tensor, Tensor]:
    """Return distances (m, n) between centers and marks, and the largest of each pair, (n,)."""
    for name, value in dict(centers=centers, marks=marks).items():
        if value.dim() != 2 or value.shape[1] != 2:
            raise ValueError(
                f"{name} must be x and y of each object, (n, 2), not {tuple(value.shape)}"
            )
    limit = torch.as_tensor(distance, dtype=torch.float64).cpu()
    if limit.shape not in ((), (len(marks),)) or not (limit > 0).all():
        raise ValueError(
            "distance must be a positive number of pixels, or one of each of the "
            f"{len(marks)} marks, not {distance}"
        )
    difference = centers.cpu().double()[:, None] - marks.cpu().double()
    return difference.norm(dim=-1), limit.expand(len(marks))


@accept_arrays("labels")
def label_centers(labels: Tensor) -> Tensor:
    """Return the mean position x, y of each object's pixels, (m, 2), in the order of its number.

    Args:
        labels: number of the object that each pixel shows, 0 for the ground, (H, W).
    """
    rows, columns = labels.nonzero(as_tuple=True)
    _, index = labels[rows, columns].unique(return_inverse=True)
    area = torch.bincount(index).double()
    sums = [torch.bincount(index, place.double()) for place in (columns, rows)]
    return torch.stack(sums, 1) / area[:, None]


def disk_masks(centers: Tensor, radii: Tensor, size: tuple[int, int]) -> Tensor:
    """Return the pixels whose centers lie in each circle, bool (n, H, W), for size (H, W)."""
    rows, columns = (torch.arange(side, device=centers.device) for side in size)
    x, y = centers.unbind(-1)
    squares = (columns - x[:, None]).square()[:, None] + (rows - y[:, None]).square()[:, :, None]
    return squares <= radii.square()[:, None, None]


@accept_arrays("labels", "centers", "radii")
def circle_overlaps(labels: Tensor, centers: Tensor, radii: Tensor) -> Tensor:
    """Compute the overlap (IoU) of each circle with its segment, (n,); 0 where it has none.

    Segments are matched to circles one to one, with the largest sum of overlaps.

    Args:
        labels: number of the object that each pixel shows, 0 for the ground, (H, W).
        centers, radii: the circles, (n, 2) and (n,).

    Raises:
        ValueError: a radius that is not positive.
    """
    from scipy.optimize import linear_sum_assignment  # takes a second, and few need it

    if not (radii > 0).all():
        raise ValueError(f"radii must be positive numbers of pixels, not {radii.tolist()}")
    disks = disk_masks(centers, radii, (labels.shape[0], labels.shape[1])).flatten(1)
    numbers, index = labels.flatten().unique(return_inverse=True)
    segments = torch.zeros(len(numbers), labels.numel()).scatter_(0, index.cpu()[None], 1)
    segments = segments[(numbers != 0).cpu()]
    disks = disks.cpu().float()
    shared = disks @ segments.T
    overlaps = shared / (disks.sum(1)[:, None] + segments.sum(1) - shared).clamp_min(1)
    best = torch.zeros(len(disks))
    rows, columns = linear_sum_assignment(overlaps.numpy(), maximize=True)
    best[rows] = overlaps[rows, columns]
    return best


@accept_arrays("probabilities")
def count_interval(probabilities: Tensor, level: float = 0.9) -> tuple[int, int]:
    """Return the least and the largest number of the shortest interval of a posterior.

    It holds at least `level` of the probability, in as few numbers as possible; of several such
    intervals it is the most probable one.

    Args:
        probabilities: those of the numbers 0, 1, ..., (K,), which sum to 1.

    Raises:
        ValueError: a level that is not between 0 and 1, or no probabilities.
    """
    if not 0 < level < 1:
        raise ValueError(f"level must be a number between 0 and 1, such as 0.9, not {level}")
    below = np.concatenate([[0.0], np.cumsum(probabilities.cpu().double().numpy())])
    if probabilities.dim() != 1 or abs(below[-1] - 1) > ROUNDING:
        raise ValueError(
            "probabilities must be those of the numbers 0, 1, ..., (K,), which sum to 1, not "
            f"{below[-1]:.4g}, {tuple(probabilities.shape)}"
        )
    for width in range(1, len(below)):
        mass = below[width:] - below[:-width]
        if mass.max() >= level - ROUNDING:
            break
    low = int(mass.argmax())
    return low, low + width - 1


def interval_coverage(
    posteriors: Sequence[Tensor], numbers: Sequence[int] | Tensor, level: float = 0.9
) -> Coverage:
    """Compare the intervals of posteriors of numbers with true numbers; see `count_interval`.

    Args:
        posteriors: probabilities of the numbers 0, 1, ... of each picture, (K,); K may differ.
        numbers: the true number of objects of each picture.

    Raises:
        ValueError: no posteriors, or as many as numbers.
    """
    if not 0 < len(posteriors) == len(numbers):
        raise ValueError(
            "posteriors and numbers must be as many as there are pictures, at least 1, not "
            f"{len(posteriors)} and {len(numbers)}"
        )
    intervals = [count_interval(posterior, level) for posterior in posteriors]
    inside = [low <= int(n) <= high for (low, high), n in zip(intervals, numbers, strict=True)]
    masses = [
        float(posterior[low : high + 1].sum())
        for posterior, (low, high) in zip(posteriors, intervals, strict=True)
    ]
    return Coverage(sum(inside) / len(inside), sum(masses) / len(masses))
