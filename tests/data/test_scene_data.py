"""Scenes of several objects: what is known of them is true of their pixels."""

import itertools
from typing import Any

import pytest
import torch

from capsule_zoo.data import load_dataset, scenes
from capsule_zoo.data.scenes import (
    INK,
    gray_scenes,
    sprite_scenes,
    tetromino_bank,
    tetromino_scenes,
)

DRAWS = {
    "gray": lambda **o: gray_scenes(
        torch.rand(20, 1, 8, 8), torch.arange(20) % 4, 40, canvas=24, **o
    ),
    "sprites": lambda **o: sprite_scenes(40, **o),
    "tetrominoes": lambda **o: tetromino_scenes(40, **o),
}


@pytest.mark.parametrize("kind", DRAWS)
def test_masks_boxes_and_counts_agree(kind):
    torch.manual_seed(0)
    images, objects = DRAWS[kind](seed=3)
    assert images.min() >= 0 and images.max() <= 1 and len(images) == len(objects) == 40
    masks = objects.masks
    assert (masks.sum(1) <= 1).all()  # a pixel shows one object
    assert ((masks.sum((-2, -1)) > 0) <= (objects.classes >= 0)).all()
    for scene, slot in masks.flatten(2).any(-1).nonzero().tolist():
        rows, columns = masks[scene, slot].nonzero(as_tuple=True)
        edges = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
        assert objects.boxes[scene, slot].tolist() == [int(edge) for edge in edges]
    assert torch.equal(objects[3:5].counts, objects.counts[3:5])


def test_the_same_seed_gives_the_same_scenes():
    torch.manual_seed(0)
    first, again, other = (sprite_scenes(5, seed=seed)[0] for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_gray_scenes_keep_to_their_options():
    digits, labels = (torch.rand(20, 1, 8, 8) > 0.4).float(), torch.arange(20) % 4
    images, objects = gray_scenes(digits, labels, 200, canvas=30, least=1, most=3)
    assert set(objects.counts.tolist()) == {1, 2, 3}
    _, overlapping = gray_scenes(digits, labels, 200, canvas=16, most=3, overlap=True)
    assert overlapping.counts.max() == 3
    assert (images > INK).any((-3, -2, -1)).float().mean() > 0.9


def test_the_masks_of_gray_scenes_hold_what_is_brighter_than_the_ink():
    """Scenes are the same at every ink; a mask holds the pixels of its digit above it."""
    digits, labels = torch.rand(20, 1, 8, 8), torch.arange(20) % 4
    read = lambda **o: gray_scenes(digits, labels, 60, canvas=30, most=1, seed=3, **o)  # noqa: E731
    whole, default = read()
    assert torch.equal(default.numbers, read(ink=INK)[1].numbers)
    for ink in (0.0, 0.1, 0.7):
        images, objects = read(ink=ink)
        assert torch.equal(images, whole) and torch.equal(objects.classes, default.classes)
        assert torch.equal(objects.numbers > 0, images[:, 0] > ink)


def test_there_are_19_tetrominoes_and_they_do_not_overlap():
    bank = tetromino_bank()
    assert bank.shape == (19, 4, 4) and (bank.sum((1, 2)) == 4).all()
    assert len(bank.flatten(1).unique(dim=0)) == 19
    images, objects = tetromino_scenes(50)
    assert (objects.masks.sum((-2, -1)) == 4 * 25).all()
    assert images.shape == (50, 3, 35, 35)


def test_the_data_sets_have_names_and_options():
    data = load_dataset("multi-sprites:train=40,test=6,most=3", validation=10)
    assert len(data.train) == len(data.train.objects) == 30 and len(data.validation.objects) == 10
    assert torch.equal(data.train.labels, data.train.objects.counts)
    assert data.test[:3].objects.classes.shape == (3, 3)
    assert torch.equal(data.binarize().test.objects.classes, data.test.objects.classes)
    assert data.to("meta").test.objects.boxes.device.type == "meta"


def test_scenes_of_digits_show_other_digits_in_every_split(monkeypatch):
    pasted, draw = [], scenes.gray_scenes

    def record(images: torch.Tensor, *arguments: Any, **options: Any) -> tuple:
        pasted.append({image.numpy().tobytes() for image in images})
        return draw(images, *arguments, **options)

    monkeypatch.setattr(scenes, "gray_scenes", record)
    data, digits = load_dataset("multi-digits:train=200,test=60"), load_dataset("digits")
    splits = (digits.train, digits.test, digits.validation)
    assert pasted == [{image.numpy().tobytes() for image in s.images} for s in splits]
    assert not any(first & second for first, second in itertools.combinations(pasted, 2))
    for split, number in ((data.train, 200), (data.validation, 20), (data.test, 60)):
        assert split.images.shape == (number, 1, 50, 50) and len(split.objects) == number
        assert torch.equal(split.labels, split.objects.counts)
    assert set(data.train.labels.tolist()) == {0, 1, 2, 3} and data.num_classes == 4
    inked = data.train.images.flatten(1).any(1)
    assert torch.equal(inked, data.train.labels > 0)


def test_a_number_of_validation_scenes_takes_some_whose_digits_training_does_not_show():
    name = "multi-digits:train=60,test=4"
    whole, subset = load_dataset(name), load_dataset(name, validation=2, size=25)
    assert len(subset.train) == 60 and subset.validation.images.shape == (2, 1, 25, 25)
    assert torch.equal(subset.validation.objects.boxes, whole.validation.objects.boxes[:2] / 2)
    assert len(load_dataset(name, validation=0).validation) == 0


def test_a_size_resizes_scenes_and_what_is_known_of_them():
    name = "tetrominoes:train=20,test=4"
    small, large = (load_dataset(name, size=size).test for size in (None, "70x35"))
    assert large.images.shape == (4, 3, 70, 35)
    assert torch.equal(large.objects.masks[:, :, ::2], small.objects.masks)
    assert torch.equal(large.objects.boxes, small.objects.boxes * torch.tensor([1, 2, 1, 2]))


def test_colored_objects_lie_on_grounds_and_keep_their_covers():
    digits, labels = torch.ones(2, 1, 8, 8), torch.zeros(2, dtype=torch.long)
    grounds = torch.tensor([0.25, 0.75])[:, None, None, None].expand(2, 3, 5, 5)
    settings = dict(canvas=30, least=1, most=2, seed=3)
    gray, objects = gray_scenes(digits, labels, 6, **settings)
    images, same = gray_scenes(digits, labels, 6, grounds=grounds, **settings)
    assert (objects.numbers == same.numbers).all() and images.shape == (6, 3, 30, 30)
    bare = (gray == 0).expand_as(images)
    assert set(images[bare].unique().tolist()) <= {0.25, 0.75}
    for image, masks in zip(images, same.masks, strict=True):
        inside = [image[:, mask].std(-1).max() for mask in masks if mask.any()]
        assert max(inside) < 0.2  # one color, but for soft edges
