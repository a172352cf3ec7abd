"""Pictures of many objects with known number, centers and pixels, composed one by one when asked.

>>> pictures = composed_digits(root, "test", number=200)      # 20 to 60 digits on 300x300 pixels
>>> pictures[7].image, pictures[7].centers, pictures[7].objects.counts
>>> composed_sprites(200, channels=3, ground="smooth")        # shapes in colors
>>> composed_emoji(folder, "train", ground=photographs)       # 0 to 3 of kinds that no test shows

A picture is a function of the seed and of its index alone, so that pictures need no memory before
they are used, and may be drawn in any order.

Objects lie inside the canvas, at uniform positions, and later ones in front of earlier ones. The
mask of an object is where it covers more than half of a pixel. Masks do not overlap, unless
`overlap` allows it; then each object keeps at least the fraction 1 - overlap of its mask visible.
A position that breaks this rule is drawn again, with another object.
"""

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from capsule_zoo.data.files import MissingData
from capsule_zoo.data.scenes import GRAY, INK, Objects, boxes_of, masks_of, sprite_bank
from capsule_zoo.data.seeds import seeded_generator
from capsule_zoo.data.sources import (
    channels_first,
    digits,
    resize_images,
    split_at_random,
    torchvision_images,
)

GROUNDS = ("black", "plain", "smooth")
CELL = 100  # pixels between the random tones of a smooth ground
CONTRAST = 0.25  # least difference of an object without colors from the ground, in some channel
TRIES, RESTARTS = 500, 5  # positions of an object, and pictures, after which objects do not fit


class ComposedPicture(NamedTuple):
    """A picture of n objects, and the truth about them.

    Attributes:
        image: (C, H, W), from 0 to 1.
        objects: one scene: `numbers` (1, H, W) is the label image, `classes` (1, n) and `boxes`.
        centers: mean position x, y of each object's mask, hidden pixels included, (n, 2).
    """

    image: Tensor
    objects: Objects
    centers: Tensor


