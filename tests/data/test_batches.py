"""Distributions of the batches: every image once, in an order that (seed, epoch) alone decides."""

import numpy as np
import pytest
import torch

from capsule_zoo.data import Batches, Split
from capsule_zoo.data.batches import takes_generator
from capsule_zoo.data.seeds import seeded_generator
from capsule_zoo.data.transforms import Rotate


@pytest.fixture
def split():
    labels = torch.arange(50)
    return Split(labels.view(50, 1, 1, 1).expand(50, 1, 4, 4) / 50, labels, "fifty")


def labels_of(batches, epoch, start=0):
    return [labels.tolist() for _, labels in batches.epoch(epoch, start)]


def test_an_epoch_shows_every_image_once_beside_its_label(split):
    batches = Batches(split, 8, seed=1)
    pairs = list(batches.epoch(0))
    assert len(pairs) == len(batches) == 7
    assert [len(images) for images, _ in pairs] == [8] * 6 + [2]
    labels = torch.cat([labels for _, labels in pairs])
    assert sorted(labels.tolist()) == list(range(50))
    torch.testing.assert_close(torch.cat([images for images, _ in pairs])[:, 0, 0, 0], labels / 50)


def test_order_is_a_function_of_seed_and_epoch(split):
    torch.manual_seed(0)
    first = labels_of(Batches(split, 8, seed=1), 3)
    torch.manual_seed(1)
    assert first == labels_of(Batches(split, 8, seed=1), 3)
    assert first != labels_of(Batches(split, 8, seed=1), 4)
    assert first != labels_of(Batches(split, 8, seed=3), 1)


@pytest.mark.parametrize("transform", [None, Rotate(90.0)])
def test_a_resumed_epoch_goes_on_with_the_same_batches(split, transform):
    corner = torch.zeros(50, 1, 4, 4)
    corner[:, :, 0] = split.images[:, :, 0]
    batches = Batches(Split(corner, split.labels), 8, seed=2, transform=transform)
    whole = list(batches.epoch(1))
    rest = list(batches.epoch(1, start=4))
    assert len(rest) == 3
    for (images, labels), (images_again, labels_again) in zip(whole[4:], rest, strict=True):
        assert torch.equal(images, images_again) and torch.equal(labels, labels_again)


def test_the_transform_is_drawn_anew_in_every_batch_and_epoch():
    one = torch.zeros(1, 1, 9, 9)
    one[0, 0, 1] = 1
    batches = Batches(Split(one.expand(6, 1, 9, 9), torch.zeros(6).long()), 2, 0, Rotate(180.0))
    pictures = torch.cat([images for epoch in range(2) for images, _ in batches.epoch(epoch)])
    assert len(pictures.flatten(1).unique(dim=0)) == 12


class Jitter(torch.nn.Module):
    """A transform in torchvision's style: a module of images alone, with global draws."""

    def forward(self, images):
        return images + torch.rand_like(images)


@pytest.mark.parametrize(
    "transform",
    [Jitter(), Jitter().forward, lambda images: images + float(np.random.random())],
    ids=["module", "method", "numpy"],
)
def test_a_transform_without_generator_is_a_function_of_seed_epoch_and_batch(split, transform):
    batches = Batches(split, 8, seed=2, transform=transform)
    whole = list(batches.epoch(1))
    torch.manual_seed(5)
    for (images, _), (images_again, _) in zip(whole[4:], batches.epoch(1, start=4), strict=True):
        assert torch.equal(images, images_again)
    plain = list(Batches(split, 8, seed=2).epoch(1))
    noise = [images - other for (images, _), (other, _) in zip(whole, plain, strict=True)]
    assert not torch.equal(noise[0], noise[1])


def test_which_transforms_take_a_generator():
    assert takes_generator(Rotate(10.0)) and takes_generator(lambda images, generator=None: images)
    assert takes_generator(lambda images, **keywords: images)
    assert not takes_generator(Jitter()) and not takes_generator(lambda images: images)
    assert not takes_generator(torch.fliplr)


def test_seeds_of_several_numbers_do_not_collide():
    draws = {
        torch.rand(1, generator=seeded_generator(*key)).item()
        for key in [(1, 2), (2, 1), (3,), (1, 2, 0), (12,), (0, 12)]
    }
    assert len(draws) == 6
