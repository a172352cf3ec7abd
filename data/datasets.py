"""Loading of all data sets of the zoo, by name."""

import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from capsule_zoo.data.files import expand_home
from capsule_zoo.data.letters import LetterViews, font_letters
from capsule_zoo.data.leveling import Leveling
from capsule_zoo.data.own_pictures import all_pictures, array_file, folder, holds_pictures
from capsule_zoo.data.pictures import is_array_file, is_picture_file
from capsule_zoo.data.points import constellations, constellations_of
from capsule_zoo.data.progress import track
from capsule_zoo.data.registration import refuse_taken
from capsule_zoo.data.scenes import SCENES, scene_reader
from capsule_zoo.data.seeds import seeded_generator
from capsule_zoo.data.sources import (
    Size,
    Source,
    binarized_mnist,
    data_folder,
    digits,
    torchvision_images,
)
from capsule_zoo.data.splits import Dataset, Split, integer_of
from capsule_zoo.data.tiles import tiles_of
from capsule_zoo.data.toys3d import Toys3D
from capsule_zoo.data.transforms import Affine, Rotate, Shift, ink_extent, uniform, warp_images
from capsule_zoo.data.viewpoints import SmallNORB

Reader = Callable[[Path | None, Size | None], Source]

NAME = r"[a-z0-9]+(-[a-z0-9]+)*"  # form of the names of data sets, entries and trained weights


def load_dataset(
    name: str | Path = "digits",
    root: str | Path | None = None,
    *,
    size: int | Size | str | None = None,
    validation: int | None = None,
    seed: int = 0,
    leveling: Leveling | None = None,
) -> Dataset:
    """Load the data set `name` into memory.

    The validation images are the last `validation` of a permutation of the training images that
    `seed` determines, unless the data set has validation images of its own (`binarized-mnist`) and
    no number is given. Test images never depend on `seed`, so that runs can be compared across it.

    Args:
        name: one of `dataset_names()`. `folder:PATH` reads images from one folder per class, or
            from a flat folder or a NumPy file `.npy` or `.npz`; a path alone will do, unless it is
            the name of a data set: "./digits" and Path("digits") are folders. Images without
            classes have no labels, None. `tiles:PATH` reads a picture, or a folder of pictures of
            any sizes, as random tiles for `scenes`; the path of a picture alone will do. `size` is
            then the width of a typical object. `constellations:FILE.npz` reads scenes of points,
            see `data.points.read_scenes`.
        root: the folder with torchvision's own folders (`MNIST/raw`, ...). By default the
            environment variable CAPSULE_ZOO_DATA; without either, files are downloaded to the
            user's cache.
        size: pixels, one number or (height, width), or a text, such as "28" or "28x20";
            the data set's own by default (digits: 28).
        validation: number of training images to hold out. By default 200 for digits, 5,000 for
            torchvision's data sets and those made from them, the data set's own for
            binarized-mnist, a tenth for a folder; 0 for none. Of multi-digits, number of the
            1,000 scenes of other digits.
        seed: chooses the validation images.
        leveling: of `tiles:PATH`, the leveling of the model that reads them, `model.leveling`. By
            default it is fitted to the pictures, for a new model.

    Raises:
        MissingData: files that are absent or unreadable (a ValueError).
        ValueError: an unknown name, or an argument that is out of range.
    """
    name = f"folder:{name}" if isinstance(name, Path) else str(name)
    source = _reader(name, leveling)(data_folder(root), _parse_size(size))
    train_objects, tested, *others = source.objects or (None, None)
    train, test = Split(*source.train, objects=train_objects), Split(*source.test, objects=tested)
    count = source.validation if validation is None else validation
    if source.held_out is None:
        train, held_out = _divide_split(train, count, seed)
    elif others:
        held_out = _first_scenes(Split(*source.held_out, objects=others[0]), validation)
    elif validation is None:
        held_out = Split(*source.held_out)
    else:
        train, held_out = _divide_split(_join_splits(train, Split(*source.held_out)), count, seed)
    return Dataset(
        name,
        replace(train, name=f"{name}/train"),
        replace(held_out, name=f"{name}/validation"),
        replace(test, name=f"{name}/test"),
        source.class_names,
        source.settings,
    )


def load_tests(name: str, root: str | Path | None = None, **settings: Any) -> Dataset:
    """Load a data set for its test images; data sets of scenes then have 20 training images."""
    kind, options, _ = name.partition(":")
    small_name = f"{name}{',' if options else ':'}train=20" if kind in SCENES else name
    data = load_dataset(small_name, root, **settings)
    return replace(data, name=name, test=replace(data.test, name=f"{name}/test"))


