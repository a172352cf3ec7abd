"""A guess of the size of a typical object, from pictures without labels.

Pixels that differ from the ground are told from others by Otsu's threshold, once of differences and
once of their logarithms, because the brightest objects of a micrograph may hide the others. The
covariance of this mask with itself falls with distance, and ends to fall where the distance is the
diameter of an object: a disk of diameter D overlaps with its copy at .88 D by .05 of its area, and
a little earlier where neighbors keep apart. No shape, texture or sign of the contrast is assumed.

References:
    Otsu 1979, "A Threshold Selection Method from Gray-Level Histograms".
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

MOST_PICTURES, MOST_PIXELS = 50, 1000  # pictures that are looked at, and of a side of each
MARGIN = 1.2  # size of a square about an object, in diameters
FALL = 0.05  # fraction of the covariance's fall that is left at the distance that is measured
DISTANCE = 0.8  # that distance, in diameters
SIGNIFICANT = 5.0  # standard errors by which the covariance of neighbors must be above 0
CELLS = 4  # of a side of a large picture, whose medians are the ground
LARGE = 100  # pixels of a side from which on the ground may vary within a picture
ROUNDING = 1e-5  # of the ground of a picture of one color; less than a step of 16 bits
LEAST_DIAMETER, LARGEST = 3.0, 0.4  # pixels, and fraction of a picture's side


class ObjectSize(NamedTuple):
    """The size of a typical object.

    Attributes:
        diameter: width of the object itself, in pixels.
        size: height and width of a square that holds it with a margin, in pixels.
        range: the smaller and the larger guess, in pixels; they differ where noise or faint objects
            count as objects by one of both thresholds.
    """

    diameter: float
    size: int
    range: tuple[float, float]

    def __str__(self) -> str:
        return f"objects about {self.diameter:.0f} pixels wide, in squares of {self.size} pixels"


def guess_object_size(pictures: Sequence[Tensor] | Tensor) -> ObjectSize:
    """Guess the size of the objects of pictures (C, H, W), which may have different sizes.

    At most 50 of them are looked at, evenly spaced. Objects of very different sizes have a typical
    one in between. Textured grounds, such as photographs, and grounds that vary more than the few
    objects on them, are taken for objects, or refused.

    Raises:
        ValueError: no pictures, or pictures that show no objects: pixels of one value, noise, or a
            smooth ground.
    """
    if not len(pictures):
        raise ValueError("pictures must hold at least one picture (C, H, W), and it is empty")
    some = [
        pictures[k] for k in np.linspace(0, len(pictures) - 1, MOST_PICTURES).round().astype(int)
    ]
    some = some if len(pictures) > MOST_PICTURES else list(pictures)
    side = max(max(picture.shape[-2:]) for picture in some)
    factor = min(1.0, MOST_PIXELS / side)
    differences = [_difference_from_ground(picture, factor) for picture in some]
    values = torch.cat([d.flatten() for d in differences])
    noise = max(1.4826 * values.median().item(), 0.02 * values.max().item())
    if values.max() < ROUNDING:
        raise ValueError(
            "pictures have one color each and show no objects, so that no size can be guessed; "
            "give other pictures, or the size in pixels"
        )
    diameters = [
        _diameter([_as_mask(d, values) for d in differences]),
        _diameter(
            [_as_mask(torch.asinh(d / noise), torch.asinh(values / noise)) for d in differences]
        ),
    ]
    low, high = min(diameters), max(diameters)
    diameter = low if high > 2 * low else math.sqrt(low * high)
    if not LEAST_DIAMETER < diameter < LARGEST * min(min(d.shape) for d in differences):
        raise ValueError(
            "pictures show no objects of one size, but noise, a smooth or a textured ground, or "
            "objects as large as themselves; give the size of an object in pixels"
        )
    diameter /= factor
    return ObjectSize(diameter, round(MARGIN * diameter), (low / factor, high / factor))


def _difference_from_ground(picture: Tensor, factor: float) -> Tensor:
    """Return the distance of each pixel's color from the ground's, (H, W), reduced by a factor."""
    picture = picture.float().nan_to_num(picture.nanmedian().item())[None]
    if factor < 1:
        height, width = (max(1, round(factor * side)) for side in picture.shape[-2:])
        picture = F.interpolate(picture, (height, width), mode="area")
    cells = CELLS if min(picture.shape[-2:]) >= LARGE else 1
    inside = 16  # means of a cell along each side, of which the median is taken
    means = F.interpolate(picture, (cells * inside, cells * inside), mode="area")
    tones = means.unfold(2, inside, inside).unfold(3, inside, inside).flatten(4).median(-1).values
    ground = F.interpolate(tones, tuple(picture.shape[-2:]), mode="bicubic")
    return (picture - ground)[0].norm(dim=0)


def _as_mask(differences: Tensor, values: Tensor) -> Tensor:
    """Return 1 where a difference is above Otsu's threshold of all `values`, else 0."""
    return (differences > otsu_threshold(values)).float()


