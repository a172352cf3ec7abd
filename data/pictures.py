"""Reading of picture files into pixels.

| file | pixels |
|---|---|
| gray, 8 bits or 1 bit | gray |
| gray, 16 bits | gray, divided by 65,535 |
| a palette, RGB, CMYK, YCbCr or HSV, if all pixels are gray within 2 of 255 | gray |
| a palette, RGB, CMYK, YCbCr or HSV in color | RGB |
| any of the above with transparency | as above, on black |
| a NumPy array of bytes, or of floats from 0 to 1 | gray, or RGB if a picture is in color |

Of a file of several pictures, such as TIFF or GIF, the first is read, with a warning.
Other pixels, such as floating-point pixels of TIFF, have no known range and are refused by name.
"""

import warnings
import zipfile
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple

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
GRAY_TOLERANCE = 2.001  # largest difference of gray channels, of 255; JPEG rounds each channel
_PHOTOMETRIC, _SAMPLE_FORMAT, _SIGNED = 262, 339, 2  # two tags of TIFF, and a value of the second
_BYTE = 65535 / 255  # steps of a 16-bit pixel for one step of an 8-bit pixel


class Picture(NamedTuple):
    """The pixels of a picture file, as they are and with inverted ink.

    Attributes:
        pixels: (H, W) of a gray picture, (H, W, 3) of any other, from 0 to 255, on black where the
            file is transparent.
        inverted: the pixels with inverted ink, still on black; None without transparency.
        dark: True if the file has transparency, and its ink is nearly black.
    """

    pixels: np.ndarray
    inverted: np.ndarray | None = None
    dark: bool = False


def is_array_file(path: Path) -> bool:
    """Return whether a path is of a NumPy file, which need not exist; False for a folder."""
    return path.suffix.lower() in ARRAYS and not path.is_dir()


def is_picture_file(path: Path) -> bool:
    """Return whether a path has the suffix of a picture or of a NumPy file."""
    return path.suffix.lower() in _suffixes()


@cache
def _suffixes() -> frozenset[str]:
    from PIL import Image

    return frozenset({*Image.registered_extensions(), *ARRAYS})


def open_image(file: Path | IO[bytes], name: str) -> "Image.Image":
    """Open a picture in the camera's orientation, on black where it is transparent.

    Args:
        file: a path or a stream.
        name: name of the file, for messages.

    Returns:
        An image of mode "L" (gray bytes), "RGB" (bytes), or "F" where the file holds gray pixels of
        16 bits: floats from 0 to 255, which no rounding has touched.

    Raises:
        MissingData: the file cannot be read, or its pixels have a format that is not listed above.
    """
    return _with_opacity(file, name)[0]


def read_picture(file: Path, size: tuple[int, int] | None) -> Picture:
    """Read the pixels of a picture file.

    Args:
        size: (height, width) of the result; the picture's own by default.

    Raises:
        MissingData: see `open_image`.
    """
    image, opacity = _with_opacity(file, str(file))
    if opacity is None or not np.asarray(opacity).any():  # nothing is transparent, or all
        return Picture(_pixels(image, size))
    pixels, cover = _pixels(image, size), _pixels(opacity, size)
    cover = cover[..., None] if pixels.ndim == 3 else cover
    inverted = np.maximum(cover, pixels) - pixels  # white, covered like the ink, less the ink
    return Picture(pixels, inverted, _is_dark(np.asarray(image), np.asarray(opacity)))


