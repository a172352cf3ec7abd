"""The data set smallNORB: objects from many viewpoints, with every factor of every image.

smallNORB has 5 categories of toys, 10 instances of each (5 to train on, the others to test), 18
azimuths, 9 elevations and 6 lightings: 24,300 pairs of 96x96 gray images in either split. `Toys3D`
(`capsule_zoo.data.toys3d`) has equal factors and needs no files.

>>> data = SmallNORB().train
>>> familiar = data.select(azimuth=[0, 1, 2, 15, 16, 17]).split(size=48)     # a third of them

Reference: LeCun, Huang & Bottou 2004, "Learning Methods for Generic Object Recognition with
Invariance to Pose and Lighting" (CVPR).
"""

import gzip
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from capsule_zoo.data.files import MissingData, fetch, user_cache
from capsule_zoo.data.sources import Size, resize_images
from capsule_zoo.data.splits import Split

CATEGORIES = ("animal", "human", "airplane", "truck", "car")
AZIMUTHS, ELEVATIONS = 18, 9  # numbers of azimuths (every 20 degrees) and elevations (30 to 70)
FACTORS = ("instance", "elevation", "azimuth", "lighting")


@dataclass(frozen=True, eq=False)
class Views:
    """A set of images with the factors of every image.

    Attributes:
        images: bytes, (N, C, H, W).
        labels: category, (N,).
        instance, elevation, azimuth, lighting: int64, (N,); azimuths are steps of 20 degrees,
            elevations steps of 5 degrees from 30 on.
        name: the origin of the images.
        classes: names of the categories.
    """

    images: Tensor
    labels: Tensor
    instance: Tensor
    elevation: Tensor
    azimuth: Tensor
    lighting: Tensor
    name: str = "views"
    classes: tuple[str, ...] = CATEGORIES

    def __len__(self) -> int:
        return len(self.images)

    def select(self, **factors: Iterable[int]) -> "Views":
        """Select the views whose factors are in the given lists, such as `azimuth=[0, 1, 2]`.

        Raises:
            ValueError: there is no such factor, or no such view.
        """
        mask = torch.ones(len(self), dtype=torch.bool)
        for factor, values in factors.items():
            if factor not in ("labels", *FACTORS):
                names = ", ".join(("labels", *FACTORS))
                raise ValueError(f"unknown factor {factor!r}; give some of {names}")
            mask &= torch.isin(getattr(self, factor), torch.tensor(list(values)))
        if not mask.any():
            raise ValueError(f"no view of {self.name!r} has {factors}")
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors: dict[str, Any] = {
            name: value[mask] for name, value in parts.items() if isinstance(value, Tensor)
        }
        return replace(self, **tensors)

    def split(self, size: int | Size | None = None) -> Split:
        """Return the views as a split: float32 in [0, 1], resized to `size` pixels if given.

        A split of 24,300 images takes 900 MB at 96x96 and 220 MB at 48x48.
        """
        pair = (size, size) if isinstance(size, int) else size
        chunks = [resize_images(chunk.float() / 255, pair) for chunk in self.images.split(1000)]
        return Split(torch.cat(chunks), self.labels, self.name)


def views_of_grid(
    images: Tensor, name: str, first: int = 0, classes: tuple[str, ...] = CATEGORIES
) -> Views:
    """Return a full grid of images as views.

    Args:
        images: bytes, (categories, instances, elevations, azimuths, lightings, H, W).
        name: the origin of the images.
        first: number of the first instance.
        classes: names of the categories.
    """
    sizes = [torch.arange(n) for n in images.shape[:5]]
    labels, instance, elevation, azimuth, lighting = (
        grid.flatten() for grid in torch.meshgrid(*sizes, indexing="ij")
    )
    flat = images.reshape(-1, 1, *images.shape[5:])
    return Views(flat, labels, instance + first, elevation, azimuth, lighting, name, classes)


class SmallNORB:
    """The data set smallNORB, read from its original files.

    Args:
        root: the folder that holds the files, packed (`.mat.gz`) or not (`.mat`), directly or in a
            folder `smallnorb`. Without a root they are downloaded to the user's cache (250 MB).

    Attributes:
        train, test: `Views`; no instance is in both.

    Raises:
        MissingData: a file is absent, damaged or not of the format; the message names its address.
    """

    home: ClassVar = "https://cs.nyu.edu/~ylclab/data/norb-v1.0-small/"
    stems: ClassVar = {
        "training": "smallnorb-5x46789x9x18x6x2x96x96-training",
        "testing": "smallnorb-5x01235x9x18x6x2x96x96-testing",
    }

    def __init__(self, root: str | Path | None = None) -> None:
        self.download = root is None
        folder = user_cache() if root is None else Path(root)
        inner = folder / "smallnorb"
        self.root = inner if root is None or inner.is_dir() else folder
        self.train = self._views("training")
        self.test = self._views("testing")

    def _views(self, part: str) -> Views:
        images, labels, info = (self._matrix(part, kind) for kind in ("dat", "cat", "info"))
        if images.dim() != 4 or not len(images) == len(labels) == len(info) or info.dim() != 2:
            raise MissingData(f"the {part} files in {self.root} do not belong together")
        instance, elevation, azimuth, lighting = info.long().T
        return Views(
            images[:, :1],  # of the left camera
            labels.long(),
            instance,
            elevation,
            azimuth // 2,  # stored as 0, 2, ... 34
            lighting,
            f"smallnorb/{part}",
        )

    def _matrix(self, part: str, kind: str) -> Tensor:
        plain = self.root / f"{self.stems[part]}-{kind}.mat"
        packed = plain.with_name(f"{plain.name}.gz")
        try:
            if self.download and not (plain.exists() or packed.exists()):
                fetch(self.home + packed.name, packed)
            raw = plain.read_bytes() if plain.exists() else gzip.decompress(packed.read_bytes())
            return read_matrix(raw)
        except (OSError, EOFError, ValueError) as error:
            raise MissingData(
                f"no readable {plain.name} or {packed.name} in {self.root} ({error}); "
                f"it is published at {self.home}: put it there, set root= or CAPSULE_ZOO_DATA to "
                "a folder that holds it, or use 'toys3d', which needs no download"
            ) from error


_TYPES: dict[int, np.dtype[Any]] = {
    0x1E3D4C54: np.dtype("<i4"),
    0x1E3D4C55: np.dtype("u1"),
    0x1E3D4C51: np.dtype("<f4"),
}


def read_matrix(raw: bytes) -> Tensor:
    """Read a tensor in the binary-matrix format of smallNORB.

    Four bytes give the type and four the rank. Then follow the sizes (at least three, at any rank)
    and the numbers, all little-endian.

    Raises:
        ValueError: the bytes are not of this format.
    """
    if len(raw) < 8:
        raise ValueError("too short for a binary matrix")
    magic, rank = np.frombuffer(raw, "<u4", 2)
    if int(magic) not in _TYPES or not 0 < rank <= 8:
        raise ValueError(f"unknown magic number {int(magic):#x} or rank {int(rank)}")
    sizes = np.frombuffer(raw[8:], "<i4", int(rank)).tolist()
    start = 8 + 4 * max(3, int(rank))
    dtype = _TYPES[int(magic)]
    expected = start + int(np.prod(sizes)) * dtype.itemsize
    if len(raw) != expected:
        raise ValueError(f"{len(raw)} bytes, where a matrix of {sizes} has {expected}")
    return torch.from_numpy(np.frombuffer(raw, dtype, offset=start).reshape(sizes).copy())