def otsu_threshold(values: Tensor, bins: int = 256) -> float:
    """Return the threshold of values, of any shape, with the most variance between both sides."""
    low, high = values.min().item(), values.max().item()
    counts = torch.histc(values.float(), bins, low, high).double()
    tones = low + (high - low) * (torch.arange(bins).double() + 0.5) / bins
    number, total = counts.cumsum(0), (counts * tones).cumsum(0)
    rest = number[-1] - number
    between = number * rest * (total / number - (total[-1] - total) / rest).square()
    return tones[between.nan_to_num(-1).argmax()].item() + (high - low) / bins / 2


def _diameter(masks: list[Tensor]) -> float:
    """Return the distance at which masks (H, W) are no more like themselves; infinite if none."""
    covariance = _radial_covariance(masks)
    pairs = 4 * sum(mask.numel() for mask in masks)  # of neighbors, whose covariance is measured
    if covariance[1] <= SIGNIFICANT * covariance[0] / pairs**0.5:
        return 0.0  # neighbors are as different as in noise
    end = _first_minimum(covariance)
    if end is None:
        return math.inf
    level = covariance[end] + FALL * (covariance[1] - covariance[end])
    after = int((covariance <= level).nonzero()[0])
    if after <= 1:
        return 0.0
    before, here = covariance[after - 1], covariance[after]
    return (after - 1 + ((before - level) / (before - here)).item()) / DISTANCE


def _first_minimum(covariance: Tensor) -> int | None:
    """Return the first minimum below a tenth of the variance; smaller bumps are passed over."""
    low = (covariance < 0.1 * covariance[0]).nonzero()
    if not len(low):
        return None
    at = int(low[0])
    while at < len(covariance) - 1:
        ahead = covariance[at + 1 : at + 1 + max(2, round(0.2 * at))]
        if ahead.min() >= covariance[at]:
            break
        at += 1 + int(ahead.argmin())
    return at


def _radial_covariance(masks: list[Tensor]) -> Tensor:
    """Return the covariance of pixels at distances 0, 1, ... up to half a side, over all masks."""
    mean = torch.cat([mask.flatten() for mask in masks]).mean()
    reach = max(2, min(min(mask.shape) for mask in masks) // 2)
    sums, numbers = torch.zeros(reach).double(), torch.zeros(reach).double()
    for mask in masks:
        height, width = mask.shape
        size = (2 * height, 2 * width)  # so that the ends do not meet
        rows, columns = (torch.fft.fftfreq(side) * side for side in size)
        distance = torch.hypot(rows[:, None], columns).round().long()
        inside = (distance < reach) & (rows.abs() < height)[:, None] & (columns.abs() < width)
        for field, target in ((mask - mean, sums), (torch.ones_like(mask), numbers)):
            power = torch.fft.rfft2(field, s=size).abs().square()
            products = torch.fft.irfft2(power, s=size)
            target.index_add_(0, distance[inside], products[inside].double())
    return sums / numbers
