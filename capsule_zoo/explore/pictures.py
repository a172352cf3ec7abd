"""Conversion of tensors to PNG files for a browser, and of files to images for a model."""

import io

import numpy as np
import torch
from torch import Tensor

from capsule_zoo.data.pictures import open_image

WIDTH = 392  # approximate width of a picture on a wide screen, in pixels


def as_png(pixels: Tensor, outline: Tensor | None = None) -> bytes:
    """Return a picture as a PNG file, with every pixel drawn as a square.

    Args:
        pixels: (H, W, 1) or (H, W, 3), in [0, 1].
        outline: corners (n, 2) of a polygon to draw, in the frame [-1, 1]^2.
    """
    from PIL import Image, ImageDraw

    array = (pixels.clamp(0, 1) * 255).round().byte().squeeze(-1).numpy()
    scale, buffer = max(1, round(WIDTH / array.shape[1])), io.BytesIO()
    image = Image.fromarray(array.repeat(scale, 0).repeat(scale, 1))
    if outline is not None:
        image = image.convert("RGB")
        corners = ((outline + 1) / 2 * outline.new_tensor(image.size)).tolist()
        points = [tuple(corner) for corner in [*corners, corners[0]]]
        ImageDraw.Draw(image).line(points, fill=(255, 255, 255), width=2)
    image.save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def image_from_file(
    content: bytes, name: str, shape: tuple[int, int, int] | None, inverted: bool = False
) -> Tensor:
    """Return a picture file as an image (1, C, H, W) in [0, 1], scaled to fit, with black edges.

    Args:
        content: content of the file.
        name: name of the file, for messages.
        shape: (channels, height, width) of the model's images; None to keep the file's own.
        inverted: invert the brightness, because the models render bright ink on black.

    Raises:
        ValueError: the file is not a readable picture, or it has a single shade.
    """
    from PIL import ImageOps

    image = open_image(io.BytesIO(content), name)
    if shape is None:
        shape = (1 if image.mode in ("L", "1") else 3, image.height, image.width)
    channels, height, width = shape
    image = image.convert("L" if channels == 1 else "RGB")
    darkest, brightest = image.convert("L").getextrema()
    if darkest == brightest:
        raise ValueError(
            f"{name} is blank: all its pixels are alike; give a picture with something on it, and "
            "on a background of its own where it is transparent"
        )
    image = ImageOps.pad(ImageOps.invert(image) if inverted else image, (width, height))
    pixels = torch.from_numpy(np.array(image)).float().view(height, width, channels) / 255
    return pixels.movedim(-1, 0)[None]
