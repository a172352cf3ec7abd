"""Two real pictures of many objects, with marks made by hand: a table of coins, and nuclei.

    coins     24 Greek coins, all of them whole, on uneven ground: `coins.png` of scikit-image,
              384x303 gray pixels of 8 bits. It is read at .6 of its size, 230x182 pixels.
    nuclei    61 nuclei of cells under a fluorescence microscope, some of them cut by the border:
              `nuclear.png` of mahotas, 1344x1024 gray pixels of 8 bits. It is read at a third of
              its size, 448x341 pixels. 1,140 pixels of the two brightest nuclei are saturated.

The packages of these pictures are extras: pip install 'capsule-zoo[pictures]'. `marks.csv` holds a
circle for each coin, .2 to 1.1 pixels from its border on average and nowhere more than 2.5, because
coins are not quite round, and the center of each nucleus. Nuclei that lie outside, and only light
the border, have no mark.
"""

import math
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from capsule_zoo.data.files import MissingData
from capsule_zoo.data.pictures import read_picture

MARKS = Path(__file__).parent / "marks.csv"
FILES = {  # package to import, its name in the index, file in it, fraction of the size
    "coins": ("skimage", "scikit-image", "data/coins.png", 0.6),
    "nuclei": ("mahotas", "mahotas", "demos/data/nuclear.png", 1 / 3),
}


@dataclass(frozen=True, eq=False)
class MarkedPicture:
    """A picture, and marks of its objects made by hand.

    Attributes:
        image: (1, H, W), from 0 to 1.
        centers: x to the right and y downward of each object, in pixels, (n, 2). The center of the
            first pixel is (0, 0).
        radii: radius of the circle about each object, in pixels, (n,); NaN where there is none.
    """

    image: Tensor
    centers: Tensor
    radii: Tensor


def read_whole_picture(name: str, scale: float | None = None) -> MarkedPicture:
    """Read a picture of many objects, `coins` or `nuclei`, and its marks.

    Args:
        scale: fraction of the size of the picture's file; by default that of the list above.

    Raises:
        MissingData: the package that holds the picture is not installed.
        ValueError: an unknown name, or a scale that is not positive.
    """
    if name not in FILES:
        raise ValueError(f"name must be {' or '.join(FILES)}, not {name!r}")
    scale = FILES[name][3] if scale is None else scale
    if not 0 < scale < math.inf:
        raise ValueError(f"scale must be a number above 0, such as 1, not {scale}")
    file = whole_picture_file(name)
    height, width = read_picture(file, None).pixels.shape[:2]
    pixels = read_picture(file, (round(height * scale), round(width * scale))).pixels
    image = torch.from_numpy(pixels.astype(np.float32) / 255)[None]
    table = pd.read_csv(MARKS).query("picture == @name")
    marks = torch.tensor(table[["x", "y", "radius"]].to_numpy(), dtype=torch.float32)
    factor = marks.new_tensor([image.shape[-1] / width, image.shape[-2] / height])
    centers = (marks[:, :2] + 0.5) * factor - 0.5  # pixels are squares about their centers
    return MarkedPicture(image, centers, marks[:, 2] * factor.prod().sqrt())


def whole_picture_file(name: str) -> Path:
    """Return the file of a picture in the package that holds it.

    Raises:
        MissingData: the package is not installed, or lacks the file.
    """
    module, package, inside, _ = FILES[name]
    spec = find_spec(module)
    folders = spec.submodule_search_locations if spec is not None else None
    file = Path(next(iter(folders or ["."])), inside)
    if folders is None or not file.is_file():
        raise MissingData(
            f"the picture {name} comes with {package}, which "
            f"{'lacks ' + inside if folders else 'is not installed'}; install it by pip install "
            f"'capsule-zoo[pictures]'"
        )
    return file