def load_pictures(name: str, size: Size | None = None) -> tuple[Split, list[str]] | None:
    """Load all of a user's own pictures and the name of each file; None for other data sets."""
    kind, _, path = full_name(name).partition(":")
    if kind != "folder":
        return None
    images, files = all_pictures(Path(path), size)
    return Split(images, name=name), files


def _join_splits(split: Split, other: Split) -> Split:
    """Concatenate two splits; the result has labels if both have labels."""
    labels = [split.labels, other.labels]
    joint_labels = None if any(part is None for part in labels) else torch.cat(labels)
    return Split(torch.cat([split.images, other.images]), joint_labels)


def _first_scenes(split: Split, count: int | None) -> Split:
    """Return the first `count` validation scenes, by default all; training has other digits."""
    number = len(split) if count is None else integer_of(count)
    if number is None or not 0 <= number <= len(split):
        raise ValueError(
            f"validation must be a whole number from 0 to {len(split)}, the scenes of digits that "
            f"training does not show, not {count}"
        )
    return split[:number]


def _divide_split(split: Split, count: int, seed: int) -> tuple[Split, Split]:
    """Divide a split into training images and `count` held-out images."""
    number, whole = len(split), integer_of(count)
    if whole is None or not 0 <= whole < number:
        raise ValueError(
            f"validation must be a whole number from 0 to {number - 1} of the {number} images for "
            f"training, not {count}"
        )
    order = torch.randperm(number, generator=seeded_generator(seed))
    return split[order[: number - whole]], split[order[number - whole :]]


def full_name(name: str) -> str:
    """Return a data set's name with an absolute path, for any working folder."""
    kind, _, path = name.partition(":")
    if kind in ("folder", "tiles", "constellations") and path:
        return f"{kind}:{expand_home(path).resolve()}"
    if name not in _READERS and _is_one_picture(name):
        return f"tiles:{expand_home(name).resolve()}"
    if name not in _READERS and _is_of_pictures(name):
        return f"folder:{expand_home(name).resolve()}"
    return name


def dataset_names() -> list[str]:
    """Return the names that `load_dataset` takes; PATH and FILE.npz stand for the user's files."""
    return [*sorted(_READERS), "constellations:FILE.npz", "folder:PATH", "tiles:PATH"]


def register_dataset(name: str) -> Callable[[Reader], Reader]:
    """Return a decorator that registers a reader as the data set `name`.

    >>> @register_dataset("stripes")
    ... def stripes(root: Path | None, size: tuple[int, int] | None) -> Source: ...

    `load_dataset` and the command line then find it. A reader takes `root`, the folder of data
    files or None, and `size`, the requested (height, width) or None. It returns a `Source`: all
    images of both splits, with their labels.

    Raises:
        ValueError: the name is taken outside of a notebook, or not lower case with hyphens.
    """
    if not re.fullmatch(NAME, name):
        raise ValueError(f"a data set's name is lower case with hyphens, not {name!r}")

    def decorate(reader: Reader) -> Reader:
        refuse_taken("a data set", name, _READERS.get(name), reader)
        _READERS[name] = reader
        return reader

    return decorate


def affnist(root: Path | None, size: Size | None = None) -> Source:
    """Read MNIST on 40x40 pixels: shifted training images, test images under affine maps.

    Training images are shifted by up to 6 whole pixels. Test images are rotated by up to 20
    degrees, sheared by up to .2, scaled by .8 to 1.2 per axis, and shifted to any position where no
    ink is lost, as in affNIST (Tieleman 2013). All numbers are uniform, drawn once with a fixed
    seed.
    """
    mnist = torchvision_images("MNIST", root)
    train = _move_in_chunks(_shift_images, mnist.train[0], seeded_generator(1))
    test = _move_in_chunks(_scatter_images, mnist.test[0], seeded_generator(2))
    return mnist.with_images(train, test).resize(size)


def rotated_mnist(root: Path | None, size: Size | None = None) -> Source:
    """Read MNIST with test images rotated by up to 180 degrees, uniformly, with a fixed seed."""
    mnist = torchvision_images("MNIST", root)
    test = Rotate(180)(mnist.test[0], generator=seeded_generator(3))
    return mnist.with_images(mnist.train[0], test).resize(size)


def _source_of_views(data: SmallNORB | Toys3D | LetterViews, size: Size | None) -> Source:
    train, test = (views.split(size) for views in (data.train, data.test))
    return Source(
        (train.images, train.labels),
        (test.images, test.labels),
        data.train.classes,
        validation=len(train) // 10,
    )


def _shift_images(images: Tensor, generator: torch.Generator) -> Tensor:
    return Shift(6)(F.pad(images, (6, 6, 6, 6)), generator=generator)


