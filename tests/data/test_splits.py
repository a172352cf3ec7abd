"""Distributions of splits and data sets: indexing, binarization, shapes."""

import dataclasses

import numpy as np
import pytest
import torch

from capsule_zoo.data import Binarize, Dataset, Split
from capsule_zoo.data.seeds import seeded_generator


@pytest.fixture
def split():
    images = torch.rand(60, 1, 8, 8, generator=seeded_generator(0))
    return Split(images, torch.arange(60) % 3, "some/test")


@pytest.mark.parametrize(
    ("index", "name"),
    [
        (slice(10), "some/test[:10]"),
        (slice(5, 50, 3), "some/test[5:50:3]"),
        (torch.tensor([7, 3, 3]), "some/test[3 chosen]"),
        (torch.arange(60) < 4, "some/test[4 chosen]"),
    ],
)
def test_indexing_takes_images_and_labels_together(split, index, name):
    part = split[index]
    assert torch.equal(part.images, split.images[index])
    assert torch.equal(part.labels, split.labels[index])
    assert part.name == name and len(part) == len(part.images)


@pytest.mark.parametrize("number", [3, -1, np.int64(3), torch.tensor(3)])
def test_a_number_picks_an_image_and_its_label(split, number):
    image, label = split[number]
    assert torch.equal(image, split.images[number]) and image.shape == (1, 8, 8)
    assert label == split.labels[number].item() and type(label) is int


def test_a_split_is_a_torch_dataset(split):
    assert isinstance(split, torch.utils.data.Dataset)
    labels = [label for _, label in split]
    assert labels == split.labels.tolist()
    images, labels = next(iter(torch.utils.data.DataLoader(split, batch_size=60)))
    assert torch.equal(images, split.images) and torch.equal(labels, split.labels)
    with pytest.raises(dataclasses.FrozenInstanceError):
        split.name = "other"


def test_binarized_pixels_are_one_draw_that_the_seed_decides(split):
    gray = split.images.clone()
    binary = split.binarize(3)
    assert torch.equal(binary.images, Binarize()(gray, generator=seeded_generator(3)))
    assert not torch.equal(binary.images, split.binarize(4).images)
    assert torch.equal(split.images, gray)


def test_splits_of_a_data_set_are_binarized_independently(split):
    data = Dataset("thrice", split, split, split).binarize(1)
    assert not torch.equal(data.train.images, data.test.images)
    assert not torch.equal(data.validation.images, data.test.images)
    assert data.train.name == "some/test binarized(1)"


def test_a_data_set_knows_its_shape_and_classes(split):
    data = Dataset("toy", split, split[:0], split[:9])
    assert data.image_shape == (1, 8, 8)
    assert data.num_classes == 3 and data.class_names == ("0", "1", "2")
    assert Dataset("toy", split, split, split, ("a", "b", "c", "d")).num_classes == 4


def test_labels_number_the_classes_of_a_model_by_name(split):
    data = Dataset("toy", split, split[:0], split[:9], ("b", "c", "d"))
    dataset = data.match_classes(["a", "d", "c", "b"])
    assert dataset.class_names == ("a", "d", "c", "b")
    assert torch.equal(dataset.test.labels, torch.tensor([3, 2, 1])[data.test.labels])
    for dtype in (torch.int32, torch.uint8):
        splits = (Split(s.images, s.labels.to(dtype)) for s in (split, split[:0], split[:9]))
        numbered = Dataset("toy", *splits, ("b", "c", "d")).match_classes(["a", "d", "c", "b"])
        assert numbered.test.labels.dtype == torch.int64
        assert torch.equal(numbered.test.labels, dataset.test.labels)
    with pytest.warns(UserWarning, match=r"'toy' and .* by number, .*: b for 0, c for 1, \.\.\.;"):
        assert data.match_classes(["0", "1"]) is data
    numbers = Dataset("toy", split, split[:0], split[:9])
    assert numbers.match_classes(["0", "1"]) is numbers
    unlabelled = Dataset("flat", *[Split(split.images)] * 3)
    assert unlabelled.match_classes(["a", "b"]).test.labels is None
