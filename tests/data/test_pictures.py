"""Every kind of picture file gives the right pixels, or is refused with a reason."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from capsule_zoo.data.pictures import read_picture


def saved(image: Image.Image, folder: Path, suffix: str = "png", **options: object) -> Path:
    path = folder / f"picture.{suffix}"
    image.save(path, **options)
    return path


def pixels_of(path: Path, size: tuple[int, int] | None = None) -> np.ndarray:
    return read_picture(path, size).pixels


def painted(mode: str, *pixels: object) -> Image.Image:
    """Return one row of pixels."""
    image = Image.new(mode, (len(pixels), 1))
    image.putdata(pixels)
    return image


def with_palette(colors: list[int], *pixels: int) -> Image.Image:
    image = painted("P", *pixels)
    image.putpalette(colors)
    return image


RED, GREEN, GRAY = (255, 0, 0), (0, 255, 0), (7, 7, 7)
KINDS = {
    "one bit": (painted("1", 0, 255, 255), [0, 255, 255]),
    "gray": (painted("L", 0, 7, 255), [0, 7, 255]),
    "gray, clear": (painted("LA", (255, 0), (200, 255), (100, 51)), [0, 200, 20]),
    "gray palette": (with_palette([9, 9, 9, 80, 80, 80, *RED], 0, 1, 1), [9, 80, 80]),
    "color palette": (with_palette([*GRAY, *RED], 0, 1, 0), [GRAY, RED, GRAY]),
    "RGB": (painted("RGB", RED, GRAY), [RED, GRAY]),
    "gray RGB": (painted("RGB", GRAY, (9, 9, 9)), [7, 9]),
    "nearly gray RGB": (painted("RGB", (7, 8, 6), (200, 201, 200)), [7, 201]),
    "hardly gray RGB": (painted("RGB", (7, 10, 7), GRAY), [(7, 10, 7), GRAY]),
    "RGB, clear": (
        painted("RGBA", (255, 255, 255, 0), (255, 5, 0, 255), (100, 50, 0, 51)),
        [(0, 0, 0), (255, 5, 0), (20, 10, 0)],
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_pixels_of_a_png(kind, tmp_path):
    image, expected = KINDS[kind]
    pixels = pixels_of(saved(image, tmp_path))
    assert pixels.dtype == np.uint8
    np.testing.assert_array_equal(pixels, np.array([expected], dtype=np.uint8))


@pytest.mark.parametrize(
    ("image", "clear", "expected"),
    [
        (painted("L", 9, 200), 200, [9, 0]),
        (painted("RGB", RED, GREEN, GRAY), RED, [(0, 0, 0), GREEN, GRAY]),
        (painted("RGB", RED, GRAY), RED, [0, 7]),
        (with_palette([9, 9, 9, 80, 80, 80], 0, 1), 1, [9, 0]),
        (with_palette([*GRAY, *RED], 0, 1), b"\x33\xff", [(1, 1, 1), RED]),
    ],
)
def test_what_a_file_declares_transparent_is_black(image, clear, expected, tmp_path):
    path = saved(image, tmp_path, transparency=clear)
    np.testing.assert_array_equal(pixels_of(path), np.array([expected], dtype=np.uint8))


def test_sixteen_bits_are_not_cut_off(tmp_path):
    ramp = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    pixels = pixels_of(saved(Image.fromarray(ramp), tmp_path))
    assert pixels.dtype == np.float32
    np.testing.assert_allclose(pixels / 255, ramp / 65535, rtol=0, atol=1e-7)
    assert pixels.max() == 255 and pixels.mean() / 255 == pytest.approx(0.5, abs=1e-6)


def test_sixteen_bits_with_a_clear_value(tmp_path):
    deep = Image.fromarray(np.array([[65535, 32896]], dtype=np.uint16))
    path = saved(deep, tmp_path, transparency=65535)
    np.testing.assert_allclose(pixels_of(path), [[0.0, 128.0]], rtol=0, atol=1e-4)


def test_sixteen_bits_are_resized_without_rounding(tmp_path):
    deep = saved(Image.fromarray(np.full((4, 6), 12345, dtype=np.uint16)), tmp_path)
    pixels = pixels_of(deep, (2, 3))
    np.testing.assert_allclose(pixels, np.full((2, 3), 12345 / 257), rtol=1e-6)


def test_inks_become_light(tmp_path):
    """In CMYK no ink is white, and full black ink is black."""
    path = saved(painted("CMYK", (0, 0, 0, 0), (0, 0, 0, 255), (0, 255, 255, 0)), tmp_path, "tiff")
    expected = [[(255, 255, 255), (0, 0, 0), RED]]
    np.testing.assert_array_equal(pixels_of(path), expected)