def _scatter_images(images: Tensor, generator: torch.Generator) -> Tensor:
    motions = Affine(degrees=20, shear=0.2, scale=(0.8, 1.2)).motions(len(images), generator)
    left, right, top, bottom = ink_extent(images, motions).T
    edge = 20.5  # half the frame, and half a pixel beyond: the first pixel center outside
    for axis, (low, high) in enumerate([(left, right), (top, bottom)]):
        motions[:, axis, 2] = uniform(-edge - low, edge - high, len(images), generator)
    return warp_images(images, motions, (40, 40))


def _move_in_chunks(
    move: Callable[[Tensor, torch.Generator], Tensor], images: Tensor, generator: torch.Generator
) -> Tensor:
    """Move images chunk by chunk; a warp of all images at once would need gigabytes."""
    chunks = track(images.split(2000), "moving images", "chunks")
    return torch.cat([move(chunk, generator) for chunk in chunks])


_READERS: dict[str, Reader] = {
    "digits": lambda root, size: digits(size),
    "font-letters": lambda root, size: font_letters(size),
    "letter-views": lambda root, size: _source_of_views(LetterViews(), size),
    "binarized-mnist": binarized_mnist,
    "mnist": lambda root, size: torchvision_images("MNIST", root, size),
    "fashion-mnist": lambda root, size: torchvision_images("FashionMNIST", root, size),
    "cifar10": lambda root, size: torchvision_images("CIFAR10", root, size),
    "affnist": affnist,
    "rotated-mnist": rotated_mnist,
    "smallnorb": lambda root, size: _source_of_views(SmallNORB(root), size),
    "constellations": lambda root, size: _read_points(constellations, size),
    **{name: scene_reader(name) for name in SCENES},
    "toys3d": lambda root, size: _source_of_views(Toys3D(), size),
}


def _reader(name: str, leveling: Leveling | None = None) -> Reader:
    kind, _, path = full_name(name).partition(":")
    if leveling is not None and kind != "tiles":
        raise ValueError(
            f"leveling is of whole pictures, which {name!r} is not; give a picture or tiles:PATH"
        )
    if name in _READERS or kind in SCENES:
        _warn_of_folder(kind)
    if name in _READERS:
        return _READERS[name]
    if kind in SCENES:
        return scene_reader(kind, path)
    if kind == "folder" and path:
        read = array_file if is_array_file(Path(path)) else folder
        return lambda root, size: read(Path(path), size)
    if kind == "tiles" and path:
        return lambda root, size: tiles_of(Path(path), size, leveling)
    if kind == "constellations" and path:
        return lambda root, size: _read_points(lambda: constellations_of(Path(path)), size)
    raise ValueError(_unknown_message(name, path))


def _unknown_message(name: str, path: str) -> str:
    """Return the error message for an unknown data set; `path` is the text after the colon."""
    near = get_close_matches(name.lower().replace("_", "-"), dataset_names())
    if expand_home(path).exists() and path:
        near = [f"folder:{path}"]
    meant = f"; did you mean {' or '.join(map(repr, near))}?" if near else "."
    if expand_home(name).is_file() and not near:
        meant = "; pictures are read from a folder, .npy or .npz, and not from a file of this kind."
    elif "/" in name and not near:
        meant = "; there is no such file, and no such folder of pictures either."
    valid_names = f"{', '.join(dataset_names())}, and those of imported modules (--import MODULE)"
    return f"unknown data set {name!r}{meant} Known are: {valid_names}"


def _warn_of_folder(name: str) -> None:
    """Warn if a folder of pictures has the name of a data set, which takes precedence."""
    if Path(name).is_dir() and holds_pictures(Path(name)):
        warnings.warn(
            f"{name} is the data set of this name; there is a folder {name} here too, which is "
            f"read by its path, ./{name}",
            stacklevel=4,
        )


def _is_one_picture(name: str) -> bool:
    """Return whether the path is a file of one picture."""
    path = expand_home(name)
    return path.is_file() and is_picture_file(path) and not is_array_file(path)


def _is_of_pictures(name: str) -> bool:
    """Return whether the path is a folder or a .npy or .npz file."""
    path = expand_home(name)
    return name != "" and (path.is_dir() or (is_array_file(path) and path.is_file()))


def _read_points(read: Callable[[], Source], size: Size | None) -> Source:
    if size is not None:
        raise ValueError("size is a number of pixels, and scenes of points have none; leave it out")
    return read()


def _parse_size(size: int | Size | str | None) -> Size | None:
    if size is None:
        return None
    pair: Any = size if isinstance(size, tuple | list) else (size, size)
    if isinstance(size, str) and (match := re.fullmatch(r"([0-9]+)(?:x([0-9]+))?", size)):
        pair = int(match[1]), int(match[2] or match[1])
    match [number for number in map(integer_of, pair) if number and number >= 1]:
        case [height, width] if len(pair) == 2:
            return height, width
    raise ValueError(
        "size must be pixels, 1 or more: one number, (height, width) or words such as '28x20' "
        f"(height x width), not {size!r}"
    )
