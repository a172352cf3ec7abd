"""Inputs of `fit`: all kinds of data, optimizers and objectives agree, and others are refused."""

import functools
import itertools
from types import SimpleNamespace

import numpy as np
import pyro
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset
from toys import (
    QUIET,
    Conjugate,
    Items,
    LinearGuide,
    assert_same,
    conjugate_images,
    dataset,
    fit,
    pair,
    states,
)

from capsule_zoo.data import Split
from capsule_zoo.inference import SleepPhase, loss_per_image
from capsule_zoo.inference.training import progress
from capsule_zoo.registry import create, small_settings

SHORT = QUIET | {"steps": 9}
UNBATCHED = {name: value for name, value in SHORT.items() if name != "batch_size"}


@pytest.fixture
def images():
    return conjugate_images(40)


@pytest.fixture
def labels():
    return torch.arange(40) % 3


def losses(data, **settings):
    model, guide = pair()
    return list(fit(model, guide, data, **SHORT | settings).history["loss"])


@pytest.mark.parametrize("batch_size", [16, 64])
def test_kinds_of_data_train_alike(images, labels, batch_size):
    expected = losses(images, batch_size=batch_size)
    for data in (
        images.numpy(),
        np.asfortranarray(images.numpy()),
        Split(images, labels),
        TensorDataset(images),
        TensorDataset(images, labels.float()),  # labels that are not asked for are not looked at
        Items(images),
        Items(images.numpy(), labels),
        Subset(TensorDataset(images, labels), range(40)),
    ):
        assert losses(data, batch_size=batch_size) == expected
    assert len(set(expected)) == 9


def test_a_loader_decides_on_batches_and_their_order(images, labels):
    loader = DataLoader(Split(images, labels), batch_size=40)
    model, guide = pair()
    streamed = fit(model, guide, loader, **UNBATCHED)
    assert list(streamed.history["loss"]) == losses(images, batch_size=40)
    assert list(streamed.history["epoch"]) == list(range(9))


def test_a_run_on_a_loader_resumes_to_the_same_numbers(tmp_path, images, labels):
    path = tmp_path / "run.safetensors"

    def loader():
        return DataLoader(Split(images, labels), 16, shuffle=True)

    options = UNBATCHED | {"validation": images[:7], "every": 2}
    whole, parts = pair(), pair()
    torch.manual_seed(1)
    expected = fit(*whole, loader(), **options)
    torch.manual_seed(2)
    fit(*parts, loader(), **options | {"steps": 4}, checkpoint=path)
    resumed = fit(*parts, loader(), **options, resume=path)
    assert_same(states(*whole), states(*parts))
    for column in ("loss", "held_out", "epoch"):
        left, right = resumed.history[column], expected.history[column]
        np.testing.assert_array_equal(left, right)
    assert expected.history["held_out"].notna().sum() == 5


def test_labels_of_every_kind_of_data_are_handed_on(images, labels):
    calls = []

    class Labeled(Conjugate):
        supervised = True

        def forward(self, images=None, labels=None, batch_size=1):
            calls.append(labels)
            return super().forward(images, labels, batch_size)

    model = Labeled().double()
    guide = LinearGuide(model).double()
    for data in (
        Split(images, labels),
        TensorDataset(images, labels),
        Items(images, labels),
        Items(images.numpy(), labels.tolist()),
        DataLoader(Split(images, labels), 40),
    ):
        size = {} if isinstance(data, DataLoader) else {"batch_size": 40}
        fit(model, guide, data, steps=1, progress=False, labels=True, **size)
        assert torch.equal(calls[-1], labels)


def test_held_out_values_do_not_depend_on_the_kind_of_data(images):
    data = dataset()
    expected = None
    for validation in (
        data.validation,
        data.validation.images,
        data.validation.images.numpy(),
        Items(data.validation.images),
        data,
    ):
        model, guide = pair()
        run = fit(model, guide, images, validation=validation, every=3, **SHORT)
        held_out = list(run.history["held_out"].dropna())
        expected = expected or held_out
        assert held_out == expected and len(held_out) == 3


def test_pyro_optimizers_take_the_steps_of_torch_optimizers(images):
    for torch_class, pyro_class, settings in (
        (torch.optim.Adam, pyro.optim.Adam, {"betas": (0.5, 0.9)}),
        (torch.optim.SGD, pyro.optim.SGD, {"momentum": 0.5}),
    ):
        expected = losses(images, optimizer=functools.partial(torch_class, **settings), lr=0.03)
        own_rate = pyro_class({"lr": 0.03, **settings})
        assert losses(images, optimizer=own_rate, lr=1.0) == expected
        assert losses(images, optimizer=pyro_class(settings), lr=0.03) == expected
    assert len(losses(images, optimizer=pyro.optim.ClippedAdam({"lr": 0.03}))) == 9


def test_transforms_of_images_alone(images):
    class Noise(nn.Module):
        def forward(self, images):
            return (images + torch.rand_like(images)) / 2

    assert losses(images, transform=lambda images: images) == losses(images)
    noisy = losses(images, transform=Noise())
    assert noisy == losses(images, transform=Noise()) != losses(images)


def test_minutes_of_the_processor_do_not_pass_while_the_process_waits(images, monkeypatch):
    """Steps that wait end a run of one second of wall time, and none of processor time."""
    waited = itertools.count()
    clocks = SimpleNamespace(monotonic=lambda: 0.2 * next(waited), process_time=lambda: 0.0)
    monkeypatch.setattr(progress, "time", clocks)
    limits = QUIET | {"minutes": 1 / 60, "steps": 12, "every": 100}
    steps = {c: fit(*pair(), images, clock=c, **limits).steps for c in ("wall", "processor")}
    assert 0 < steps["wall"] < 9 and steps["processor"] == 12


@pytest.mark.parametrize(
    ("name", "guide"), [("part-whole", "delta"), ("constellations", "amortized")]
)
def test_what_was_kept_in_inference_mode_serves_training(name, guide):
    sizes = {"image_shape": (1, 13, 11)} if name == "part-whole" else {"clutter": 3}
    entry = create(name, **{**small_settings(name), **sizes}).use_guide(guide)
    images = entry.model.space.example(2, torch.float32, torch.Generator().manual_seed(0))
    objective = SleepPhase() if guide == "amortized" else entry.objective
    with torch.inference_mode():
        loss_per_image(objective, entry.model, entry.guide, images)
    assert fit(entry.model, entry.guide, images, objective=objective, steps=1).steps == 1
