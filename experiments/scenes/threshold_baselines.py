"""Baselines that count without learning: thresholds and a watershed, of scikit-image.

    otsu         Otsu's threshold; connected pixels are an object
    watershed    Otsu's threshold; touching objects are divided by a watershed of the distance to
                 the ground, from its maxima
    local        a pixel is compared with the mean of its neighborhood; connected pixels are an
                 object

All three blur the picture first, fill holes, and leave out small objects. Their settings are taken
in three ways (`score_baselines`):

    default   those of `DEFAULTS`, which a user without marks may take: the root of the intensities,
              whose noise is even, and small blurs
    other     the best ones of a grid on the other picture, by its marks
    best      the best ones of the grid on the very picture that is scored, by its marks: a bound of
              what the method can do, and not what a user without marks reaches

The best settings have the largest F1 score of centers, and then the largest overlap with circles.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from capsule_zoo.data.whole_pictures import MarkedPicture, read_whole_picture
from capsule_zoo.inference.counting import (
    CenterScores,
    circle_overlaps,
    label_centers,
    score_centers,
)

SCALES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "linear": np.asarray,
    "root": np.sqrt,
    "log": lambda pixels: np.log(pixels + 0.01),
}
GRID: dict[str, dict[str, tuple]] = {
    "otsu": {},
    "watershed": dict(distance=(5, 7, 9, 11, 13), smooth=(0.0, 1.0, 2.0)),
    "local": dict(block=(25, 41, 61, 81, 121), offset=(0.0, 0.02, 0.05)),
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "otsu": dict(scale="root", blur=1.0, least=20),
    "watershed": dict(scale="root", blur=1.0, least=20, distance=9, smooth=1.0),
    "local": dict(scale="root", blur=1.0, least=20, block=61, offset=0.0),
}
NEAR = {"nuclei": 10.0}  # largest distance of a center from its mark; of coins, the coin's radius
SHARED_GRID = dict(scale=tuple(SCALES), blur=(0.0, 1.0, 2.0), least=(20, 60, 120))


class BaselineScores(NamedTuple):
    """Scores of a baseline on a picture.

    Attributes:
        settings: the settings, by name.
        centers: scores of the centers.
        overlap: mean overlap (IoU) of the marked circles with segments; NaN without circles.
    """

    settings: dict[str, Any]
    centers: CenterScores
    overlap: float


def otsu_labels(image: np.ndarray, *, blur: float, least: int) -> np.ndarray:
    """Return a label image (H, W) of the connected pixels above Otsu's threshold."""
    from skimage.filters import threshold_otsu

    smooth = _blur(image, blur)
    return _connected(smooth > threshold_otsu(smooth), least)


def watershed_labels(
    image: np.ndarray, *, blur: float, least: int, distance: int, smooth: float
) -> np.ndarray:
    """Return a label image (H, W) of Otsu's threshold, divided by a watershed.

    Args:
        distance: least distance between the middles of two objects, in pixels.
        smooth: standard deviation of a blur of the distances to the ground, in pixels.
    """
    from scipy.ndimage import distance_transform_edt
    from skimage.feature import peak_local_max
    from skimage.segmentation import watershed

    labels = otsu_labels(image, blur=blur, least=least)
    depth = _blur(distance_transform_edt(labels > 0), smooth)
    peaks = peak_local_max(depth, min_distance=distance, labels=labels, exclude_border=False)
    markers = np.zeros(image.shape, dtype=np.int64)
    markers[tuple(peaks.T)] = np.arange(1, 1 + len(peaks))
    return watershed(-depth, markers, mask=labels > 0)


def local_labels(
    image: np.ndarray, *, blur: float, least: int, block: int, offset: float
) -> np.ndarray:
    """Return a label image (H, W) of connected pixels brighter than their neighborhood.

    Args:
        block: side of the neighborhood, in pixels, an odd number.
        offset: a pixel must be brighter by this fraction of the picture's range.
    """
    from skimage.filters import threshold_local

    smooth = _blur(image, blur)
    level = threshold_local(smooth, block) + offset * np.ptp(smooth)
    return _connected(smooth > level, least)


LABELS: dict[str, Callable[..., np.ndarray]] = {
    "otsu": otsu_labels,
    "watershed": watershed_labels,
    "local": local_labels,
}


def _blur(image: np.ndarray, deviation: float) -> np.ndarray:
    from scipy.ndimage import gaussian_filter

    return gaussian_filter(image, deviation) if deviation else image


def _connected(mask: np.ndarray, least: int) -> np.ndarray:
    """Return labels of the connected parts of a mask with at least `least` pixels, holes filled."""
    from scipy.ndimage import binary_fill_holes
    from skimage.measure import label

    labels = label(binary_fill_holes(mask))
    sizes = np.bincount(labels.ravel())
    return np.where(sizes[labels] >= least, labels, 0)


def settings_of(method: str) -> Iterator[dict[str, Any]]:
    """Yield all settings of the grid of a method."""
    grid = SHARED_GRID | GRID[method]
    return (dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values()))


def baseline_labels(image: Tensor, method: str, *, scale: str, **settings: Any) -> Tensor:
    """Return the label image (H, W) of a method for a gray picture (1, H, W)."""
    pixels = SCALES[scale](image[0].double().numpy())
    return torch.from_numpy(LABELS[method](pixels, **settings).astype(np.int64))


def score_baseline(
    picture: MarkedPicture, method: str, distance: Tensor | float, settings: dict[str, Any]
) -> BaselineScores:
    """Score a method on a picture; centers lie within a distance of marks, see `score_centers`."""
    labels = baseline_labels(picture.image, method, **settings)
    scores = score_centers(label_centers(labels), picture.centers, distance)
    overlap = math.nan
    if picture.radii.isfinite().all():
        overlap = circle_overlaps(labels, picture.centers, picture.radii).mean().item()
    return BaselineScores(settings, scores, overlap)


def best_baseline(picture: MarkedPicture, method: str, distance: Tensor | float) -> BaselineScores:
    """Score a method with the settings of its grid that suit a picture best."""
    scores = (score_baseline(picture, method, distance, s) for s in settings_of(method))
    return max(scores, key=lambda s: (f1_score(s.centers), np.nan_to_num(s.overlap)))


def f1_score(centers: CenterScores) -> float:
    """Return the harmonic mean of precision and recall."""
    total = centers.precision + centers.recall
    return 2 * centers.precision * centers.recall / total if total else 0.0


def score_baselines() -> Iterator[tuple[str, str, BaselineScores]]:
    """Yield picture, method with the origin of its settings, and scores: coins, then nuclei."""
    pictures = {name: read_whole_picture(name) for name in ("coins", "nuclei")}
    near = {name: NEAR.get(name, picture.radii) for name, picture in pictures.items()}
    best = {
        (name, method): best_baseline(picture, method, near[name]).settings
        for name, picture in pictures.items()
        for method in LABELS
    }
    for (name, picture), other in zip(pictures.items(), ("nuclei", "coins"), strict=True):
        for method in LABELS:
            default = DEFAULTS[method]
            origins = {"default": default, "other": best[other, method], "best": best[name, method]}
            for origin, settings in origins.items():
                scores = score_baseline(picture, method, near[name], settings)
                yield name, f"{method}_{origin}", scores
