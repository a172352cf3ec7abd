"""Letters in matplotlib's fonts: a few hundred gray pictures, or 81 views of each letter."""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from capsule_zoo.data.files import MissingData
from capsule_zoo.data.seeds import seeded_generator
from capsule_zoo.data.sources import Labelled, Size, Source, take_rows
from capsule_zoo.data.toys3d import camera
from capsule_zoo.data.viewpoints import views_of_grid

if TYPE_CHECKING:
    from PIL.Image import Image
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
ANGLES = tuple(range(-60, 61, 15))  # azimuths and elevations of views, in degrees
DISTANCE = 3.0  # of the camera from the letter, in halves of a picture's frame


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
    from PIL import Image

    picture = _draw_upright(letter, font, (FINER * size[0], FINER * size[1]))
    rotated = picture.rotate(degrees, Image.Resampling.BICUBIC)
    return np.asarray(rotated.resize(size[::-1], Image.Resampling.BOX))


def _draw_upright(letter: str, font: str, size: Size) -> "Image":
    """Draw an upright letter in the middle of a gray picture."""
    from PIL import Image, ImageDraw

    height, width = size
    face = _face(font, round(HEIGHT * min(height, width)))
    left, top, right, bottom = face.getbbox(letter)
    picture = Image.new("L", (width, height))
    corner = (width - left - right) / 2, (height - top - bottom) / 2
    ImageDraw.Draw(picture).text(corner, letter, font=face, fill=255)
    return picture


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


class LetterViews:
    """The letters of `font_letters`, upright on a plane, from 81 viewpoints in perspective.

    The camera's azimuth and elevation are -60 to 60 degrees in nine steps of 15, and 0 is in front
    of the letter. There is one lighting: letters are white on black.

    Args:
        size: height and width of a view, in pixels.

    Attributes:
        train, test: `Views`, of the 18 training fonts and of the four test fonts.

    Raises:
        MissingData: a font is not where matplotlib should have it.
    """

    def __init__(self, size: int = 32) -> None:
        train, test = (_draw_views(fonts, size) for fonts in (TRAINING_FONTS, TEST_FONTS))
        self.train = views_of_grid(train, "letter-views/train", classes=tuple(LETTERS))
        self.test = views_of_grid(test, "letter-views/test", len(train[0]), tuple(LETTERS))


def _draw_views(fonts: tuple[str, ...], size: int) -> Tensor:
    """Draw a grid of views, bytes (letters, fonts, elevations, azimuths, 1, size, size)."""
    fine, angles = FINER * size, torch.deg2rad(torch.tensor(ANGLES, dtype=torch.float32))
    elevation, azimuth = torch.meshgrid(angles, angles, indexing="ij")
    points = plane_coordinates(azimuth.flatten(), elevation.flatten(), 2 * size)
    views = []
    for letter in LETTERS:  # fonts are channels: they share the points
        drawn = np.stack([np.asarray(_draw_upright(letter, font, (fine, fine))) for font in fonts])
        plane = F.avg_pool2d(torch.from_numpy(drawn).float(), FINER // 2)
        plane = plane.expand(len(points), -1, -1, -1)
        pictures = F.avg_pool2d(F.grid_sample(plane, points, align_corners=False), 2)
        views.append(pictures.round().to(torch.uint8).movedim(1, 0))
    return torch.stack(views).reshape(len(LETTERS), len(fonts), *elevation.shape, 1, size, size)


def plane_coordinates(azimuth: Tensor, elevation: Tensor, size: int) -> Tensor:
    """Return the point of a plane that each pixel of a view shows, (views, size, size, 2).

    The plane is the camera's image plane where both angles are 0. Its coordinates and those of the
    picture go from -1 to 1, to the right and down, as for `grid_sample`.

    Args:
        azimuth, elevation: angles of the camera around the middle of the plane, radians, (views,).
        size: height and width of a view, in pixels.
    """
    right, up, towards = camera(azimuth, elevation)  # the plane has x = 0; z is up
    linear = torch.stack([right[:, 1:], up[:, 1:], -towards[:, 1:] / DISTANCE], 1)
    homography = F.pad(linear, (0, 1)) + torch.diag(torch.tensor([0.0, 0.0, 1.0]))
    axis = (torch.arange(size) + 0.5) / size * 2 - 1
    down, across = torch.meshgrid(axis, axis, indexing="ij")
    pixels = torch.stack([across, -down, torch.ones_like(down)], -1).flatten(0, 1)
    x, y, scale = (pixels @ torch.linalg.inv(homography).mT).unbind(-1)
    return torch.stack([x / scale, -y / scale], -1).unflatten(1, (size, size))
