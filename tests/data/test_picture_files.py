"""Every kind of file in a folder of pictures is read right, refused, or told of, in one line."""

import io
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from capsule_zoo.data import dataset_names, load_dataset
from capsule_zoo.data.datasets import _reader, load_pictures

INK = np.zeros((28, 28), np.uint8)  # bright ink on black: what every picture here shows
INK[7:21, 9:15] = 255
INK[7:10, 9:21] = 255
BLACK, WHITE = np.zeros_like(INK), np.full_like(INK, 255)
FRAMES = [Image.fromarray(np.roll(INK, k, 0)) for k in range(3)]
Make = Callable[[Path], object]
L = Image.fromarray(INK)


def file(image: Image.Image | np.ndarray, name: str = "x.png", **options: object) -> Make:
    """Return what saves an image in a folder."""
    picture = image if isinstance(image, Image.Image) else Image.fromarray(image)
    return lambda folder: picture.save(folder / name, **options)


def content(raw: bytes, name: str = "x.png") -> Make:
    return lambda folder: (folder / name).write_bytes(raw)


def array(name: str = "x.npy", **arrays: np.ndarray) -> Make:
    """Return what saves `images` as `.npy`, or several arrays as `.npz`."""
    if name.endswith(".npy"):
        return lambda folder: np.save(folder / name, arrays["images"])
    return lambda folder: np.savez(folder / name, **arrays)


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def stacked(*channels: np.ndarray, mode: str | None = None) -> Image.Image:
    return Image.fromarray(np.dstack(channels), mode)


def tiff(pixels: np.ndarray, white: int = 1, signed: bool = False, pages: int = 1) -> bytes:
    """Return an uncompressed gray TIFF; `white` 0 says that 0 is white. A second page is empty."""
    data, (rows, columns) = pixels.tobytes(), pixels.shape
    tags = [(256, columns), (257, rows), (258, 8 * pixels.itemsize), (259, 1), (262, white)]
    tags += [(273, 8), (277, 1), (278, rows), (279, len(data)), (339, 1 + signed)]
    entries = [struct.pack("<HHIHH", tag, 3, 1, value, 0) for tag, value in tags]
    directory = struct.pack("<H", len(entries)) + b"".join(entries)
    after = 8 + len(data) + len(directory) + 4 if pages == 2 else 0
    head = struct.pack("<2sHI", b"II", 42, 8 + len(data))
    return head + data + directory + struct.pack("<I", after) + bytes(6)


def fits(pixels: np.ndarray) -> bytes:
    """Return a FITS file of 16 bits, which have a sign there."""
    cards = {"SIMPLE": "T", "BITPIX": 16, "NAXIS": 2, "NAXIS1": 28, "NAXIS2": 28}
    head = "".join(f"{key:<8}= {value:>20}".ljust(80) for key, value in cards.items())
    return (head + "END").ljust(2880).encode() + pixels.astype(">i2").tobytes().ljust(2880, b"\0")


def archive(folder: Path) -> None:
    with zipfile.ZipFile(folder / "x.zip", "w") as packed:
        packed.writestr("x.png", encoded(L, "PNG"))


def deeper(*parts: str) -> Make:
    """Return what saves the picture twice, in folders inside the folder."""

    def make(folder: Path) -> None:
        place = folder.joinpath(*parts)
        place.mkdir(parents=True, exist_ok=True)
        for name in ("x.png", "y.png"):
            L.save(place / name)

    return make


def several(*makes: Make) -> Make:
    return lambda folder: [make(folder) for make in makes]


def linked(folder: Path) -> None:
    L.save(folder / "good.png")
    os.symlink(folder / "good.png", folder / "x.png")


def save_on_side(folder: Path) -> None:
    """Save the picture on its side, with the note of a camera that says so."""
    exif = Image.Exif()
    exif[0x0112] = 6
    L.transpose(Image.Transpose.ROTATE_90).save(folder / "x.jpg", exif=exif, quality=95)