def _with_opacity(file: Path | IO[bytes], name: str) -> "tuple[Image.Image, Image.Image | None]":
    """Open a picture as `open_image` does; return also its opacity if a pixel is transparent."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # large, but readable
            with Image.open(file) as opened:
                kind, frames = opened.format, getattr(opened, "n_frames", 1)
                tags = getattr(opened, "tag_v2", {})  # of TIFF
                image = ImageOps.exif_transpose(opened)
        signed = kind == "FITS" or _SIGNED in np.atleast_1d(tags.get(_SAMPLE_FORMAT, 0))
        sixteen = image.mode in _SIXTEEN_BITS or (image.mode == "I" and kind in ("PNG", "PPM"))
        converted = None
        if sixteen and not signed:
            converted = _convert_sixteen_bits(image, inverted=tags.get(_PHOTOMETRIC) == 0)
        elif image.mode in (*_GRAY_OR_PALETTE, *_COLORS) and not signed:
            converted = _convert_eight_bits(image)
    except UnidentifiedImageError as error:  # its own message shows the stream's address
        raise MissingData(
            f"{name} is not a readable image (its content is of no known kind); mend or remove it"
        ) from error
    except Image.DecompressionBombError as error:
        raise MissingData(
            f"{name} has more than {2 * (Image.MAX_IMAGE_PIXELS or 0):,} pixels; make it smaller"
        ) from error
    except Exception as error:  # decoders of damaged files raise many types
        raise MissingData(f"{name} is not a readable image ({error}); mend or remove it") from error
    if frames > 1 and kind != "MPO":  # a camera's second picture is the first one again
        warnings.warn(
            f"{name} holds {frames} pictures, and only the first is read; save each as a file",
            stacklevel=2,
        )
    if converted is None:
        mode = f"signed {image.mode}" if sixteen or image.mode == "L" else image.mode
        raise MissingData(
            f"{name} has pixels of the kind {mode!r}, whose range is not known; save it as PNG "
            "with 8 or 16 bits a pixel, gray or RGB, or remove it"
        )
    return converted


def _pixels(image: "Image.Image", size: tuple[int, int] | None) -> np.ndarray:
    """Return the pixels of a PIL image, resized to (height, width) if a size is given."""
    from PIL import Image

    if size is not None:
        image = image.resize(size[::-1], Image.Resampling.BILINEAR)
    return np.asarray(image)


def _is_dark(pixels: np.ndarray, opacity: np.ndarray) -> bool:
    """Return whether 19 of 20 pixels of ink are darker than a quarter of white.

    Args:
        pixels: (H, W) or (H, W, 3), from 0 to 255, on black.
        opacity: (H, W), from 0 to 255. Ink is at least half as opaque as the most opaque pixel.
    """
    ink = opacity >= opacity.max() / 2
    brightest = pixels.max(-1) if pixels.ndim == 3 else pixels
    return bool(np.quantile(brightest[ink] / opacity[ink], 0.95) < 0.25)


def read_array(file: Path, size: tuple[int, int] | None) -> np.ndarray:
    """Read pixels (N, H, W) or (N, H, W, 3), from 0 to 255, of `.npy`, or `images` of `.npz`.

    The array is (N, H, W), (N, C, H, W) or (N, H, W, C) with 1 or 3 channels C, or a single picture
    (H, W) or (H, W, 3); bytes, or floats from 0 to 1. Three channels that are alike, within 2 of
    255, become one, as in picture files.

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
    array = arrays["images"]
    pixels = array[None] if array.ndim == 2 or array.shape[2:] == (3,) else array
    if pixels.ndim == 4 and pixels.shape[-1] not in (1, 3):
        pixels = np.moveaxis(pixels, 1, -1)
    if pixels.ndim not in (3, 4) or pixels.shape[3:] not in ((), (1,), (3,)) or not pixels.size:
        raise ValueError(
            f"images of {file} must be (N, H, W), (N, C, H, W) or (N, H, W, C) with 1 or 3 "
            f"channels, not {array.shape}"
        )
    pixels = _scale_to_bytes(pixels[..., 0] if pixels.shape[3:] == (1,) else pixels, file)
    if pixels.ndim == 4 and _is_gray(pixels):
        pixels = pixels[..., 1]  # green, of which brightness depends most
    return pixels if size is None else _resize_pixels(pixels, size)


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


def holds_labels(file: Path) -> bool:
    """Return whether a file is an archive `.npz` with labels."""
    return file.suffix.lower() == ".npz" and "labels" in load_arrays(file)


def load_arrays(file: Path) -> dict[str, np.ndarray]:
    """Read the arrays of a file `.npz`, by name; the array of a file `.npy` is `images`."""
    if not file.exists():
        raise MissingData(f"there is no file {file}; name the place where it lies now")
    try:
        content = np.load(file, allow_pickle=False)
        if isinstance(content, np.ndarray):
            return {"images": content}
        with content:
            return {name: content[name] for name in content.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise MissingData(
            f"{file} cannot be read as a NumPy file ({error}); write it by numpy.save or "
            "numpy.savez, with numbers only"
        ) from error


def _scale_to_bytes(pixels: np.ndarray, file: Path) -> np.ndarray:
    """Scale pixels to [0, 255]: bytes stay, floats from 0 to 1 grow, and others are refused."""
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


def _resize_pixels(pixels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Resize pixels (N, H, W) or (N, H, W, 3) to (height, width), bilinear."""
    from PIL import Image

    if pixels.ndim == 4:
        return np.stack(
            [_resize_pixels(channel, size) for channel in np.moveaxis(pixels, -1, 0)], -1
        )
    planes = [Image.fromarray(channel.astype(np.float32)) for channel in pixels]
    resample = Image.Resampling.BILINEAR
    return np.stack([np.asarray(plane.resize(size[::-1], resample)) for plane in planes])


def _convert_sixteen_bits(
    image: "Image.Image", inverted: bool
) -> "tuple[Image.Image, Image.Image | None]":
    """Convert gray pixels of 16 bits to floats from 0 to 255, on black where transparent.

    Args:
        inverted: True where 0 is white.
    """
    from PIL import Image

    pixels = np.asarray(image).astype(np.float32)
    value = image.info.get("transparency")
    clear = pixels == (value if isinstance(value, int) else -1)
    if inverted:
        pixels = np.float32(65535) - pixels
    pixels = np.where(clear, np.float32(0), pixels)
    opacity = Image.fromarray(np.where(clear, 0, 255).astype(np.uint8)) if clear.any() else None
    return Image.fromarray(pixels / np.float32(_BYTE)), opacity


def _convert_eight_bits(image: "Image.Image") -> "tuple[Image.Image, Image.Image | None]":
    """Convert a picture of 8 bits or fewer to mode "L" or "RGB", on black where transparent."""
    from PIL import Image

    gray, opacity = image.mode in ("1", "L", "LA", "La"), None
    if image.has_transparency_data:
        above = image.convert("RGBA")
        alpha = above.getchannel("A")
        opacity = None if (np.asarray(alpha) == 255).all() else alpha
        image = Image.alpha_composite(Image.new("RGBA", above.size, "black"), above)
    color = image.convert("L" if gray else "RGB")
    return color.convert("L") if not gray and _is_gray(np.asarray(color)) else color, opacity


def _is_gray(pixels: np.ndarray) -> bool:
    """Return whether the channels of pixels (..., 3) are alike within 2 of 255."""
    return float((pixels.max(-1) - pixels.min(-1)).max()) <= GRAY_TOLERANCE
