"""Batches read from torch data sets and loaders: same order, resumable, checked."""

import random
from functools import partial

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from capsule_zoo.data import Batches, Split
from capsule_zoo.data.seeds import RandomStream, seeded_generator
from capsule_zoo.data.streams import ItemBatches, LoaderBatches
from capsule_zoo.models.common.spaces import AnyImages

ITEMS = partial(ItemBatches, check=AnyImages().check, labels=True)
LOADER = partial(LoaderBatches, check=AnyImages().check, labels=True)


class Noisy(Dataset):
    """A data set of thirty images with noise from one of the global streams."""

    draws = {
        "torch": lambda: torch.rand(1, 2, 2),
        "numpy": lambda: torch.from_numpy(np.random.random((1, 2, 2))).float(),
        "random": lambda: torch.full((1, 2, 2), random.random()),
        "none": lambda: torch.zeros(1, 2, 2),
    }

    def __init__(self, noise="none"):
        self.images = torch.rand(30, 1, 2, 2, generator=seeded_generator(0))
        self.draw = self.draws[noise]

    def __len__(self):
        return 30

    def __getitem__(self, number):
        if not 0 <= number < 30:
            raise IndexError(number)
        return (self.images[number] + self.draw()) / 2, number


def equal(left, right):
    left, right = list(left), list(right)
    assert len(left) == len(right) > 0
    for (images, labels), (other_images, other_labels) in zip(left, right, strict=True):
        assert torch.equal(images, other_images) and torch.equal(labels, other_labels)


def test_items_come_in_the_order_of_a_split_in_memory():
    dataset = Noisy()
    split = Split(dataset.images / 2, torch.arange(30))
    for shuffle in (True, False):
        for epoch in (0, 1):
            of_items = ITEMS(dataset, 8, 3, None, shuffle).epoch(epoch)
            equal(of_items, Batches(split, 8, 3, None, shuffle).epoch(epoch))


def loaders(noise):
    yield partial(DataLoader, Noisy(noise), 8, shuffle=True)
    yield partial(DataLoader, Noisy(noise), 8, shuffle=True, generator=torch.Generator())


@pytest.mark.parametrize("noise", ["torch", "numpy", "random"])
def test_a_resumed_epoch_goes_on_with_the_same_batches(noise):
    sources = [lambda: ITEMS(Noisy(noise), 8, 3)]
    sources += [lambda make=make: LOADER(make(), 3) for make in loaders(noise)]
    for make in sources:
        torch.manual_seed(0)
        source = make()
        list(source.epoch(0))
        whole = list(source.epoch(1))
        torch.manual_seed(1)
        np.random.seed(1)
        random.seed(1)
        equal(whole[2:], make().epoch(1, start=2))
        assert not torch.equal(whole[0][0], next(make().epoch(2))[0])


def test_a_loader_with_workers_can_be_resumed():
    def make():
        return LOADER(DataLoader(Noisy("torch"), 8, shuffle=True, num_workers=1), 3)

    equal(list(make().epoch(1))[1:], make().epoch(1, start=1))


def test_a_loader_keeps_its_batches_and_its_order():
    batches = list(LOADER(DataLoader(Noisy(), 8), 3).epoch(4))
    assert [len(labels) for _, labels in batches] == [8, 8, 8, 6]
    assert torch.equal(torch.cat([labels for _, labels in batches]), torch.arange(30))
    loader = DataLoader(Noisy(), 8, drop_last=True)
    assert [len(labels) for _, labels in LOADER(loader).epoch(0)] == [8, 8, 8]


def test_reading_leaves_the_global_random_state_alone():
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    list(ITEMS(Noisy("torch"), 8).epoch(0))
    list(LOADER(DataLoader(Noisy("numpy"), 8, shuffle=True)).epoch(0))
    split = Split(Noisy().images, torch.arange(30))
    list(Batches(split, 8, transform=lambda images: images * torch.rand(1)).epoch(0))
    after = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:]


def test_a_random_stream_goes_on_where_it_stood():
    stream, other = RandomStream(1, 2), RandomStream(1, 2)
    with stream.active():
        both = torch.rand(4), np.random.random(2), [random.random() for _ in range(2)]
    for half in (slice(0, 2), slice(2, 4)):
        with other.active():
            assert torch.equal(torch.rand(2), both[0][half])
    with RandomStream(2, 1).active():
        assert not torch.equal(torch.rand(4), both[0])
    before = torch.get_rng_state()
    with pytest.raises(OSError, match="cannot read"), stream.active():
        raise OSError("cannot read")
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("source", ["items", "loader"])
def test_labels_are_none_unless_they_are_wanted_and_may_then_be_anything(source):
    class Described(Noisy):
        def __getitem__(self, number):
            return super().__getitem__(number)[0], "a word"

    dataset = Described()
    if source == "items":
        make = partial(ItemBatches, dataset, 8, check=AnyImages().check)
    else:
        make = partial(LoaderBatches, DataLoader(dataset, 8), check=AnyImages().check)
    _, labels = next(make(labels=False).epoch(0))
    assert labels is None
