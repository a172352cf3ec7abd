"""Data sets of three splits, where a split is two tensors in memory."""

import operator
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset

from capsule_zoo.data.seeds import seeded_generator
from capsule_zoo.data.tensors import label_tensor, tensor_of
from capsule_zoo.data.transforms import Binarize


@dataclass(frozen=True, eq=False, repr=False)
class Split(TorchDataset):
    """A set of images and their labels.

    Indexing with a slice, a tensor of indices or a boolean mask gives a smaller split. Indexing
    with a number gives one image (C, H, W) and its label, so that a split is a torch `Dataset`:
    `for image, label in split` and `torch.utils.data.DataLoader(split)` work. Without labels it
    gives the image alone.

    Attributes:
        images: float32, shape (N, C, H, W), from a tensor or a numpy array, in [0, 1] unless they
            were transformed; or sets of points of the plane, (N, P, 2), for a model of points; or
            rows of numbers, (N, F), for a Pyro program.
        labels: int64 class indices, shape (N,), from a tensor, a numpy array or a list; None where
            the images have no labels.
        name: the origin of the images, such as `"mnist/test"`.
        objects: what is known of the objects of scenes, `capsule_zoo.data.scenes.Objects`, with one
            row for each image; None for other images.
    """

    images: Tensor
    labels: Any = None  # a Tensor or None; `labels_of` refuses None
    name: str = "images"
    objects: Any = None

    def __post_init__(self) -> None:
        if isinstance(self.images, np.ndarray):
            object.__setattr__(self, "images", tensor_of(self.images, "images"))
        if not isinstance(self.images, Tensor):
            raise ValueError(
                "images must be a torch.Tensor or a numpy array, not "
                f"{type(self.images).__name__}; stack a list of images by torch.stack or "
                "numpy.stack"
            )
        points = self.images.dim() == 3 and self.images.shape[-1] == 2
        if self.images.dim() not in (2, 4) and not points:
            raise ValueError(
                "images must be (N, C, H, W), or (N, P, 2) for points of the plane, or (N, F) for "
                f"rows of numbers, not {tuple(self.images.shape)}"
            )
        if self.labels is not None:
            object.__setattr__(self, "labels", labels_for(self.images, self.labels))

    def __len__(self) -> int:
        return len(self.images)

    @overload
    def __getitem__(self, index: int) -> tuple[Tensor, int] | Tensor: ...

    @overload
    def __getitem__(self, index: slice | Tensor) -> "Split": ...

    def __getitem__(self, index: int | slice | Tensor) -> "Split | tuple[Tensor, int] | Tensor":
        if (number := integer_of(index)) is not None:
            image = self.images[number]
            return image if self.labels is None else (image, int(self.labels[number]))
        if isinstance(index, slice):
            bounds = (index.start, index.stop, index.step)[: 3 if index.step else 2]
            selection = ":".join("" if bound is None else str(bound) for bound in bounds)
        elif isinstance(index, Tensor) and index.dim() == 1:
            index = index.to(self.images.device)
            selection = f"{int(index.sum()) if index.dtype == torch.bool else len(index)} chosen"
        else:
            raise TypeError(
                "a split is indexed by a number, a slice or a tensor of shape (n,), such as "
                f"split[3] or split[:100], not by {index!r}"
            )
        labels = None if self.labels is None else self.labels[index]
        objects = None if self.objects is None else self.objects[index]
        return Split(self.images[index], labels, f"{self.name}[{selection}]", objects)

    def binarize(self, seed: int = 0) -> "Split":
        """Return the split with each pixel drawn once from Bernoulli(pixel), by a seed."""
        binary = Binarize()(self.images, generator=seeded_generator(seed))
        return replace(self, images=binary, name=f"{self.name} binarized({seed})")

    def with_channels(self, channels: int) -> "Split":
        """Return the split with images of so many channels; gray images get equal channels.

        Images in color stay as they are, because there are several ways to make them gray.
        """
        if self.images.dim() != 4 or self.images.shape[1] != 1 or channels == 1:
            return self
        return replace(self, images=self.images.repeat(1, channels, 1, 1))

    def to(self, device: torch.device | str) -> "Split":
        """Return the split on another device."""
        annotations = (self.labels, self.objects)
        labels, objects = (None if item is None else item.to(device) for item in annotations)
        return Split(self.images.to(device), labels, self.name, objects)

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.images.shape[1:]))
        return f"Split({self.name!r}, {len(self):,} images of {shape})"


def _pairs(data_classes: Sequence[str], model_classes: Sequence[str]) -> str:
    """Describe which classes of a data set stand for which classes of a model: the first few."""
    pairs = [f"{a} for {b}" for a, b in zip(data_classes[:3], model_classes, strict=False)]
    return ", ".join([*pairs, "..."] if len(data_classes) > len(pairs) else pairs)


