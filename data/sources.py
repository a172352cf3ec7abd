"""Readers of images: scikit-learn's digits, torchvision's data sets, binarized digits."""

import io
import os
import warnings
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from capsule_zoo.data.files import MissingData, expand_home, fetch, user_cache
from capsule_zoo.data.progress import announce, without_bars_in_logs
from capsule_zoo.data.seeds import seeded_generator

Size = tuple[int, int]
Labelled = tuple[Tensor, Any]  # images, and their labels or None


@dataclass(frozen=True)
class Source:
    """The result of a reader: images float32 (N, C, H, W) in [0, 1] and labels int64 (N,).

    Attributes:
        train, test: images and labels; the labels are None where there are none.
        class_names: one for each label.
        validation: number of training images held out by default.
        held_out: images and labels for validation that are part of the data set, which are used
            unless another number is asked for.
        objects: what is known of the objects of scenes for training, testing and, where they are
            part of the data set, validation, `capsule_zoo.data.scenes.Objects`.
        settings: settings of the entry `scenes` that fit the images, if there are any.
    """

    train: Labelled
    test: Labelled
    class_names: tuple[str, ...]
    validation: int
    held_out: Labelled | None = None
    objects: tuple[Any, ...] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def with_images(self, train: Tensor, test: Tensor) -> Self:
        """Return the source with other training and test images, and unchanged labels."""
        return replace(self, train=(train, self.train[1]), test=(test, self.test[1]))

    def resize(self, size: Size | None) -> Self:
        """Return the source with all images and objects resized."""
        if size is None or tuple(self.train[0].shape[-2:]) == size:
            return self
        resized_objects = self.objects and tuple(objects.resize(size) for objects in self.objects)
        images = (resize_images(part[0], size) for part in (self.train, self.test))
        held_out = self.held_out and (resize_images(self.held_out[0], size), self.held_out[1])
        return replace(self.with_images(*images), held_out=held_out, objects=resized_objects)


def resize_images(images: Tensor, size: Size | None) -> Tensor:
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
    train, test = split_at_random((images, labels), 400)
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
            f"folder that holds torchvision's {name}, or use the data set 'digits' ('multi-digits' "
            "for scenes), which needs no download: --data digits"
        )
        raise MissingData(f"no readable {name} in {folder}{remedy}") from error
    tensors = [
        (resize_images(channels_first(part.data), size), torch.as_tensor(part.targets))
        for part in (train, test)
    ]
    class_names = tuple(label.split(" - ")[0] for label in train.classes)  # MNIST has "0 - zero"
    return Source(tensors[0], tensors[1], class_names, validation=5000)


def take_rows(part: Labelled, indices: Tensor) -> Labelled:
    """Return the images with the given numbers, and their labels if there are any."""
    images, labels = part
    return images[indices], None if labels is None else labels[indices]


def split_at_random(part: Labelled, count: int) -> tuple[Labelled, Labelled]:
    """Split off `count` random images with a fixed seed; return the rest first."""
    order = torch.randperm(len(part[0]), generator=seeded_generator(0))
    rest, test_rows = order[:-count].sort().values, order[-count:].sort().values
    return take_rows(part, rest), take_rows(part, test_rows)


def data_folder(root: str | Path | None) -> Path | None:
    """Return the folder of data sets: `root`, else CAPSULE_ZOO_DATA, else None.

    Raises:
        MissingData: there is no such folder.
    """
    location = root or os.environ.get("CAPSULE_ZOO_DATA")
    if not location:
        return None
    path = expand_home(location)
    if not path.is_dir():
        origin = "root" if root else "CAPSULE_ZOO_DATA"
        raise MissingData(f"{origin} must be a folder of data sets; there is no folder {path}")
    return path


def channels_first(pixels: Tensor | np.ndarray) -> Tensor:
    """Convert bytes (N, H, W) or (N, H, W, C) to float32 (N, C, H, W) in [0, 1]."""
    images = torch.as_tensor(pixels)
    images = images[:, None] if images.dim() == 3 else images.permute(0, 3, 1, 2)
    return images.to(torch.float32, memory_format=torch.contiguous_format).div_(255)


BITS_HOME = "http://www.cs.toronto.edu/~larocheh/public/datasets/binarized_mnist/"
BITS_PARTS = {"train": 50_000, "valid": 10_000, "test": 10_000}
BITS_SHAPE = 28, 28


def binarized_mnist(root: Path | None, size: Size | None = None) -> Source:
    """Read MNIST as binarized by Larochelle, on which most papers report nats.

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
        splits[part] = resize_images(images, size), None
    return Source(splits["train"], splits["test"], (), validation=0, held_out=splits["valid"])


def read_bits(raw: bytes, number: int) -> Tensor:
    """Parse separated zeros and ones into images, float32 (number, 1, 28, 28).

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