JPG = {"quality": 95, "subsampling": 0}
GRAYS = stacked(INK, INK, INK)
NOISE = np.random.default_rng(0).integers(0, 3, (28, 28, 3), dtype=np.uint8)
SPECKLED = Image.fromarray(
    np.clip(np.dstack([INK] * 3).astype(int) + NOISE - 1, 0, 255).astype("u1")
)
CLEAR_PALETTE = Image.fromarray((INK > 0).astype(np.uint8), "P")
CLEAR_PALETTE.putpalette([255, 255, 255, 0, 0, 0])
DARK = "all pictures with a transparent ground .1, such as .*x.* have dark ink; it is inverted"
FIRST = "holds 3 pictures, and only the first is read; save each as a file"
MANY: dict = {"save_all": True, "append_images": FRAMES[1:]}
READ: dict[str, tuple[Make, str | None]] = {  # what makes a folder, and the warning
    "gray": (file(L), None),
    "one bit": (file(L.convert("1")), None),
    "gray of 16 bits, PNG": (file(INK.astype(np.uint16) * 257), None),
    "gray of 16 bits, TIFF": (file(INK.astype(np.uint16) * 257, "x.tif"), None),
    "gray of 16 bits, PGM": (file(INK.astype(np.uint16) * 257, "x.pgm"), None),
    "16 bits with 0 as white": (
        content(tiff(65535 - INK.astype(np.uint16) * 257, white=0), "x.tif"),
        None,
    ),
    "8 bits with 0 as white": (content(tiff(255 - INK, white=0), "x.tif"), None),
    "gray as RGB, PNG": (file(GRAYS), None),
    "gray as RGB, JPEG": (file(GRAYS, "x.jpg", **JPG), None),
    "gray as RGB, lossless WebP": (file(GRAYS, "x.webp", lossless=True), None),
    "gray as RGB, WebP": (file(GRAYS, "x.webp", quality=95), None),
    "gray as CMYK": (file(L.convert("CMYK"), "x.jpg", quality=95), None),
    "gray as RGBA": (file(stacked(INK, INK, INK, WHITE)), None),
    "gray as YCbCr": (file(GRAYS.convert("YCbCr"), "x.tif"), None),
    "gray within two bytes": (file(SPECKLED), None),
    "bright ink on clear": (file(stacked(WHITE, WHITE, WHITE, INK)), None),
    "bright gray ink on clear": (file(stacked(WHITE, INK)), None),
    "dark ink on clear": (file(stacked(BLACK, BLACK, BLACK, INK)), DARK),
    "dark gray ink on clear": (file(stacked(BLACK, INK)), DARK),
    "dark ink on a clear palette": (file(CLEAR_PALETTE, transparency=0), DARK),
    "dark ink of 16 bits on clear": (
        file((255 - INK).astype(np.uint16) * 257, transparency=65535),
        DARK,
    ),
    "animated GIF": (file(FRAMES[0], "x.gif", **MANY), FIRST),
    "animated WebP": (file(FRAMES[0], "x.webp", lossless=True, **MANY), FIRST),
    "animated PNG": (file(FRAMES[0], **MANY), FIRST),
    "TIFF of pages": (file(FRAMES[0], "x.tiff", **MANY), FIRST),
    "rotated by a camera": (save_on_side, None),
    "capital suffix": (file(L, "x.PNG"), None),
    "PNG called JPEG": (content(encoded(L, "PNG"), "x.jpg"), None),
    "name in other letters": (file(L, "x é 字 🙂.png"), None),
    "link to a picture": (linked, None),
    "hidden files": (
        several(*(content(b"-", n) for n in (".DS_Store", "Thumbs.db", "._x.png")), file(L)),
        None,
    ),
    "folder of macOS": (several(deeper("__MACOSX"), file(L)), None),
    "folder of notebooks": (several(deeper(".ipynb_checkpoints"), file(L)), None),
    "bytes (H, W)": (array(images=INK), None),
    "floats (1, H, W)": (array(images=INK[None] / 255), None),
    "gray in three channels (H, W, 3)": (array(images=np.dstack([INK] * 3)), None),
    "gray in three channels (N, 3, H, W)": (array(images=np.stack([INK[None] / 255] * 3, 1)), None),
    "gray in three channels, archive": (array("x.npz", images=np.stack([INK] * 3)[None]), None),
}