def labels_of(split: Split) -> Tensor:
    """Return the labels (N,) of a split; raise ValueError if it has none."""
    if not isinstance(split, Split):
        raise ValueError(
            f"split must be a Split, not a {type(split).__name__}; give Split(images, labels)"
        )
    if split.labels is None:
        raise ValueError(
            f"{split.name} has no labels, which a classifier needs; put the pictures of each class "
            "into a folder of its own, PATH/CLASS/PICTURE, or give Split(images, labels)"
        )
    return split.labels


def labels_for(images: Sized, labels: Any) -> Tensor:
    """Return labels as int64 (N,); raise ValueError unless there is one integer per image.

    Args:
        labels: a tensor, a numpy array or a list.
    """
    labels = label_tensor(labels)
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise ValueError(
            f"labels must be integers, the numbers of classes, not {labels.dtype}; convert class "
            "numbers by labels.long()"
        )
    if labels.shape != (len(images),):
        raise ValueError(
            f"labels must be ({len(images)},), one per image, not {tuple(labels.shape)}"
        )
    return labels.long()


def integer_of(index: object) -> int | None:
    """Return an integer of Python, numpy or torch as an int; None for anything else."""
    if isinstance(index, bool) or (isinstance(index, Tensor) and index.dtype == torch.bool):
        return None
    if isinstance(index, Tensor) and index.dim():
        return None
    try:
        return operator.index(index)  # type: ignore[arg-type]  # refused below
    except TypeError:
        return None


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set with three disjoint splits.

    Attributes:
        name: the name that `load_dataset` was given.
        train, validation, test: the splits; validation may be empty.
        class_names: the name of each label; by default the label's number. Empty without labels.
        settings: settings of the entry `scenes` that fit the images, if there are any.
    """

    name: str
    train: Split
    validation: Split
    test: Split
    class_names: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not all(isinstance(split, Split) for split in self._splits):
            raise ValueError("train, validation and test must each be a Split(images, labels)")
        shapes = {split.images.shape[1:] for split in self._splits}
        if len(shapes) > 1:
            raise ValueError(f"the splits of {self.name!r} hold images of several shapes: {shapes}")
        labelled = [split.labels for split in self._splits if split.labels is not None]
        if not self.class_names and labelled:
            labels = torch.cat(labelled)
            count = int(labels.max()) + 1 if len(labels) else 0
            object.__setattr__(self, "class_names", tuple(map(str, range(count))))

    @property
    def _splits(self) -> tuple[Split, Split, Split]:
        return self.train, self.validation, self.test

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """The shape (channels, height, width) of an image, in pixels.

        Raises:
            ValueError: the data set holds points, not images.
        """
        if self.train.images.dim() != 4:
            raise ValueError(
                f"the data set {self.name!r} holds scenes of points, which have no pixels; use it "
                "with a model of points, such as constellations"
            )
        channels, height, width = self.train.images.shape[1:]
        return channels, height, width

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    def binarize(self, seed: int = 0) -> "Dataset":
        """Return the data set with every split binarized, each with noise derived from `seed`."""
        return self._with(
            replace(split.binarize(3 * seed + k), name=f"{split.name} binarized({seed})")
            for k, split in enumerate(self._splits)
        )

    def transform_images(self, transform: Callable[[Tensor], Tensor]) -> "Dataset":
        """Return the data set transformed, for example by `Standardize.of(data.train.images)`."""
        return self._with(
            replace(s, images=transform(s.images), name=f"{s.name} transformed")
            for s in self._splits
        )

    def match_classes(self, names: Sequence[str]) -> "Dataset":
        """Return the data set with its classes numbered as in a model, by name.

        Where classes of either are plain numbers, the labels stay as they are, with a warning if
        the others have names.

        Args:
            names: the classes that the model was trained on.

        Raises:
            ValueError: a class of the data set is not among them.
        """
        data_classes, model_classes = self.class_names, tuple(names)
        if strange := [name for name in data_classes if name not in model_classes]:
            numbered = [
                classes == tuple(map(str, range(len(classes))))
                for classes in (data_classes, model_classes)
            ]
            if not all(numbered) and any(numbered):
                warnings.warn(
                    f"the classes of {self.name!r} and those of the model are matched by number, "
                    f"because one has no names: {_pairs(data_classes, model_classes)}; name both "
                    "alike to match them by name",
                    stacklevel=2,
                )
            if any(numbered):
                return self
            raise ValueError(
                f"{self.name!r} has classes that the model was not trained on: "
                f"{', '.join(strange)}; it was trained on {', '.join(model_classes)}"
            )
        places = torch.tensor([model_classes.index(name) for name in data_classes])
        splits = (
            replace(s, labels=None if s.labels is None else places.to(s.labels.device)[s.labels])
            for s in self._splits
        )
        return replace(self._with(splits), class_names=model_classes)

    def with_channels(self, channels: int) -> "Dataset":
        """Return the data set with images of so many channels; see `Split.with_channels`."""
        return self._with(split.with_channels(channels) for split in self._splits)

    def to(self, device: torch.device | str) -> "Dataset":
        """Return the data set on another device."""
        return self._with(split.to(device) for split in self._splits)

    def _with(self, splits: Iterable[Split]) -> "Dataset":
        train, validation, test = splits
        return replace(self, train=train, validation=validation, test=test)
