"""Picture files as pixels, with the kinds of files that are read and the resulting pixels.

| file | pixels |
|---|---|
| gray, 8 bits or 1 bit | gray |
| gray, 16 bits | gray, divided by 65,535 |
| a palette whose used entries are all gray | gray |
| any other palette | RGB |
| RGB, CMYK, YCbCr, HSV | RGB |
| any of these with transparency | the same, on black |

Other kinds, such as pixels of floating point, have no known range and are refused by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np

from capsule_zoo.data.files import MissingData

if TYPE_CHECKING:
    from PIL import Image

_SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N")
_COLORS = ("RGB", "RGBX", "CMYK", "YCbCr", "HSV")
_BYTE = 65535 / 255  # steps of a 16-bit pixel for one step of an 8-bit pixel


def open_image(file: Path | IO[bytes], name: str) -> Image.Image:
    """Return a picture in the camera's orientation, on black where it is transparent.

    Args:
        file: a path or a stream.
        name: name of the file, for messages.

    Returns:
        An image of mode "L" (gray bytes), "RGB" (bytes), or "F" where the file holds gray pixels of
        16 bits: floats from 0 to 255, which no rounding has touched.

    Raises:
        MissingData: the file cannot be read, or its kind of pixels is not among those above.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(file) as opened:
            kind = opened.format
            image = ImageOps.exif_transpose(opened)
        sixteen = image.mode in _SIXTEEN_BITS or (image.mode == "I" and kind in ("PNG", "PPM"))
        if sixteen:
            return _from_sixteen_bits(image)
        if _is_known(image.mode):
            return _from_bytes(image)
    except UnidentifiedImageError as error:  # its own message shows the stream's address
        raise MissingData(
            f"{name} is not a readable image (its content is of no known kind); mend or remove it"
        ) from error
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise MissingData(f"{name} is not a readable image ({error}); mend or remove it") from error
    raise MissingData(
        f"{name} has pixels of the kind {image.mode!r}, whose range is not known; save it with 8 "
        "or 16 bits a pixel, gray or RGB, or remove it"
    )


def read_pixels(file: Path, size: tuple[int, int] | None) -> np.ndarray:
    """Read pixels (H, W) of a gray picture or (H, W, 3) of any other, from 0 to 255.

    Args:
        size: (height, width) of the result; the picture's own by default.
    """
    from PIL import Image

    image = open_image(file, str(file))
    if size is not None:
        image = image.resize(size[::-1], Image.Resampling.BILINEAR)
    return np.asarray(image)


def _is_known(mode: str) -> bool:
    gray_or_palette = ("1", "L", "P", "LA", "PA", "RGBA", "La", "RGBa")
    return mode in gray_or_palette or mode in _COLORS


def _from_sixteen_bits(image: Image.Image) -> Image.Image:
    """Convert gray pixels of 16 bits to floats from 0 to 255, with transparent ones black."""
    from PIL import Image

    pixels = np.asarray(image).astype(np.float32)
    if isinstance(clear := image.info.get("transparency"), int):
        pixels = np.where(pixels == clear, np.float32(0), pixels)
    return Image.fromarray(pixels / np.float32(_BYTE))


def _from_bytes(image: Image.Image) -> Image.Image:
    """Convert a picture of 8 bits or fewer to mode "L" or "RGB", on black where transparent."""
    from PIL import Image

    gray = image.mode in ("1", "L", "LA", "La")
    palette = image.mode in ("P", "PA")
    if image.has_transparency_data:
        above = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", above.size, "black"), above)
    color = image.convert("L" if gray else "RGB")
    return color.convert("L") if palette and _is_gray(color) else color


def _is_gray(image: Image.Image) -> bool:
    red, green, blue = np.moveaxis(np.asarray(image), -1, 0)
    return bool((red == green).all() and (green == blue).all())