class ComposedPictures:
    """Compose `number` pictures of many objects from patches, each when it is asked for.

    Args:
        patches: pictures of single objects, (K, 1, P, P), the fraction of each pixel that the
            object covers, or (K, C + 1, P, P), colors and then that fraction.
        classes: class of each patch, (K,).
        number: number of pictures.
        canvas: height and width of a picture, in pixels.
        least, most: smallest and largest number of objects in a picture, uniform in between.
        size: mean height and width of an object's patch, in pixels; its own by default.
        spread: standard deviation of the log size.
        overlap: largest fraction of an object's mask that later objects hide.
        channels: 1 or 3, for patches without colors. Gray objects are white, and others have a
            random color that differs from the ground. Patches with colors have their own channels.
        ground: "black", "plain" (one random tone or color), "smooth" (a grid of random tones with
            smooth transitions), or photographs (n, C, h, w), of which a random part is shown; small
            ones are enlarged.
        seed: pictures of different seeds are different.

    Raises:
        ValueError: an argument out of range, or, once a picture is drawn, objects that do not fit.
    """

    def __init__(
        self,
        patches: Tensor,
        classes: Tensor,
        number: int,
        *,
        canvas: tuple[int, int] = (300, 300),
        least: int = 20,
        most: int = 60,
        size: float | None = None,
        spread: float = 0.0,
        overlap: float = 0.0,
        channels: int = 1,
        ground: str | Tensor = "black",
        seed: int = 0,
    ) -> None:
        self.patches, self.classes, self.number = patches, classes, number
        self.canvas, self.least, self.most = canvas, least, most
        self.size = patches.shape[-1] if size is None else size
        self.spread, self.overlap, self.ground, self.seed = spread, overlap, ground, seed
        self.channels = channels if patches.shape[1] == 1 else patches.shape[1] - 1
        if not 0 <= least <= most or not 1 <= most <= 255:  # numbers of pixels are bytes
            raise ValueError(
                f"least and most must be numbers with 0 <= least <= most and 1 <= most <= 255, not "
                f"{least} and {most}"
            )
        if not (0 < self.size < math.inf and 0 <= spread < math.inf and 0 <= overlap <= 1):
            raise ValueError(
                "size must be above 0, spread at least 0, and overlap from 0 to 1, not "
                f"{self.size}, {spread} and {overlap}"
            )
        if self.size > min(canvas):
            raise ValueError(
                f"canvas={canvas} has no room for objects of {self.size:g} pixels; use a larger "
                "canvas or a smaller size"
            )
        if isinstance(ground, str) and ground not in GROUNDS:
            raise ValueError(
                f"ground must be {', '.join(GROUNDS)} or photographs (n, C, h, w), not {ground!r}"
            )
        if isinstance(ground, Tensor) and ground.shape[1] != self.channels:
            raise ValueError(
                f"ground has {ground.shape[1]} channels, and pictures have {self.channels}; give "
                "photographs with as many"
            )

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> ComposedPicture:
        """Compose the picture of an index."""
        if not -self.number <= index < self.number:
            raise IndexError(f"there are {self.number} pictures, and none of index {index}")
        generator = seeded_generator(self.seed, index % self.number)
        number = int(torch.randint(self.least, self.most + 1, (), generator=generator))
        for _ in range(RESTARTS):
            if (picture := self._compose(number, generator)) is not None:
                return picture
        raise ValueError(
            f"{number} objects of {self.size:g} pixels do not fit on {self.canvas[1]}x"
            f"{self.canvas[0]} pixels; give a larger canvas, a smaller most or an overlap"
        )

    def _compose(self, number: int, generator: torch.Generator) -> ComposedPicture | None:
        """Compose a picture of `number` objects; None if one of them finds no position."""
        height, width = self.canvas
        image = self._draw_ground(generator)
        numbers = torch.zeros(height, width, dtype=torch.uint8)
        areas, classes, centers = torch.zeros(number + 1), [], []
        for count in range(1, number + 1):
            for _ in range(TRIES):
                index, patch = self._draw_patch(generator)
                side = patch.shape[-1]
                if side > min(height, width):
                    continue
                row, column = (
                    int(torch.randint(room - side + 1, (), generator=generator))
                    for room in self.canvas
                )
                part = (slice(row, row + side), slice(column, column + side))
                mask = patch[-1] > INK
                if mask.any() and self._has_room(numbers, part, mask, areas):
                    break
            else:
                return None
            areas[count] = mask.sum()
            numbers[part][mask] = count
            paint(image[(slice(None), *part)], patch, generator)
            rows, columns = mask.nonzero().double().mean(0).tolist()
            centers.append((column + columns, row + rows))
            classes.append(int(self.classes[index]))
        truth = Objects(
            numbers[None],
            torch.tensor(classes, dtype=torch.int64)[None],
            boxes_of(masks_of(numbers[None], number)),
        )
        return ComposedPicture(image, truth, torch.tensor(centers).reshape(-1, 2))

    def _draw_patch(self, generator: torch.Generator) -> tuple[int, Tensor]:
        """Draw the index of a patch, and return it with the patch in its size, (C, s, s)."""
        index = int(torch.randint(len(self.patches), (), generator=generator))
        factor = math.exp(self.spread * float(torch.randn((), generator=generator)))
        side = max(1, round(self.size * factor))
        return index, resize_patches(self.patches[index][None], side)[0]

    def _has_room(
        self, numbers: Tensor, part: tuple[slice, slice], mask: Tensor, areas: Tensor
    ) -> bool:
        """Return whether enough of every object stays visible if a mask is put in front."""
        hidden = torch.bincount(numbers[part][mask].long(), minlength=len(areas))
        hidden[0] = 0
        if not hidden.any() or not self.overlap:
            return not hidden.any()
        visible = torch.bincount(numbers.flatten().long(), minlength=len(areas)) - hidden
        touched = hidden > 0
        return bool((visible[touched] >= (1 - self.overlap) * areas[touched]).all())

    def _draw_ground(self, generator: torch.Generator) -> Tensor:
        """Draw the ground of a picture, (C, H, W)."""
        if isinstance(self.ground, Tensor):
            index = int(torch.randint(len(self.ground), (), generator=generator))
            return crop_photograph(self.ground[index], self.canvas, generator)
        shape = (self.channels, *self.canvas)
        if self.ground == "black":
            return torch.zeros(shape)
        bright = 0.4 if self.channels == 1 else 1.0  # gray objects are white
        tones = bright * torch.rand(1, self.channels, 1, 1, generator=generator)
        if self.ground == "plain":
            return tones[0].expand(shape).clone()
        grid = [2 + side // CELL for side in self.canvas]
        steps = torch.rand(1, self.channels, *grid, generator=generator) - 0.5
        tones = (tones + 0.3 * steps).clamp(0, bright)
        return F.interpolate(tones, self.canvas, mode="bicubic", align_corners=True)[0].clamp(0, 1)


def paint(image: Tensor, patch: Tensor, generator: torch.Generator) -> None:
    """Paint a patch (1 or C + 1, s, s) on a part (C, s, s) of a picture, in place.

    Patches without colors are white on gray pictures. On others they have a random color.
    """
    cover = patch[-1:]
    if len(patch) > 1:
        color = patch[:-1]
    elif len(image) == 1:
        color = torch.ones(1, 1, 1)
    else:
        here = (cover * image).sum((1, 2)) / cover.sum()
        color = torch.rand(len(image), generator=generator)
        while (color - here).abs().max() < CONTRAST:
            color = torch.rand(len(image), generator=generator)
        color = color[:, None, None]
    image.copy_(cover * color + (1 - cover) * image)


def resize_patches(patches: Tensor, side: int) -> Tensor:
    """Resize patches (K, C, P, P), whose last channel is a coverage, to `side` pixels.

    Colors are weighted by the coverage, so that colors of uncovered pixels do not count.
    """
    if patches.shape[-1] == side:
        return patches
    cover = patches[:, -1:]
    resized = resize_images(torch.cat([patches[:, :-1] * cover, cover], 1), (side, side))
    color = resized[:, :-1] / resized[:, -1:].clamp_min(1e-6)
    return torch.cat([color.clamp(0, 1), resized[:, -1:]], 1)


def crop_photograph(
    photograph: Tensor, size: tuple[int, int], generator: torch.Generator
) -> Tensor:
    """Return a random part of a photograph (C, h, w), (C, *size); a small one is enlarged first."""
    factor = max(1.0, *(need / side for need, side in zip(size, photograph.shape[1:], strict=True)))
    if factor > 1:
        larger = [math.ceil(side * factor) for side in photograph.shape[1:]]
        photograph = resize_images(photograph[None], (larger[0], larger[1]))[0]
    room = [side - need + 1 for side, need in zip(photograph.shape[1:], size, strict=True)]
    row, column = (int(torch.randint(span, (), generator=generator)) for span in room)
    return photograph[:, row : row + size[0], column : column + size[1]].clone()


def _check_split(split: str) -> None:
    """Raise ValueError unless a split is "train" or "test"."""
    if split not in ("train", "test"):
        raise ValueError(f"split must be train or test, not {split!r}")


def composed_digits(
    root: Path | None, split: str = "test", number: int = 200, *, of: str = "mnist", **options: Any
) -> ComposedPictures:
    """Return pictures of many digits of 28x28 pixels.

    Args:
        root: folder of torchvision's data sets; None to download them to the user's cache.
        split: "train" or "test". Pictures of different splits show different digits.
        of: "mnist", "fashion-mnist", or "digits" for scikit-learn's, which need no file.
        options: further arguments of `ComposedPictures`.

    Raises:
        MissingData: the files are not there.
        ValueError: an unknown split or data set, or a wrong option.
    """
    _check_split(split)
    if of not in (*GRAY, "digits"):
        raise ValueError(f"of must be {', '.join(GRAY)} or digits, not {of!r}")
    source = digits() if of == "digits" else torchvision_images(GRAY[of], root)
    images, labels = source.train if split == "train" else source.test
    return ComposedPictures(images, labels, number, **options)


def composed_sprites(number: int = 200, **options: Any) -> ComposedPictures:
    """Return pictures of many sprites of 10 to 20 pixels; see `ComposedPictures`."""
    bank, classes = sprite_bank()
    return ComposedPictures(bank[:, None], classes, number, **options)


def composed_emoji(
    folder: Path, split: str = "test", number: int = 200, **options: Any
) -> ComposedPictures:
    """Return pictures of 0 to 3 emoji of 18 pixels, 48x48 pixels, on plain grounds.

    Args:
        folder: pictures with transparency, as `tools/emoji.py` writes them.
        split: "train" or "test", a fixed fifth of the files; pictures of different splits show
            different emoji.
        options: further arguments of `ComposedPictures`.

    Raises:
        MissingData: no folder, or fewer than two pictures with transparency in it.
        ValueError: an unknown split, or a wrong option.
    """
    _check_split(split)
    patches = read_transparent_pictures(folder)
    examples = patches, torch.arange(len(patches))
    train, test = split_at_random(examples, max(1, len(patches) // 5))
    defaults: dict[str, Any] = dict(canvas=(48, 48), least=0, most=3, size=18, ground="plain")
    kinds, classes = train if split == "train" else test
    return ComposedPictures(kinds, classes, number, **defaults | options)


def photographs(split: str = "test") -> Tensor:
    """Return three photographs in color, (3, 3, 300, 400), with scikit-image (extra `pictures`).

    Args:
        split: "train" or "test"; the photographs of different splits are different.

    Raises:
        ValueError: an unknown split.
    """
    _check_split(split)
    from skimage import data
    from sklearn.datasets import load_sample_images

    china, flower = load_sample_images().images
    sides = {
        "train": [china, data.astronaut(), data.coffee()],
        "test": [flower, data.chelsea(), data.rocket()],
    }
    return torch.cat([channels_first(picture[None, :300, :400].copy()) for picture in sides[split]])


def read_transparent_pictures(folder: Path) -> Tensor:
    """Read the PNG files of a folder as colors and coverage, (K, 4, H, W), from 0 to 1.

    Raises:
        MissingData: no folder, or fewer than two pictures; one without transparency, or of another
            size than the first.
    """
    from PIL import Image

    files = sorted(folder.glob("*.png")) if folder.is_dir() else []
    if len(files) < 2:
        raise MissingData(
            f"{folder} is no folder of PNG pictures with transparency; fetch some by "
            f"python tools/emoji.py {folder}"
        )
    pictures: list[np.ndarray] = []
    for file in files:
        with Image.open(file) as opened:
            picture = opened.convert("RGBA")
        if picture.getchannel("A").getextrema()[0] == 255:
            raise MissingData(f"{file} has no transparent pixel; remove it from {folder}")
        if pictures and picture.size != (pictures[0].shape[1], pictures[0].shape[0]):
            raise MissingData(f"{file} has another size than {files[0]}; bring them to one size")
        pictures.append(np.asarray(picture))
    return channels_first(np.stack(pictures))
