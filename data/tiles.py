"""Random square tiles of pictures of any sizes, on which scenes are trained."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from capsule_zoo.data.leveling import Leveling, fit_leveling
from capsule_zoo.data.own_pictures import read_whole_pictures
from capsule_zoo.data.progress import announce
from capsule_zoo.data.seeds import seeded_generator
from capsule_zoo.data.sources import Size, Source

TILE = 64  # height and width of a tile of a leveled picture
TRAINING_TILES, HELD_OUT, TEST_TILES = 4000, 50, 200
SETTINGS: dict[str, Any] = dict(  # of the entry `scenes`, for objects 24 pixels wide
    counts="poisson",
    rate=0.3,
    slots=6,
    size=36.0,
    size_distribution="learned",
    size_spread=0.2,
    sigma_image=0.3,
    texture=True,
    window=24,
    thing_settings=dict(latent=12),
)


def tiles_of(path: Path, size: Size | None = None, leveling: Leveling | None = None) -> Source:
    """Read a picture, or a folder of pictures of any sizes, as random tiles for `scenes`.

    Pictures are leveled (`data.leveling`). Of five or more, every fifth shows up in the test tiles
    alone; of fewer, tiles for training and testing are of the same pictures.

    Args:
        path: see `read_whole_pictures`.
        size: width of a typical object in pixels, twice; by default it is guessed.
        leveling: the leveling of a trained model, in place of one that is fitted to the pictures.

    Raises:
        MissingData, ValueError: see `read_whole_pictures` and `fit_leveling`.
    """
    pictures, _ = read_whole_pictures(path)
    if size is not None and size[0] != size[1]:
        raise ValueError(
            f"size is one number for whole pictures, the width of a typical object, not {size}"
        )
    guessed = "as in training; " if leveling else "" if size else "a guess, which --size replaces; "
    leveling = leveling or fit_leveling(pictures, None if size is None else float(size[0]))
    announce(
        f"typical objects are {leveling.width:.0f} pixels wide ({guessed}"
        f"{'dark' if any(leveling.dark) else 'bright'} on their ground)"
    )
    leveled = [_pad(leveling(picture).nan_to_num()) for picture in pictures]
    tested = leveled[::5] if len(leveled) >= 5 else leveled
    trained = [p for k, p in enumerate(leveled) if k % 5] if len(leveled) >= 5 else leveled
    train = tiles_of_pictures(trained, TILE, TRAINING_TILES)
    test = tiles_of_pictures(tested, TILE, TEST_TILES, seed=1)
    settings = {**SETTINGS, "leveling": leveling}
    return Source((train, None), (test, None), (), HELD_OUT, settings=settings)


def _pad(picture: Tensor) -> Tensor:
    """Return a leveled picture (1, H, W) with a margin of ground where it is below a tile."""
    rows, columns = (max(0, TILE - side) for side in picture.shape[1:])
    return F.pad(picture, (columns // 2, columns - columns // 2, rows // 2, rows - rows // 2))


def tiles_of_pictures(
    pictures: Sequence[Tensor], size: int, number: int, seed: int = 0, rotations: bool = True
) -> Tensor:
    """Return random tiles (number, C, size, size) of pictures (C, H, W) of any sizes.

    Every position in every picture at which a tile fits is equally probable.

    Args:
        rotations: rotate each tile by 0 to 3 quarter turns and mirror half of them, at random.

    Warns:
        UserWarning: some pictures are smaller than a tile, and show up in none.

    Raises:
        ValueError: no picture is as large as a tile, pictures of different channels, or a size or
            number below 1.
    """
    if size < 1 or number < 1:
        raise ValueError(f"size and number of tiles must be at least 1, not {size} and {number}")
    channels = {len(picture) for picture in pictures}
    if len(channels) > 1 or any(picture.dim() != 3 for picture in pictures):
        shapes = sorted({tuple(picture.shape) for picture in pictures})
        raise ValueError(
            f"pictures must be (C, H, W) with one number of channels, not {shapes[:3]}; make all "
            "gray or all RGB"
        )
    large = [picture for picture in pictures if min(picture.shape[1:]) >= size]
    if not large:
        smallest = max((min(picture.shape[1:]) for picture in pictures), default=0)
        raise ValueError(
            f"no picture is as large as a tile of {size}x{size} pixels; the largest that fits in "
            f"one has {smallest}: give a smaller size of tiles, or larger pictures"
        )
    if len(large) < len(pictures):
        warnings.warn(
            f"{len(pictures) - len(large)} of {len(pictures)} pictures are smaller than a tile of "
            f"{size}x{size} pixels, and are left out",
            stacklevel=2,
        )
    generator = seeded_generator(seed)
    rooms = [tuple(side - size + 1 for side in picture.shape[1:]) for picture in large]
    positions = torch.tensor([float(rows * columns) for rows, columns in rooms])
    indices = torch.multinomial(positions, number, replacement=True, generator=generator)
    uniform = torch.rand(number, 2, generator=generator, dtype=torch.float64)
    motions = torch.randint(8, (number,), generator=generator).tolist()
    tiles = []
    for index, place, motion in zip(indices.tolist(), uniform.tolist(), motions, strict=True):
        row, column = (int(u * room) for u, room in zip(place, rooms[index], strict=True))
        tile = large[index][:, row : row + size, column : column + size]
        if rotations:
            tile = torch.rot90(tile, motion % 4, (1, 2))
            tile = tile.flip(2) if motion >= 4 else tile
        tiles.append(tile)
    return torch.stack(tiles)
