"""Readers of images: scikit-learn's digits, torchvision's data sets, a folder of the user."""

import io
import os
import warnings
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from capsule_zoo.data.files import MissingData, fetch, from_home, user_cache
from capsule_zoo.data.pictures import ARRAYS, read_array, read_labels, read_pixels
from capsule_zoo.data.progress import announce, track, without_bars_in_logs
from capsule_zoo.data.seeds import seeded_generator

Size = tuple[int, int]
Labelled = tuple[Tensor, Any]  # images, and their labels or None
VALIDATION = ("val", "valid", "validation")  # folders beside train, of which one may be there


@dataclass(frozen=True)
class Source:
    """The result of a reader: images float32 (N, C, H, W) in [0, 1] and labels int64 (N,).

    Attributes:
        train, test: images and labels; the labels are None where there are none.
        class_names: one for each label.
        validation: number of training images held out by default.
        held_out: images and labels for validation that are part of the data set, which are used
            unless another number is asked for.
        objects: what is known of the objects of scenes for training and testing,
            `capsule_zoo.data.scenes.Objects`.
    """

    train: Labelled
    test: Labelled
    class_names: tuple[str, ...]
    validation: int
    held_out: Labelled | None = None
    objects: tuple[Any, Any] | None = None

    def with_images(self, train: Tensor, test: Tensor) -> Self:
        """Return the source with other images for training and testing, of the same classes."""
        return replace(self, train=(train, self.train[1]), test=(test, self.test[1]))

    def resized(self, size: Size | None) -> Self:
        """Return the source with images for training and testing, and their objects, resized."""
        if size is None or tuple(self.train[0].shape[-2:]) == size:
            return self
        known = self.objects and tuple(objects.resized(size) for objects in self.objects)
        images = (resized(part[0], size) for part in (self.train, self.test))
        return replace(self.with_images(*images), objects=known)


def resized(images: Tensor, size: Size | None) -> Tensor:
    """Resize images (N, C, H, W) to (height, width), bilinear, smoothed where they shrink."""
    if size is None or tuple(images.shape[-2:]) == size:
        return images
    return F.interpolate(images, size, mode="bilinear", antialias=True).clamp(0, 1)


def digits(size: Size | None = None) -> Source:
    """Read scikit-learn's 1,797 handwritten digits of 8x8 pixels, at 28x28 by default.

    The digits fill their frame, so a border of one pixel is added. The resulting 10x10 pixels are
    enlarged by bicubic interpolation, which keeps strokes sharper than bilinear interpolation.
    """
    from sklearn.datasets import load_digits

    raw = load_digits()
    bordered = F.pad(torch.tensor(raw.images, dtype=torch.float32)[:, None] / 16, (1, 1, 1, 1))
    images = F.interpolate(bordered, size or (28, 28), mode="bicubic", antialias=True).clamp(0, 1)
    labels = torch.tensor(raw.target, dtype=torch.int64)
    train, test = _split_at_random((images, labels), 400)
    return Source(train, test, tuple(map(str, range(10))), validation=200)


def torchvision_images(name: str, root: Path | None, size: Size | None = None) -> Source:
    """Read MNIST, FashionMNIST or CIFAR10 (torchvision's class names) with its own test split.

    Raises:
        MissingData: the files are not under `root` or, without a root, cannot be downloaded.
    """
    import torchvision

    read = getattr(torchvision.datasets, name)
    folder, download = (root, False) if root else (user_cache(), True)
    try:
        if download:
            announce(f"reading {name} from {folder}, or downloading it first")
        # torchvision prints "Failed to download", and draws bars
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), without_bars_in_logs():
            warnings.simplefilter("ignore")  # torchvision's own, about numpy
            train = read(folder, train=True, download=download)
            test = read(folder, train=False, download=download)
    except (OSError, RuntimeError, ValueError, EOFError, AssertionError) as error:
        remedy = (
            f" ({error}); put torchvision's {name} there, or leave root and CAPSULE_ZOO_DATA unset "
            "to download it to the user's cache"
            if root
            else "; it could not be downloaded: set CAPSULE_ZOO_DATA, root= or --data-root to a "
            f"folder that holds torchvision's {name}, or use the data set 'digits', which needs no "
            "download"
        )
        raise MissingData(f"no readable {name} in {folder}{remedy}") from error
    tensors = [
        (resized(_channels_first(part.data), size), torch.as_tensor(part.targets))
        for part in (train, test)
    ]
    class_names = tuple(label.split(" - ")[0] for label in train.classes)  # MNIST has "0 - zero"
    return Source(tensors[0], tensors[1], class_names, validation=5000)


