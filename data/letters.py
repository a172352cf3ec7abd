"""A data set of letters in matplotlib's fonts: a few hundred gray pictures, no download."""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from capsule_zoo.data.files import MissingData
from capsule_zoo.data.seeds import seeded_generator
from capsule_zoo.data.sources import Labelled, Size, Source, take_rows

if TYPE_CHECKING:
    from PIL.ImageFont import FreeTypeFont

LETTERS = "ABEHKLORST"
TRAINING_FONTS = (  # files of the training fonts: DejaVu and Computer Modern
    *(f"DejaVuSans{style}" for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSansMono{style}" for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSerif{style}" for style in ("", "-Bold", "-Italic", "-BoldItalic")),
    *("cmr10", "cmb10", "cmmi10", "cmss10", "cmti10", "cmtt10"),
)
TEST_FONTS = ("STIXGeneral", "STIXGeneralBol", "STIXGeneralItalic", "STIXGeneralBolIta")
PICTURES = 2  # pictures of each letter in each font
DEGREES = 12.0  # largest rotation of a letter
HEIGHT = 0.9  # height of a font as a fraction of the picture's shorter side
FINER = 4  # pixels of the drawing for one pixel of the picture, along each axis


def font_letters(size: Size | None = None) -> Source:
    """Draw a data set of white capital letters on black in matplotlib's fonts, by default 28x28.

    There are ten letters, and two pictures of each in each font, rotated by up to 12 degrees,
    uniformly with a fixed seed. The 18 fonts for training are of the families DejaVu and Computer
    Modern, the four for testing of the family STIX. By default a tenth of the training images is
    held out for validation.

    Raises:
        MissingData: a font is not where matplotlib should have it.
    """
    train, test = (
        _pictures(fonts, size or (28, 28), seeded_generator(seed))
        for seed, fonts in enumerate((TRAINING_FONTS, TEST_FONTS))
    )
    return Source(train, test, tuple(LETTERS), validation=len(train[0]) // 10)


def _pictures(fonts: tuple[str, ...], size: Size, generator: torch.Generator) -> Labelled:
    """Draw all letters in some fonts, in random order: images (N, 1, H, W) and labels."""
    number = len(fonts) * len(LETTERS) * PICTURES
    angles = iter((DEGREES * (2 * torch.rand(number, generator=generator) - 1)).tolist())
    texts = LETTERS * PICTURES
    pixels = [_draw_letter(letter, font, next(angles), size) for font in fonts for letter in texts]
    images = torch.from_numpy(np.stack(pixels)[:, None]).float() / 255
    labels = torch.arange(len(LETTERS)).repeat(len(fonts) * PICTURES)
    return take_rows((images, labels), torch.randperm(number, generator=generator))


def _draw_letter(letter: str, font: str, degrees: float, size: Size) -> np.ndarray:
    """Draw a letter in the middle of a picture, bytes (H, W)."""
    from PIL import Image, ImageDraw

    height, width = (FINER * pixels for pixels in size)
    face = _face(font, round(HEIGHT * min(height, width)))
    left, top, right, bottom = face.getbbox(letter)
    picture = Image.new("L", (width, height))
    corner = (width - left - right) / 2, (height - top - bottom) / 2
    ImageDraw.Draw(picture).text(corner, letter, font=face, fill=255)
    rotated = picture.rotate(degrees, Image.Resampling.BICUBIC)
    return np.asarray(rotated.resize(size[::-1], Image.Resampling.BOX))


@cache
def _face(font: str, height: int) -> "FreeTypeFont":
    """Return one of matplotlib's fonts at a height in pixels."""
    import matplotlib
    from PIL import ImageFont

    file = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{font}.ttf"
    try:
        return ImageFont.truetype(str(file), height, layout_engine=ImageFont.Layout.BASIC)
    except OSError as error:
        raise MissingData(
            f"{file} cannot be read ({error}); font-letters are drawn by the fonts of matplotlib: "
            "install it by pip install matplotlib"
        ) from error
