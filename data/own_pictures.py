"""Readers of the user's own pictures: a folder of files, or a file of NumPy."""

import warnings
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from capsule_zoo.data.files import MissingData
from capsule_zoo.data.pictures import (
    Picture,
    holds_labels,
    is_array_file,
    is_picture_file,
    read_array,
    read_labels,
    read_picture,
)
from capsule_zoo.data.progress import track
from capsule_zoo.data.seeds import seeded_generator
from capsule_zoo.data.sources import (
    Labelled,
    Size,
    Source,
    channels_first,
    split_at_random,
    take_rows,
)

VALIDATION = ("val", "valid", "validation")  # names of the folder of validation images
SIDES = ("train", "training", "test", "testing", *VALIDATION)  # names of folders of a split
ARCHIVES = (".zip", ".tar", ".tgz", ".gz", ".7z", ".rar")
OTHER_PICTURES = (".heic", ".heif", ".avif", ".jxl", ".svg", ".dng", ".nef", ".cr2", ".arw", ".dcm")
JUNK = "__MACOSX"  # a folder that macOS adds to archives of pictures
BRIGHT = 200  # least tone of a bright ground, of 255
LEAST_CONTRAST = 16  # least difference between pixels, of 255: 12 bits in 16 reach this brightness
Files = dict[str | None, list[Path]]