def folder(path: Path, size: Size | None = None) -> Source:
    """Read the user's own images: `path/<class>/<image>`, or `path/{train,test}/<class>/<image>`.

    Pictures without classes lie in a flat folder, `path/<image>` or `path/{train,test}/<image>`.
    They have no labels. Images have a random order that is always the same, so that the first
    images are of all classes. Without a test folder a fifth of the images, always the same and at
    least one, is held out for testing. A file `.npy` or `.npz` may hold many images; files without
    the suffix of an image are ignored, and those whose names begin with a dot. Beside train, a
    folder val, valid or validation holds the images for validation. If all images are gray they
    stay gray, else all become RGB; `capsule_zoo.data.pictures` lists the result for each kind of
    file.

    Raises:
        MissingData: no such folder, a folder or a class without images, an unreadable image.
        ValueError: too few images; images of several sizes and no `size`; a class that is not
            trained on, or class folders on one side only.
    """
    sides = sides_of(path)
    parts = [{} if side is None else _files_by_class(side) for side in sides]
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
    classes = list(files)
    labels = torch.tensor([classes.index(name) for _, name in named]).repeat_interleave(numbers)
    counts = [int(n.sum()) for n in numbers.split([sum(map(len, p.values())) for p in parts])]
    train, test, held_out = (
        _mixed((some, None if None in files else known))
        for some, known in zip(images.split(counts), labels.split(counts), strict=True)
    )
    names = tuple(name for name in classes if name is not None)
    if sides[1] is None:
        source = _divided_at_random(path, train, names)
    else:
        source = Source(train, test, names, validation=len(train[0]) // 10)
    return source if sides[2] is None else replace(source, held_out=held_out)


def sides_of(path: Path) -> tuple[Path, Path | None, Path | None]:
    """Return the folders of images for training, testing and validation; None for absent ones."""
    if not (path / "train").is_dir():
        return path, None, None
    test, *held_out = (path / name for name in ("test", *VALIDATION))
    seen = next((side for side in held_out if side.is_dir()), None)
    return path / "train", test if test.is_dir() else None, seen


def all_pictures(path: Path, size: Size | None = None) -> tuple[Tensor, list[str]]:
    """Read all of the user's own images in the order of their files, and name the file of each.

    Args:
        path: a folder as `folder` reads it, or a file as `array_file` does.
    """
    files = [path]
    if path.suffix.lower() not in ARRAYS:
        sides = [_files_by_class(side) for side in sides_of(path) if side is not None]
        files = [f for side in sides for part in side.values() for f in part]
    images, numbers = _read_images(files, size)
    names = [f.name if f == path else f.relative_to(path).as_posix() for f in files]
    return images, [n for n, of in zip(names, numbers, strict=True) for _ in range(of)]


def array_file(path: Path, size: Size | None = None) -> Source:
    """Read the user's own images from a NumPy file, `.npy` or `.npz`; a fifth is for testing.

    An archive holds `images` and may hold `labels` (N,), the numbers of classes; see
    `data.pictures.read_array` for the shapes of images.

    Raises:
        MissingData: no such file, or not one of NumPy.
        ValueError: too few images; labels that are not one whole number for each image.
    """
    images = _channels_first(read_array(path, size))
    labels = read_labels(path, len(images))
    names = () if labels is None else tuple(map(str, range(int(labels.max()) + 1)))
    return _divided_at_random(path, _mixed((images, labels)), names)


def _divided_at_random(path: Path, known: Labelled, names: tuple[str, ...]) -> Source:
    """Return a source that tests on a fifth of the images, always the same, and at least on one."""
    count = len(known[0])
    if count < 2:
        raise ValueError(
            f"{path} holds 1 image, but 2 or more are needed: one to train on and one to test on; "
            "add images"
        )
    train, test = _split_at_random(known, max(1, count // 5))
    return Source(train, test, names, validation=len(train[0]) // 10)


def taken(part: Labelled, chosen: Tensor) -> Labelled:
    """Return the images with these numbers, and their labels if there are any."""
    images, labels = part
    return images[chosen], None if labels is None else labels[chosen]


def _mixed(part: Labelled) -> Labelled:
    """Return the images in an order that is random and the same on every call."""
    return taken(part, torch.randperm(len(part[0]), generator=seeded_generator(0)))


def _split_at_random(part: Labelled, count: int) -> tuple[Labelled, Labelled]:
    """Split off `count` images that are the same on every call; they come second."""
    order = torch.randperm(len(part[0]), generator=seeded_generator(0))
    rest, chosen = order[:-count].sort().values, order[-count:].sort().values
    return taken(part, rest), taken(part, chosen)


def data_folder(root: str | Path | None) -> Path | None:
    """Return the folder of data sets: `root`, else CAPSULE_ZOO_DATA, else None.

    Raises:
        MissingData: there is no such folder.
    """
    given = root or os.environ.get("CAPSULE_ZOO_DATA")
    if not given:
        return None
    path = from_home(given)
    if not path.is_dir():
        origin = "root" if root else "CAPSULE_ZOO_DATA"
        raise MissingData(f"{origin} must be a folder of data sets; there is no folder {path}")
    return path


def _channels_first(pixels: Tensor | np.ndarray) -> Tensor:
    """Convert bytes (N, H, W) or (N, H, W, C) to float32 (N, C, H, W) in [0, 1]."""
    images = torch.as_tensor(pixels)
    images = images[:, None] if images.dim() == 3 else images.permute(0, 3, 1, 2)
    return images.to(torch.float32, memory_format=torch.contiguous_format).div_(255)


def _files_by_class(path: Path) -> dict[str | None, list[Path]]:
    """List the image files of each class folder in `path`, both in alphabetical order.

    Without class folders the image files in `path` itself have no class, None.
    """
    from PIL import Image

    suffixes = {*Image.registered_extensions(), *ARRAYS}
    if not path.is_dir():
        raise MissingData(f"there is no folder {path}; name the place where the pictures lie now")
    classes = sorted(c for c in path.iterdir() if c.is_dir() and not c.name.startswith("."))
    named: dict[str | None, Path] = {folder.name: folder for folder in classes}
    files = {
        name: sorted(
            f
            for f in folder.iterdir()
            if f.suffix.lower() in suffixes and not f.name.startswith(".")
        )
        for name, folder in (named | {None: path}).items()
    }
    if classes and (stray := files.pop(None)):
        warnings.warn(
            f"{path} holds {len(stray)} pictures beside folders of classes, such as "
            f"{stray[0].name}; they are ignored: move them into the folder of their class",
            stacklevel=2,
        )
    if not classes and not files[None]:
        raise MissingData(
            f"{path} holds neither images nor folders of images; put images in it, or in one "
            "folder for each class"
        )
    if empty := [name for name, found in files.items() if not found]:
        found = ", ".join(str(named[name]) for name in empty)
        raise MissingData(f"no images in {found}; put some there, or take it out of {path}")
    return files


def _read_images(files: list[Path], size: Size | None) -> tuple[Tensor, Tensor]:
    """Read the files as float32 (N, C, H, W) in [0, 1]; return also how many images each holds."""
    pixels = [
        read_array(file, size) if file.suffix.lower() in ARRAYS else read_pixels(file, size)[None]
        for file in track(files, "reading pictures", "files")
    ]
    _warn_of_few_bits(files, pixels)
    first = pixels[0].shape[1:3]
    for file, image in zip(files, pixels, strict=True):
        if image.shape[1:3] != first:
            raise ValueError(
                f"{files[0]} has {_in_words(first)} pixels, {file} has "
                f"{_in_words(image.shape[1:3])}; bring all images to one size by size= in Python "
                "or --size HEIGHTxWIDTH on the command line"
            )
    if any(image.ndim == 4 for image in pixels):
        pixels = [image if image.ndim == 4 else np.stack([image] * 3, -1) for image in pixels]
    return _channels_first(np.concatenate(pixels)), torch.tensor(list(map(len, pixels)))


def _warn_of_few_bits(files: list[Path], pixels: list[np.ndarray]) -> None:
    """Warn where all pixels of the pictures of 16 bits lie below 4,096, as those of 12 bits do."""
    both = zip(files, pixels, strict=True)
    deep = [(p.max(), f) for f, p in both if p.dtype != np.uint8 and f.suffix.lower() not in ARRAYS]
    brightest, file = max(deep, default=(0.0, None))
    value = round(float(brightest) * 257)  # 65,535 / 255
    if 0 < value < 4096:
        warnings.warn(
            f"{file} is the brightest of {len(deep)} pictures of 16 bits, and its largest pixel is "
            f"{value:,} of 65,535, so that they are nearly black; if they have 12 bits, multiply "
            "their pixels by 16 and save them again",
            stacklevel=2,
        )


def _in_words(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


BITS_HOME = "http://www.cs.toronto.edu/~larocheh/public/datasets/binarized_mnist/"
BITS_PARTS = {"train": 50_000, "valid": 10_000, "test": 10_000}
BITS_SHAPE = 28, 28


def binarized_mnist(root: Path | None, size: Size | None = None) -> Source:
    """Read MNIST as binarized once by Larochelle, the images that most papers report nats on.

    Every gray pixel was drawn from Bernoulli(pixel) once. There are 50,000 images for training,
    10,000 for validation and 10,000 for testing, in the three files `binarized_mnist_*.amat`, of
    rows of 784 zeros and ones. No image has a label. Without a root the files are downloaded to the
    user's cache (110 MB).

    Args:
        root: the folder that holds the files, directly or in a folder `binarized_mnist`.

    Raises:
        MissingData: a file is absent or damaged; the message names its address.

    References: Salakhutdinov & Murray 2008, "On the Quantitative Analysis of Deep Belief Networks":
    the binarization. Larochelle & Murray 2011, "The Neural Autoregressive Distribution Estimator".
    """
    folder = user_cache() if root is None else root
    inner = folder / "binarized_mnist"
    place = inner if root is None or inner.is_dir() else folder
    splits: dict[str, Labelled] = {}
    for part, number in BITS_PARTS.items():
        file = place / f"binarized_mnist_{part}.amat"
        try:
            if root is None and not file.exists():
                fetch(BITS_HOME + file.name, file)
            images = read_bits(file.read_bytes(), number)
        except (OSError, ValueError) as error:
            raise MissingData(
                f"no readable {file.name} in {place} ({error}); it is published at {BITS_HOME}: "
                "put it there, set root= or CAPSULE_ZOO_DATA to a folder that holds it, or use "
                "'mnist', which is binarized anew where a model needs it"
            ) from error
        splits[part] = resized(images, size), None
    return Source(splits["train"], splits["test"], (), validation=0, held_out=splits["valid"])


def read_bits(raw: bytes, number: int) -> Tensor:
    """Read zeros and ones that stand apart as float32 (number, 1, 28, 28).

    Raises:
        ValueError: there is another character, or another number of them.
    """
    digits = np.frombuffer(raw, dtype=np.uint8)
    digits = digits[~np.isin(digits, np.frombuffer(b" \r\n\t", dtype=np.uint8))]
    bits = digits - ord("0")
    expected = number * BITS_SHAPE[0] * BITS_SHAPE[1]
    if len(bits) != expected or (bits > 1).any():
        raise ValueError(f"it must hold {expected:,} zeros and ones, and nothing else")
    return torch.from_numpy(bits.astype(np.float32)).view(number, 1, *BITS_SHAPE)
