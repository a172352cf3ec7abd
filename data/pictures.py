"""Picture files as pixels, with the kinds of files that are read and the resulting pixels.

| file | pixels |
|---|---|
| gray, 8 bits or 1 bit | gray |
| gray, 16 bits | gray, divided by 65,535 |
| a palette whose used entries are all gray | gray |
| any other palette | RGB |
| RGB, CMYK, YCbCr, HSV | RGB |
| any of these with transparency | the same, on black |
| a NumPy array of bytes, or of floats from 0 to 1 | gray, or RGB |

Pictures of 12 bits in files of 16 bits are nearly black; a folder of them is read with a warning.
Of a file of several pictures, such as TIFF or GIF, the first is read, with a warning.
Other kinds, such as TIFF pixels of floating point, have no known range and are refused by name.
"""

import warnings
import zipfile
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from capsule_zoo.data.files import MissingData

if TYPE_CHECKING:
    from PIL import Image

ARRAYS = (".npy", ".npz")
_SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N")
_COLORS = ("RGB", "RGBX", "CMYK", "YCbCr", "HSV")
_GRAY_OR_PALETTE = ("1", "L", "P", "LA", "PA", "RGBA", "La", "RGBa")
_BYTE = 65535 / 255  # steps of a 16-bit pixel for one step of an 8-bit pixel


def open_image(file: Path | IO[bytes], name: str) -> "Image.Image":
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
            kind, frames = opened.format, getattr(opened, "n_frames", 1)
            image = ImageOps.exif_transpose(opened)
        if frames > 1 and kind != "MPO":  # a camera's second picture is the first one again
            warnings.warn(
                f"{name} holds {frames} pictures, and only the first is read; save each as a file",
                stacklevel=2,
            )
        sixteen = image.mode in _SIXTEEN_BITS or (image.mode == "I" and kind in ("PNG", "PPM"))
        if sixteen:
            return _from_sixteen_bits(image)
        if image.mode in (*_GRAY_OR_PALETTE, *_COLORS):
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


def read_array(file: Path, size: tuple[int, int] | None) -> np.ndarray:
    """Read pixels (N, H, W) or (N, H, W, 3), from 0 to 255, of `.npy`, or `images` of `.npz`.

    The array is (N, H, W), (N, C, H, W) or (N, H, W, C) with 1 or 3 channels C, or a single picture
    (H, W) or (H, W, 3); bytes, or floats from 0 to 1.

    Args:
        size: (height, width) of the result; the pictures' own by default.

    Raises:
        MissingData: the file cannot be read, or it holds no `images`.
        ValueError: another shape, type or range.
    """
    arrays = load_arrays(file)
    if "images" not in arrays:
        points = f"; its points are read by constellations:{file}" if "points" in arrays else ""
        raise MissingData(
            f"{file} must hold images, but holds {', '.join(arrays) or 'nothing'}{points}; write "
            "it by numpy.savez(path, images=..., labels=...)"
        )
    given = arrays["images"]
    pixels = given[None] if given.ndim == 2 or given.shape[2:] == (3,) else given
    if pixels.ndim == 4 and pixels.shape[-1] not in (1, 3):
        pixels = np.moveaxis(pixels, 1, -1)
    if pixels.ndim not in (3, 4) or pixels.shape[3:] not in ((), (1,), (3,)) or not pixels.size:
        raise ValueError(
            f"images of {file} must be (N, H, W), (N, C, H, W) or (N, H, W, C) with 1 or 3 "
            f"channels, not {given.shape}"
        )
    pixels = _from_0_to_255(pixels[..., 0] if pixels.shape[3:] == (1,) else pixels, file)
    return pixels if size is None else _resized(pixels, size)


def read_labels(file: Path, number: int) -> Tensor | None:
    """Read `labels` (N,) of a file `.npz`; None if it has none.

    Raises:
        ValueError: they are not one whole number from 0 on for each of the `number` images.
    """
    labels = load_arrays(file).get("labels")
    if labels is None:
        return None
    whole = labels.dtype.kind in "iu" and labels.shape == (number,)
    if not whole or labels.min() < 0:
        raise ValueError(
            f"labels of {file} must be whole numbers from 0 on, ({number},), one for each image, "
            f"not {labels.dtype} of shape {labels.shape}"
        )
    return torch.from_numpy(labels.astype(np.int64))


def load_arrays(file: Path) -> dict[str, np.ndarray]:
    """Read the arrays of `.npz` by name; that of `.npy` is `images`."""
    if not file.exists():
        raise MissingData(f"there is no file {file}; name the place where it lies now")
    try:
        found = np.load(file, allow_pickle=False)
        if isinstance(found, np.ndarray):
            return {"images": found}
        with found:
            return {name: found[name] for name in found.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise MissingData(
            f"{file} cannot be read as a NumPy file ({error}); write it by numpy.save or "
            "numpy.savez, with numbers only"
        ) from error


def _from_0_to_255(pixels: np.ndarray, file: Path) -> np.ndarray:
    """Return bytes as they are, and floats from 0 to 1 times 255; refuse anything else."""
    if pixels.dtype == np.uint8:
        return pixels
    if pixels.dtype.kind == "f" and pixels.min() >= 0 and pixels.max() <= 1:
        return pixels.astype(np.float32) * np.float32(255)
    span, remedy = "", "write them as one of these"
    if pixels.dtype.kind in "buifc":  # numbers
        span = f" from {pixels.min()} to {pixels.max()}"
        remedy = "rescale them, or clip what is rounding by numpy.clip(images, 0, 1)"
        remedy = "fill in what is NaN" if np.isnan(pixels.min()) else remedy
    raise ValueError(
        f"images of {file} must be bytes (uint8), or floats from 0 to 1, not {pixels.dtype}{span}; "
        f"{remedy}"
    )


def _resized(pixels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Resize (N, H, W) or (N, H, W, 3) as `read_pixels` does."""
    from PIL import Image

    if pixels.ndim == 4:
        return np.stack([_resized(each, size) for each in np.moveaxis(pixels, -1, 0)], -1)
    planes = [Image.fromarray(each.astype(np.float32)) for each in pixels]
    resample = Image.Resampling.BILINEAR
    return np.stack([np.asarray(plane.resize(size[::-1], resample)) for plane in planes])


def _from_sixteen_bits(image: "Image.Image") -> "Image.Image":
    """Convert gray pixels of 16 bits to floats from 0 to 255, with transparent ones black."""
    from PIL import Image

    pixels = np.asarray(image).astype(np.float32)
    if isinstance(clear := image.info.get("transparency"), int):
        pixels = np.where(pixels == clear, np.float32(0), pixels)
    return Image.fromarray(pixels / np.float32(_BYTE))


def _from_bytes(image: "Image.Image") -> "Image.Image":
    """Convert a picture of 8 bits or fewer to mode "L" or "RGB", on black where transparent."""
    from PIL import Image

    gray = image.mode in ("1", "L", "LA", "La")
    palette = image.mode in ("P", "PA")
    if image.has_transparency_data:
        above = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", above.size, "black"), above)
    color = image.convert("L" if gray else "RGB")
    return color.convert("L") if palette and _is_gray(color) else color


def _is_gray(image: "Image.Image") -> bool:
    red, green, blue = np.moveaxis(np.asarray(image), -1, 0)
    return bool((red == green).all() and (green == blue).all())