def folder(path: Path, size: Size | None = None) -> Source:
    """Read the user's own images: `path/<class>/<image>`, or `path/{train,test}/<class>/<image>`.

    Pictures without classes lie in a flat folder, `path/<image>` or `path/{train,test}/<image>`.
    They have no labels. Images have a fixed random order, so that the first images are of all
    classes. Without a test folder a fixed fifth of the images, at least one, is held out for
    testing. A file `.npy` or `.npz` may hold many images. Files without the suffix of an image, and
    files whose names begin with a dot, are ignored. A folder val, valid or validation next to
    train holds the images for validation. Classes are in alphabetical order, or in numerical
    order if all names are numbers. If all images are gray they have one channel, else all become
    RGB; `capsule_zoo.data.pictures` lists the pixels of each file format. If all pictures with a
    transparent ground have dark ink, it is inverted, with a warning.

    Raises:
        MissingData: no such folder, a folder or a class without images, an unreadable image.
        ValueError: too few images; images of several sizes and no `size`; a class that is not
            trained on, or class folders on one side only.
    """
    sides = sides_of(path)
    parts: list[Files] = [{} if side is None else _files_by_class(side) for side in sides]
    _warn_of_misnamed_sides(path, [side for side in sides if side is not None], parts[0])
    files = parts[0]
    for side, part in zip(sides, parts, strict=True):
        if part and (None in part) != (None in files):
            raise ValueError(f"of {sides[0]} and {side} one has class folders, one none")
        if strangers := sorted(set(map(str, part)) - set(map(str, files))):
            raise ValueError(
                f"{side} has classes that the training images lack: {', '.join(strangers)}"
            )
    named = [(file, name) for part in parts for name in part for file in part[name]]
    images, numbers = _read_images([file for file, _ in named], size)
    if labelled := [file for file, _ in named if is_array_file(file) and holds_labels(file)]:
        warnings.warn(
            f"the labels in {labelled[0]} are not read, because the classes of a folder are the "
            "folders in it; give the file itself as data",
            stacklevel=2,
        )
    classes = list(files)
    labels = torch.tensor([classes.index(name) for _, name in named]).repeat_interleave(numbers)
    counts = [int(n.sum()) for n in numbers.split([sum(map(len, p.values())) for p in parts])]
    train, test, held_out = (
        _shuffle_images((some, None if None in files else part_labels))
        for some, part_labels in zip(images.split(counts), labels.split(counts), strict=True)
    )
    names = tuple(name for name in classes if name is not None)
    if sides[1] is None:
        source = divide_at_random(path, train, names)
    else:
        source = Source(train, test, names, validation=len(train[0]) // 10)
    return source if sides[2] is None else replace(source, held_out=held_out)


def sides_of(path: Path) -> tuple[Path, Path | None, Path | None]:
    """Return the folders of images for training, testing and validation; None for absent ones."""
    if not (path / "train").is_dir():
        return path, None, None
    test, *held_out = (path / name for name in ("test", *VALIDATION))
    validation = next((side for side in held_out if side.is_dir()), None)
    return path / "train", test if test.is_dir() else None, validation


def all_pictures(path: Path, size: Size | None = None) -> tuple[Tensor, list[str]]:
    """Read all of the user's own images in the order of their files; return the files' names too.

    Args:
        path: a folder as `folder` reads it, or a file as `array_file` does.
    """
    files = [path]
    if not is_array_file(path):
        sides = [_files_by_class(side) for side in sides_of(path) if side is not None]
        files = [f for side in sides for part in side.values() for f in part]
    images, numbers = _read_images(files, size)
    names = [f.name if f == path else f.relative_to(path).as_posix() for f in files]
    return images, [n for n, of in zip(names, numbers, strict=True) for _ in range(of)]


def read_whole_pictures(path: str | Path) -> tuple[list[Tensor], list[str]]:
    """Read the user's own pictures of any sizes, (C, H, W) each, from 0 to 1, and their names.

    Gray pictures of 16 bits whose largest pixel is below 4,096 are of 12 bits, and are scaled as
    such, with a warning. If one picture is in color, all become RGB.

    Args:
        path: a picture file, a folder as `folder` reads it, or a file as `array_file` does.

    Raises:
        MissingData: no such file or folder, or a file that cannot be read.
    """
    path = Path(path)
    if path.is_dir() or not is_picture_file(path):
        sides = [_files_by_class(side) for side in sides_of(path) if side is not None]
        files = [f for side in sides for part in side.values() for f in part]
    elif path.is_file():
        files = [path]
    else:
        raise MissingData(f"there is no picture {path}; name the place where it lies now")
    pictures = [
        Picture(read_array(file, None)) if is_array_file(file) else read_picture(file, None)
        for file in track(files, "reading pictures", "files")
    ]
    names, pixels = [], []
    contents = _scale_twelve_bits(files, _with_bright_ink(files, pictures))
    for file, part in zip(files, contents, strict=True):
        parts = list(part) if is_array_file(file) else [part]
        names += [file.name if file == path else file.relative_to(path).as_posix()] * len(parts)
        pixels += parts
    color = any(image.ndim == 3 for image in pixels)
    tensors = [channels_first(np.stack([image]))[0] for image in pixels]
    return [t.expand(3, -1, -1) if color and len(t) == 1 else t for t in tensors], names


def _scale_twelve_bits(files: list[Path], pixels: list[np.ndarray]) -> list[np.ndarray]:
    """Return pixels from 0 to 255, those of 12 bits in files of 16 bits on their own scale."""
    faint = _describe_few_bits(files, pixels)
    if faint is None:
        return pixels
    warnings.warn(
        f"{faint} so they are read as pictures of 12 bits, whose white is 4,095", stacklevel=3
    )
    scale = np.float32(65535 / 4095)
    return [
        image if image.dtype == np.uint8 or is_array_file(file) else image * scale
        for file, image in zip(files, pixels, strict=True)
    ]


def array_file(path: Path, size: Size | None = None) -> Source:
    """Read the user's own images from a NumPy file, `.npy` or `.npz`; a fifth are test images.

    An archive holds `images` and may hold `labels` (N,), the numbers of classes; see
    `data.pictures.read_array` for the shapes of images.

    Raises:
        MissingData: no such file, or not one of NumPy.
        ValueError: too few images; labels that are not one whole number for each image.
    """
    images, _ = _read_images([path], size)
    labels = read_labels(path, len(images))
    names = () if labels is None else tuple(map(str, range(int(labels.max()) + 1)))
    return divide_at_random(path, _shuffle_images((images, labels)), names)


def divide_at_random(path: Path, examples: Labelled, names: tuple[str, ...]) -> Source:
    """Return a source whose test images are a fixed fifth of the images, at least one.

    Args:
        path: the file or folder of the images, for messages.
        examples: images, or scenes of points, and their labels.
        names: names of the classes.

    Raises:
        ValueError: there is only one image.
    """
    count = len(examples[0])
    if count < 2:
        name = "image" if examples[0].dim() == 4 else "scene"
        raise ValueError(
            f"{path} holds 1 {name}, but 2 or more are needed: one to train on and one to test "
            f"on; add {name}s"
        )
    train, test = split_at_random(examples, max(1, count // 5))
    return Source(train, test, names, validation=len(train[0]) // 10)


def holds_pictures(path: Path) -> bool:
    """Return whether a folder holds pictures, directly or at most two folders deeper."""
    levels = chain.from_iterable(path.glob(pattern) for pattern in ("*", "*/*", "*/*/*"))
    return any(map(_is_picture, levels))


def _shuffle_images(part: Labelled) -> Labelled:
    """Return images and labels in a random order with a fixed seed."""
    return take_rows(part, torch.randperm(len(part[0]), generator=seeded_generator(0)))


def _is_hidden(path: Path) -> bool:
    return path.name.startswith(".") or path.name == JUNK


def _is_picture(path: Path) -> bool:
    """Return whether a file has the suffix of a picture; it may be a dead link."""
    return is_picture_file(path) and not _is_hidden(path) and not path.is_dir()


def _files_by_class(path: Path) -> Files:
    """List the image files of each class folder in `path`, in the order of the classes.

    Without class folders the image files in `path` itself have no class, None.
    """
    if not path.is_dir():
        raise MissingData(
            f"{path} is a file, and pictures are read from a folder, .npy or .npz; {_remedy(path)}"
            if path.is_file()
            else f"there is no folder {path}; name the place where the pictures lie now"
        )
    classes = [c for c in path.iterdir() if c.is_dir() and not _is_hidden(c)]
    numbered = all(c.name.isdecimal() for c in classes)
    classes.sort(key=lambda c: (int(c.name) if numbered else 0, c.name))
    named: dict[str | None, Path] = {folder.name: folder for folder in classes}
    files: Files = {
        name: sorted(filter(_is_picture, folder.iterdir()))
        for name, folder in (named | {None: path}).items()
    }
    if classes and (stray := files.pop(None)):
        warnings.warn(
            f"{path} holds {len(stray)} pictures beside folders of classes, such as "
            f"{stray[0].name}; they are ignored: move them into the folder of their class",
            stacklevel=2,
        )
    unread = [f for folder in (*classes, path) for f in _unread(folder) if f not in classes]
    if not classes and not files[None]:
        raise MissingData(
            f"{path} holds no image that can be read, but {unread[0].name}; {_remedy(unread[0])}"
            if unread
            else f"{path} holds neither images nor folders of images; put images in it, or in one "
            "folder for each class"
        )
    if empty := [named[name] for name, paths in files.items() if not paths]:
        lost = next((f for f in unread if f.parent in empty), None)
        remedy = _remedy(lost) if lost else f"put some there, or take it out of {path}"
        raise MissingData(f"no images in {', '.join(map(str, empty))}; {remedy}")
    if unread:
        warnings.warn(
            f"{len(unread)} files or folders are not read, such as {unread[0]}; "
            f"{_remedy(unread[0])}",
            stacklevel=2,
        )
    return files


def _unread(path: Path) -> Iterator[Path]:
    """List the files and folders in a folder of pictures that cannot be read as pictures."""
    for item in sorted(path.iterdir()):
        kinds = (*ARCHIVES, *OTHER_PICTURES)
        wanted = item.suffix.lower() in kinds or not item.exists()  # a link to no folder
        other = wanted and not is_picture_file(item)
        if not _is_hidden(item) and (holds_pictures(item) if item.is_dir() else other):
            yield item


def _remedy(path: Path) -> str:
    """Return advice on a file or folder that `_unread` lists."""
    if path.is_dir():
        return f"move the pictures in {path} one folder up"
    if path.suffix.lower() in ARCHIVES:
        return f"unpack {path.name}"
    if not path.exists():
        return f"mend or remove {path.name}, a link to nothing"
    if is_picture_file(path):
        return f"give its folder {path.parent}"
    return f"save {path.name} as PNG or JPEG"


def _warn_of_misnamed_sides(path: Path, sides: list[Path], files: Files) -> None:
    """Warn of a folder that is named like a split but is not read as that split."""
    if path in sides:  # without a folder train
        wrong = [name for name in files if name and name.lower() in SIDES]
        use = "as classes"
    else:
        others = (p for p in path.iterdir() if p.is_dir() and p not in sides)
        wrong = sorted(p.name for p in others if p.name.lower() in SIDES and holds_pictures(p))
        use = "not at all"
    if wrong:
        warnings.warn(
            f"of {path} the folders {', '.join(map(str, wrong))} are read {use}; the folders of "
            "images for training, testing and validation are called train, test and val",
            stacklevel=3,
        )


def _read_images(files: list[Path], size: Size | None) -> tuple[Tensor, Tensor]:
    """Read files as float32 (N, C, H, W) in [0, 1]; return also the number of images of each."""
    pictures = [
        Picture(read_array(file, size)) if is_array_file(file) else read_picture(file, size)
        for file in track(files, "reading pictures", "files")
    ]
    pixels = [
        part if is_array_file(file) else part[None]
        for file, part in zip(files, _with_bright_ink(files, pictures), strict=True)
    ]
    first = pixels[0].shape[1:3]
    for file, image in zip(files, pixels, strict=True):
        if image.shape[1:3] != first:
            raise ValueError(
                f"{files[0]} has {_shape_text(first)} pixels, {file} has "
                f"{_shape_text(image.shape[1:3])}; bring all images to one size by size= in Python "
                "or --size HEIGHTxWIDTH on the command line"
            )
    _warn_of_channels(files, pixels)
    if not _warn_of_few_bits(files, pixels) and not any(picture.dark for picture in pictures):
        _warn_of_contrast(files, pixels)
        _warn_of_dark_ink(files, pixels)
    if any(image.ndim == 4 for image in pixels):
        pixels = [image if image.ndim == 4 else np.stack([image] * 3, -1) for image in pixels]
    return channels_first(np.concatenate(pixels)), torch.tensor(list(map(len, pixels)))


def _with_bright_ink(files: list[Path], pictures: list[Picture]) -> list[np.ndarray]:
    """Return the pixels of pictures; ink is inverted if all transparent pictures have dark ink.

    On black, dark ink would be lost. If only some pictures are dark, all keep their colors,
    because inversion would lose the ink of the others.
    """
    dark = [file for file, picture in zip(files, pictures, strict=True) if picture.dark]
    transparent = sum(picture.inverted is not None for picture in pictures)
    inverts = 0 < len(dark) == transparent
    if inverts:
        warnings.warn(
            f"all pictures with a transparent ground ({len(dark)}, such as {dark[0]}) have dark "
            "ink; it is inverted, so that it is bright on black: save them on a ground of one "
            "color to keep theirs",
            stacklevel=4,
        )
    elif dark:
        warnings.warn(
            f"{len(dark)} of {transparent} pictures with a transparent ground have dark ink, such "
            f"as {dark[0]}, which is lost on black; save all on a ground of another color",
            stacklevel=4,
        )
    return [p.inverted if inverts and p.inverted is not None else p.pixels for p in pictures]


def _warn_of_channels(files: list[Path], pixels: list[np.ndarray]) -> None:
    """Warn if each of several NumPy files seems to hold one color picture as three gray ones."""
    both = zip(files, pixels, strict=True)
    arrays = [(file, image.shape) for file, image in both if is_array_file(file)]
    if len(arrays) > 1 and all(len(shape) == 3 == shape[0] for _, shape in arrays):
        warnings.warn(
            f"each of {len(arrays)} files, such as {arrays[0][0]}, is read as 3 gray pictures; if "
            "it holds the channels of one picture, save it as (H, W, 3)",
            stacklevel=4,
        )


def _warn_of_few_bits(files: list[Path], pixels: list[np.ndarray]) -> bool:
    """Warn if all pixels of 16-bit pictures lie below 4,096, as 12-bit pixels do.

    Returns:
        True if there was a warning.
    """
    faint = _describe_few_bits(files, pixels)
    if faint is None:
        return False
    warnings.warn(
        f"{faint} so that they are nearly black; if they have 12 bits, multiply their pixels by 16 "
        "and save them again",
        stacklevel=4,
    )
    return True


def _describe_few_bits(files: list[Path], pixels: list[np.ndarray]) -> str | None:
    """Describe the brightest picture of 16 bits if 12 bits would hold it; None otherwise."""
    both = zip(files, pixels, strict=True)
    deep = [(p.max(), f) for f, p in both if p.dtype != np.uint8 and not is_array_file(f)]
    brightest, file = max(deep, default=(0.0, None))
    value = round(float(brightest) * 257)  # 65,535 / 255
    if not 0 < value < 4096:
        return None
    return (
        f"{file} is the brightest of {len(deep)} pictures of 16 bits, and its largest pixel is "
        f"{value:,} of 65,535,"
    )


def _warn_of_contrast(files: list[Path], pixels: list[np.ndarray]) -> None:
    """Warn if more than half of the pictures have hardly any contrast."""
    flat: list[tuple[Path, float, float]] = []  # files, darkest and brightest pixel
    for file, images in zip(files, pixels, strict=True):
        low, high = images.min((1, 2)), images.max((1, 2))  # (n,) or (n, 3)
        contrast = (high - low).reshape(len(images), -1).max(1)
        faint = np.flatnonzero(contrast < LEAST_CONTRAST)
        flat += [(file, float(low[k].min()), float(high[k].max())) for k in faint]
    if 2 * len(flat) > sum(map(len, pixels)):
        file, least, most = max(flat, key=lambda row: row[2] - row[1])
        warnings.warn(
            f"{len(flat)} of {sum(map(len, pixels))} pictures have hardly any contrast; that in "
            f"{file} has pixels from {least:.3g} to {most:.3g} of 255: stretch them to the range "
            "from 0 to 255, and remove empty pictures",
            stacklevel=4,
        )


def _warn_of_dark_ink(files: list[Path], pixels: list[np.ndarray]) -> None:
    """Warn if most pictures are gray, and dark on a bright ground."""
    dark, total = 0, sum(map(len, pixels))
    for images in pixels:
        if images.ndim == 3:  # (n, H, W)
            sides = images[:, 0], images[:, -1], images[:, :, 0], images[:, :, -1]
            ground = np.median(np.concatenate(sides, 1), 1)
            dark += int(((ground >= BRIGHT) & (images.mean((1, 2)) < 0.98 * ground)).sum())
    if total > 1 and dark > 0.8 * total:
        warnings.warn(
            f"{dark} of {total} pictures, such as {files[0]}, are dark on a bright ground, and "
            "most models paint bright ink on black; invert them, unless the ground is part of what "
            "you model",
            stacklevel=4,
        )


def _shape_text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
