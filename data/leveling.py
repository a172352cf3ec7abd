"""Whole pictures as models of scenes see them: objects of a common size, bright on a black ground.

1. The picture is resized so that a typical object is `OBJECT` pixels wide.
2. The ground is what is left of each channel when objects are removed: its grey opening (of dark
   objects, its closing) by a square that no object covers, smoothed. It cannot follow an object.
3. The contrast is the difference from the ground, of the sign of the objects, clamped at 0. Of
   several channels it is the root mean square.
4. asinh(contrast / scale) brings a micrograph's brightest and its dim objects closer: it is linear
   below the typical contrast of an object, and logarithmic above it. It is divided by its .999
   quantile and clamped at 1.

References:
    Sternberg 1983, "Biomedical image processing" (grounds by opening). Lupton, Gunn & Szalay 1999,
    "A modified magnitude system that produces well-behaved magnitudes" (asinh).
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from capsule_zoo.data.object_size import ObjectSize, guess_object_size
from capsule_zoo.data.registration import Settings

OBJECT = 24  # pixels of a typical object's width in a leveled picture
OPENING = 2.0  # side of the square of the opening, in widths of an object
SMOOTH, BLUR = 0.5, 0.08  # standard deviations of the ground's and the picture's blur, in widths
FAINT = 0.05  # fraction of the .95 quantile of contrast above which a pixel may be of an object
COARSE = 2.0  # standard deviation of the blur that tells bright from dark objects, in widths
NOISE = 3.0  # robust standard deviations above which a pixel may be of an object
TOP = 0.999  # quantile of a leveled picture that is 1
OTHER_WIDTH = 1.7  # ratio of widths from which objects are called others
LEAST_CONTRAST = 1e-4  # of a picture whose pixels range from 0 to 1


@dataclass(frozen=True)
class Leveling(Settings):
    """How whole pictures become images of one channel, (1, h, w), from 0 to 1.

    Attributes:
        width: width of a typical object, in pixels of the picture.
        dark: whether the objects of each channel are darker than its ground, of which they are
            taken to cover less than half.
        scale: typical contrast of an object, in units of the picture's range.
        top: value of asinh(contrast / scale) that becomes 1.
        guessed_width: the width that the pictures' objects seem to have, if another was given.
    """

    width: float
    dark: tuple[bool, ...]
    scale: float
    top: float
    guessed_width: float | None = None

    def __call__(self, picture: Tensor) -> Tensor:
        """Return a picture (C, H, W) leveled, (1, h, w); missing pixels (NaN) stay missing.

        Raises:
            ValueError: another number of channels.
        """
        if picture.dim() != 3 or len(picture) != len(self.dark):
            raise ValueError(
                f"picture must be ({len(self.dark)}, height, width) as the pictures that the model "
                f"was trained on, not {tuple(picture.shape)}"
            )
        level = (_contrast(self.resize(picture), self.dark) / self.scale).asinh() / self.top
        return level.clamp(0, 1)

    def resize(self, picture: Tensor) -> Tensor:
        """Return a picture (C, H, W) in which typical objects have the common width."""
        size = self.size_of(picture)
        if size == tuple(picture.shape[1:]):
            return picture
        return F.interpolate(picture[None], size, mode="bilinear", antialias=True)[0]

    def size_of(self, picture: Tensor) -> tuple[int, int]:
        """Return height and width of a picture (C, H, W) when it is leveled."""
        height, width = (max(1, round(side * OBJECT / self.width)) for side in picture.shape[1:])
        return height, width


def fit_leveling(pictures: Sequence[Tensor], width: float | None = None) -> Leveling:
    """Return the leveling of pictures (C, H, W), which may have different sizes.

    Args:
        width: width of a typical object in pixels; by default it is guessed.

    Raises:
        ValueError: pictures without contrast, or of which no width can be guessed.
    """
    guess = None if width is None else _guess_size(pictures)
    if width is None:
        width = guess_object_size(pictures).diameter
    first = Leveling(float(width), (False,) * len(pictures[0]), 1.0, 1.0)
    small = [first.resize(picture) for picture in pictures]
    dark = _are_dark(small)
    contrast = torch.cat([_contrast(picture, dark).flatten() for picture in small])
    contrast = contrast[~contrast.isnan()]
    middle = contrast.median()
    noise = 1.4826 * (contrast - middle).abs().median()
    least = max(float(middle + NOISE * noise), FAINT * float(_quantile(contrast, 0.95)))
    above = contrast[contrast > least]
    if not len(above) or above.median() < LEAST_CONTRAST:
        raise ValueError(
            "pictures show no objects: they have one color each, or noise alone; give pictures "
            "with at least one object"
        )
    scale = float(above.median())
    top = float(_quantile((contrast / scale).asinh(), TOP))
    return Leveling(float(width), dark, scale, top, guess and guess.diameter)


def warn_of_other_objects(leveling: Leveling, picture: Tensor, number: int = 0) -> None:
    """Warn where the objects of a picture (C, H, W) seem to have another tone or another width.

    Args:
        leveling: that of a model, which takes the picture.
        number: the picture's number, for the message.
    """
    dark = _are_dark([leveling.resize(picture)])
    if all(now != before for now, before in zip(dark, leveling.dark, strict=True)):
        tone, other = ("darker", "brighter") if leveling.dark[0] else ("brighter", "darker")
        warnings.warn(
            f"objects of picture {number + 1} seem {other} than its ground, and in training they "
            f"were {tone}, so that counts may be wrong; train on this picture, or invert it",
            stacklevel=3,
        )
    guess, before = _guess_size([picture]), leveling.guessed_width or leveling.width
    if guess is None:
        return
    low, high = guess.range
    if before * OTHER_WIDTH < low or high * OTHER_WIDTH < before:
        warnings.warn(
            f"objects of picture {number + 1} seem {guess.diameter:.0f} pixels wide, and in "
            f"training they seemed {before:.0f}, so that counts may be wrong; resize the picture, "
            "or train on it",
            stacklevel=3,
        )


def _are_dark(pictures: Sequence[Tensor]) -> tuple[bool, ...]:
    """Return whether the objects of each channel of resized pictures are darker than its ground."""
    skewness = torch.stack([_third_moment(picture) for picture in pictures]).sum(0)
    return tuple(bool(skew < 0) for skew in skewness)


def _third_moment(picture: Tensor) -> Tensor:
    """Return the sum of cubed differences of a picture (C, h, w) from its coarse blur, (C,).

    It is positive if objects are brighter than their ground, of which they cover less than half.
    """
    from scipy import ndimage  # takes a third of a second, and few need it

    pixels = torch.where(picture.isnan(), picture.nanmean((1, 2), keepdim=True), picture)
    scale = COARSE * OBJECT
    smooth = ndimage.gaussian_filter(pixels.numpy(), (0, scale, scale))
    return (picture - torch.from_numpy(smooth)).pow(3).nansum((1, 2))


def _quantile(values: Tensor, level: float) -> Tensor:
    """Return a quantile of many values, which `torch.quantile` refuses."""
    return values.kthvalue(max(1, round(level * len(values)))).values


def _contrast(picture: Tensor, dark: tuple[bool, ...]) -> Tensor:
    """Return the contrast of a picture (C, h, w) with its ground, (1, h, w), not negative."""
    return _difference(picture, dark).square().mean(0, keepdim=True).sqrt()


def _difference(picture: Tensor, dark: tuple[bool, ...]) -> Tensor:
    """Return how much brighter (of dark objects, darker) than its ground each pixel is, >= 0."""
    from scipy import ndimage  # takes a third of a second, and few need it

    side = int(OPENING * OBJECT) | 1
    differences = []
    for channel, is_dark in zip(picture, dark, strict=True):
        bright = -channel if is_dark else channel
        missing = bright.isnan()
        pixels = (
            torch.where(missing, bright[~missing].median(), bright) if missing.any() else bright
        )
        blurred = ndimage.gaussian_filter(pixels.numpy(), BLUR * OBJECT)
        ground = ndimage.grey_opening(blurred, size=(side, side))
        smooth = torch.from_numpy(ndimage.gaussian_filter(ground, SMOOTH * OBJECT))
        differences.append((bright - smooth).clamp_min(0))
    return torch.stack(differences)


def _guess_size(pictures: Sequence[Tensor]) -> ObjectSize | None:
    """Return the size that objects of pictures seem to have; None if they show no objects."""
    try:
        return guess_object_size([picture.nan_to_num() for picture in pictures])
    except ValueError:
        return None