@pytest.mark.parametrize("kind", READ)
def test_a_file_beside_gray_pictures_is_read_as_what_it_shows(kind, tmp_path):
    make, warning = READ[kind]
    for k in range(3):
        Image.fromarray(np.roll(INK, k, 1)).save(tmp_path / f"good{k}.png")
    make(tmp_path)
    if warning is None:
        split, files = load_pictures(str(tmp_path))
    else:
        with pytest.warns(UserWarning, match=warning) as warned:
            split, files = load_pictures(str(tmp_path))
        assert len(warned) == 1 and str(warned[0].message).count("\n") == 0
    assert split.images.shape[1:] == (1, 28, 28)
    (place,) = (k for k, name in enumerate(files) if name.startswith("x"))
    error = (split.images[place, 0] - torch.from_numpy(INK) / 255).abs().max()
    assert error <= (0.06 if files[place].endswith((".jpg", ".webp")) else 2 / 255)


REFUSED: dict[str, tuple[Make, str]] = {
    "floats": (file(INK.astype(np.float32), "x.tif"), r"x\.tif has .* kind 'F'.* save it as PNG"),
    "integers of 32 bits": (file(INK.astype(np.int32), "x.tif"), r"x\.tif has .* kind 'I'.*PNG"),
    "LAB": (file(GRAYS.convert("LAB"), "x.tif"), r"x\.tif has .* kind 'LAB'.* save it as PNG"),
    "8 bits with a sign": (content(tiff(INK, signed=True), "x.tif"), "kind 'signed L'.*PNG"),
    "16 bits of FITS": (content(fits(INK), "x.fits"), "kind 'signed I;16'.*PNG"),
    "damaged page": (content(tiff(INK, pages=2), "x.tif"), "not a readable .*; mend or remove"),
    "cut JPEG": (content(encoded(L, "JPEG")[:400], "x.jpg"), "not a readable .*; mend or remove"),
    "cut PNG": (content(encoded(SPECKLED, "PNG")[:400]), "not a readable .*; mend or remove"),
    "empty": (content(b""), "not a readable .*; mend or remove"),
    "page of the web": (content(b"<html>404</html>"), "not a readable .*; mend or remove"),
    "PDF": (content(encoded(L, "PDF"), "x.pdf"), "not a readable .*; mend or remove"),
    "dead link": (lambda folder: os.symlink("gone.png", folder / "x.png"), "No such file .*remove"),
    "another size": (file(L.resize((20, 28))), "good.* 28x28 pixels, .*x.* 28x20; .* --size"),
    "a pixel": (file(BLACK[:1, :1]), "28x28 pixels, .*x.* 1x1; .* --size"),
    "several channels": (array(images=np.zeros((2, 4, 28, 28))), "1 or 3 channels, not"),
    "bytes of 16 bits": (array(images=INK.astype(np.uint16)), "not uint16 from 0 to 255; rescale"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_file_that_cannot_be_read_right_is_refused_in_a_line(kind, tmp_path):
    make, message = REFUSED[kind]
    for k in range(3):
        Image.fromarray(np.roll(INK, k, 1)).save(tmp_path / f"good{k}.png")
    make(tmp_path)
    with pytest.raises(ValueError, match=message) as refused:
        load_dataset(tmp_path)
    assert "\n" not in str(refused.value) and "x." in str(refused.value)


UNREAD: dict[str, tuple[Make, str]] = {
    "HEIC": (content(b"ftypheic", "x.heic"), r"but x\.heic; save x\.heic as PNG or JPEG"),
    "SVG": (content(b"<svg/>", "x.svg"), r"but x\.svg; save x\.svg as PNG or JPEG"),
    "archive": (archive, r"but x\.zip; unpack x\.zip"),
    "table": (content(b"1,2", "x.csv"), "neither images nor folders of images; put images in it"),
    "empty class": (several(deeper("a"), lambda f: (f / "c").mkdir()), "no images in .*c; put"),
    "deeper": (deeper("a", "b"), "no images in .*a; move the pictures in .*b one folder up"),
    "archive as class": (
        several(deeper("a"), lambda f: (f / "c").mkdir(), lambda f: archive(f / "c")),
        r"no images in .*c; unpack x\.zip",
    ),
}


@pytest.mark.parametrize("kind", UNREAD)
def test_a_folder_without_pictures_says_what_to_do(kind, tmp_path):
    make, message = UNREAD[kind]
    make(tmp_path)
    with pytest.raises(ValueError, match=message) as refused:
        load_dataset(tmp_path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["x.zip", "x.csv", "x.png"])
@pytest.mark.parametrize("prefix", ["", "folder:"])
def test_a_file_in_place_of_a_folder_is_named(name, prefix, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content(b"-", name)(tmp_path)
    with pytest.raises(ValueError, match=r"read from a folder|mean 'folder:|not a readable image"):
        load_dataset(prefix + name)


def blank(value: int) -> Make:
    return lambda folder: [file(INK * 0 + value, f"{k}.png")(folder) for k in range(4)]


def inks(*values: int) -> Make:
    """Return what saves pictures in ink of these grays on a transparent ground."""
    return several(
        *(file(stacked(INK * 0 + value, INK), f"{k}.png") for k, value in enumerate(values))
    )


THREES = np.stack([INK, np.roll(INK, 1), np.roll(INK, 2)])
LABELS = {"images": THREES, "labels": np.arange(3)}
SIDES = several(*(deeper(side, "a") for side in ("train", "test")))
TOLD: dict[str, tuple[Make, str]] = {
    "black": (blank(0), "4 of 4 pictures have hardly any contrast; .* 0 to 0 of 255: stretch"),
    "white": (blank(255), "4 of 4 pictures have hardly any contrast; .* 255 to 255 of 255"),
    "masks of 0 and 1": (array(images=THREES // 255), "3 of 3 .* from 0 to 1 of 255: stretch"),
    "divided twice": (array(images=THREES / 255**2), "3 of 3 .* to 1 of 255: stretch"),
    "all transparent": (inks(0, 0, 0), "all pictures with a transparent ground .3, .* inverted"),
    "dark and bright ink": (inks(0, 0, 255), "2 of 3 pictures with a .* dark ink.* on a ground"),
    "dark ink on white": (
        several(*(file(255 - np.roll(INK, k), f"{k}.png") for k in range(3))),
        r"3 of 3 pictures, such as .*0\.png, are dark on a bright ground.*invert them",
    ),
    "a photo beside": (several(deeper("a"), content(b"-", "a/x.heic")), "x.heic as PNG or JPEG"),
    "an archive beside classes": (several(deeper("a"), archive), "x.zip; unpack x.zip"),
    "a class that is a dead link": (
        several(deeper("a"), lambda folder: os.symlink("gone", folder / "b")),
        "mend or remove b, a link to nothing",
    ),
    "a folder in a class": (several(deeper("a"), deeper("a", "b")), "in .*b one folder up"),
    "pictures beside classes": (several(deeper("a"), file(L)), "beside folders of classes"),
    "labels in a folder": (array("x.npz", **LABELS), "labels in .*x.npz are not read"),
    "channels first": (
        several(*(array(f"{k}.npy", images=THREES) for k in range(2))),
        r"each of 2 files, such as .*, is read as 3 gray pictures; .* \(H, W, 3\)",
    ),
    "testing beside train": (several(deeper("train", "a"), deeper("testing", "a")), "testing are"),
    "two for validation": (several(SIDES, deeper("val", "a"), deeper("valid", "a")), "valid are"),
    "capital sides": (several(deeper("Train"), deeper("Test")), "Test, Train are read as classes"),
}


@pytest.mark.parametrize("kind", TOLD)
def test_what_is_readable_but_hardly_meant_is_told_once(kind, tmp_path):
    make, text = TOLD[kind]
    make(tmp_path)
    with pytest.warns(UserWarning, match=text) as warned:
        load_dataset(tmp_path)
    assert len(warned) == 1 and "\n" not in str(warned[0].message)


def test_dark_ink_on_a_transparent_ground_is_bright_on_black_at_any_size(tmp_path):
    """Half transparent edges are half as bright, and colors are inverted."""
    for k in range(10):
        half = np.where(np.roll(INK, 1, 0) > INK, 128, np.roll(INK, k, 1)).astype(np.uint8)
        stacked(BLACK + 10, BLACK, BLACK + 40, half).save(tmp_path / f"{k}.png")
    with pytest.warns(UserWarning, match=r"transparent ground .10, such as .*0\.png. have dark"):
        images, files = load_pictures(str(tmp_path))
    first = torch.from_numpy(np.array(Image.open(tmp_path / "0.png"))[..., 3]) / 255
    expected = first * (1 - torch.tensor([10, 0, 40]) / 255)[:, None, None]
    assert files[0] == "0.png" and (images.images[0] - expected).abs().max() <= 1 / 255
    with pytest.warns(UserWarning, match="have dark ink"):
        small = load_dataset(tmp_path, size=7).train.images
    assert small.shape[1:] == (3, 7, 7) and small.max() > 0.9 and small.min() == 0


@pytest.mark.parametrize("kind", ["thin", "on a dark card", "empty", "none"])
def test_bright_ink_on_a_transparent_ground_keeps_its_brightness(kind, tmp_path):
    line = np.zeros((280, 280), np.uint8)
    line[:, 140] = 255
    pictures = {
        "thin": stacked(line * 0 + 255, line),
        "on a dark card": stacked(INK, np.where(np.arange(28) < 3, 0, WHITE)),
        "empty": stacked(INK, INK * 0),
        "none": stacked(BLACK, INK * 0 + 255),
    }
    for k in range(3):
        L.resize((280, 280)).save(tmp_path / f"plain{k}.png")
    pictures[kind].resize((280, 280), Image.Resampling.NEAREST).save(tmp_path / "x.png")
    images = load_pictures(str(tmp_path), (28, 28))[0].images
    lit = {"thin": 28 / 10, "on a dark card": INK.mean() / 255 * 784}.get(kind, 0)
    assert images[3].sum().item() == pytest.approx(lit, rel=0.05, abs=1e-6)


def test_one_color_among_gray_pictures_makes_all_rgb_with_equal_channels(tmp_path):
    for k in range(4):
        GRAYS.save(tmp_path / f"{k}.jpg", **JPG)
    stacked(INK, BLACK, BLACK).save(tmp_path / "x.png")
    images = load_pictures(str(tmp_path))[0].images
    assert images.shape == (5, 3, 28, 28)
    assert torch.equal(images[:4], images[:4, :1].expand(-1, 3, -1, -1))
    assert images[4].amax((1, 2)).tolist() == [1, 0, 0]


def test_large_pictures_are_read_and_larger_ones_refused(tmp_path, monkeypatch):
    L.save(tmp_path / "a.png")
    L.save(tmp_path / "b.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 28 * 28 - 1)  # Pillow warns above it
    assert len(load_dataset(tmp_path).train) == 1
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 300)  # and refuses above twice as many
    with pytest.raises(ValueError, match=r"a\.png has more than 600 pixels; make it smaller"):
        load_dataset(tmp_path)


def test_classes_that_are_numbers_are_in_their_order(tmp_path):
    for name in range(12):
        deeper(str(name))(tmp_path)
    assert load_dataset(tmp_path).class_names == tuple(map(str, range(12)))
    deeper("ten")(tmp_path)
    assert load_dataset(tmp_path).class_names[:3] == ("0", "1", "10")


@pytest.mark.parametrize("name", ["x.npy", "x.npz", "cat.png", "x.zip"])
def test_a_folder_with_the_suffix_of_a_file_is_a_folder(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    deeper(name)(tmp_path)
    assert len(load_dataset(name).train) == len(load_dataset(f"folder:{name}").train) == 1
    assert load_pictures(name)[1] == ["x.png", "y.png"]
    assert load_dataset(tmp_path).class_names == (name,)


NAMES = [name for name in dataset_names() if ":" not in name]


@pytest.mark.parametrize("name", [*NAMES, "multi-mnist:train=20", "tetrominoes:train=20,test=5"])
def test_a_folder_named_like_a_data_set_is_told_of(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kind = name.partition(":")[0]
    (tmp_path / kind).mkdir()
    _reader(name)  # a folder without pictures is no choice
    deeper(kind, "a")(tmp_path)
    with pytest.warns(UserWarning, match=f"there is a folder {kind} here too, .* ./{kind}"):
        _reader(name)
    for path in (f"./{kind}", f"{kind}/", f"folder:{kind}", Path(kind)):
        assert load_dataset(path).class_names == ("a",)


def test_a_folder_named_like_a_data_set_is_told_of_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    deeper("digits")(tmp_path)
    with pytest.warns(UserWarning, match="a folder digits here too") as warned:
        assert len(load_dataset("digits").test) == 400
    assert len(warned) == 1
