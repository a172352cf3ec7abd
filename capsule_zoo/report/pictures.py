"""Pictures small enough to be embedded in a page, recompressed and written as data URIs."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

WIDTH = 900  # pixels, at most
QUALITY = 46  # all pages together stay below five megabytes


@dataclass(frozen=True)
class Picture:
    """An image that needs no separate file.

    Attributes:
        uri: the image itself, as WebP.
        width, height: size in pixels, so that the page reserves room for it.
        words: description of the image.
    """

    uri: str
    width: int
    height: int
    words: str

    @property
    def is_wide(self) -> bool:
        """True if the picture is too wide to be read at the width of a phone."""
        return self.width > 2 * self.height


def picture(path: Path, words: str) -> Picture:
    """Return a PNG file as a picture of moderate width."""
    with Image.open(path) as opened:
        image = opened.convert("RGBA")
    image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    if image.width > WIDTH:
        size = WIDTH, round(image.height * WIDTH / image.width)
        image = image.resize(size, Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, "webp", quality=QUALITY, method=6)
    code = base64.b64encode(buffer.getvalue()).decode()
    return Picture(f"data:image/webp;base64,{code}", image.width, image.height, words)
