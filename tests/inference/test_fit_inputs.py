"""Inputs of `fit`: all kinds of data, optimizers and objectives agree, and others are refused."""

import functools
import inspect
import itertools
from types import SimpleNamespace

import numpy as np
import pyro
import pytest
import torch
from pyro.infer import RenyiELBO, Trace_ELBO
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset
from toys import (
    QUIET,
    Conjugate,
    LinearGuide,
    assert_same,
    conjugate_images,
    dataset,
    fit,
    pair,
    states,
)

from capsule_zoo import inference
from capsule_zoo.data import Split
from capsule_zoo.inference import Checks, Inputs, Pace, SleepPhase, loss_per_image
from capsule_zoo.inference.training import progress
from capsule_zoo.inference.training.settings import combined
from capsule_zoo.registry import create, small_settings

SHORT = QUIET | {"steps": 9}
UNBATCHED = {name: value for name, value in SHORT.items() if name != "batch_size"}


class Items(torch.utils.data.Dataset):
    """A data set of single images, with or without labels."""

    def __init__(self, images, labels=None):
        self.images = images
        self.labels = labels

    def __len__(self):
        return len(self.images)

    def __getitem__(self, number):
        image = self.images[number]
        return image if self.labels is None else (image, self.labels[number])


@pytest.fixture
def images():
    return conjugate_images(40)


@pytest.fixture
def labels():
    return torch.arange(40) % 3


def losses(data, **settings):
    model, guide = pair()
    return list(fit(model, guide, data, **SHORT | settings).history["loss"])


# Data


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
    with pytest.raises(ValueError, match="batch_size=16 is given, but a DataLoader makes its own"):
        losses(loader)


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
    seen = []

    class Labeled(Conjugate):
        supervised = True

        def forward(self, images=None, labels=None, batch_size=1):
            seen.append(labels)
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
        assert torch.equal(seen[-1], labels)
    with pytest.raises(ValueError, match=r"labels=True\) is needed: Labeled explains the label"):
        fit(model, guide, Split(images, labels), **SHORT)
    for data in (images, TensorDataset(images), Items(images), DataLoader(images, 40)):
        with pytest.raises(ValueError, match="data has no labels, which are needed here"):
            fit(model, guide, data, steps=1, progress=False, labels=True)


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
    model, guide = pair()
    loader = DataLoader(data.validation, 7)
    run = fit(model, guide, images, validation=loader, every=3, **SHORT)
    assert len(run.history["held_out"].dropna()) == 3


KINDS = "must be a Dataset, a Split, images .*, a list of such batches, .* or a torch DataLoader"


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (None, f"data {KINDS}, not None"),
        ([torch.zeros(1, 2, 2)], f"data {KINDS}, not a list; .* and numpy.stack for a list"),
        ("mnist", rf"data {KINDS}, not a str; see load_dataset\(name\)"),
        (np.zeros((4, 1, 2, 2), np.uint8), "divide bytes by 255"),
        (np.zeros((4, 2, 2, 1)), r"move the channels by images\.movedim\(-1, 1\)"),
        (np.zeros((4, 1, 2, 2), bool), r"call images\.float\(\)"),
        (np.zeros((4, 2, 2)), r"add the missing dimensions with images\[:, None\]"),
        (np.array([None, 1]), "data must hold floating point pixels, not object"),
        (np.full((4, 1, 2, 2), 255.0), r"must lie in \[0, 1\].*; rescale them, or clamp rounding"),
        (TensorDataset(torch.zeros(4, 1, 2, 2, dtype=torch.uint8)), "divide bytes by 255"),
        (Items(np.zeros((4, 1, 2, 2), np.uint8)), "divide bytes by 255"),
    ],
)
def test_data_that_are_refused(data, match):
    with pytest.raises(ValueError, match=match):
        losses(data)
    if data is not None:
        with pytest.raises(ValueError, match=match.replace("data ", "validation ")):
            losses(torch.zeros(4, 1, 2, 2), validation=data)


# Optimizers and objectives


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


EXISTING = torch.optim.Adam([torch.zeros(1, requires_grad=True)])
DECAYING = {"optimizer": torch.optim.SGD, "optim_args": {"lr": 0.1}, "gamma": 0.1}


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"optimizer": "adam"}, r"a class such as torch\.optim\.Adam, .* not 'adam'"),
        ({"optimizer": EXISTING}, r"give the class torch\.optim\.Adam"),
        ({"optimizer": pyro.optim.Adam(lambda name: {"lr": 1.0})}, "a function of the parameter"),
        ({"optimizer": pyro.optim.Adam({}, {"clip_norm": 1.0})}, "use pace=Pace.clip="),
        ({"optimizer": pyro.optim.ExponentialLR(DECAYING)}, "a Pyro scheduler; give SGD alone"),
        ({"optimizer": pyro.optim.ClippedAdam({"lrd": 0.9})}, "optimizer has lrd"),
        ({"optimizer": torch.optim.LBFGS}, "LBFGS computes the loss several times"),
        ({"optimizer": lambda groups: groups}, r"must return a torch\.optim\.Optimizer, not a li"),
        ({"objective": Trace_ELBO}, r"write Trace_ELBO\(\) with brackets"),
        ({"objective": RenyiELBO()}, r"ImportanceWeightedELBO\(num_particles=2, alpha=0\)"),
        (
            {"objective": RenyiELBO(0.5, num_particles=7)},
            r"ImportanceWeightedELBO\(num_particles=7, alpha=0\.5\)$",
        ),
        ({"objective": RenyiELBO(-1.0)}, "alpha=-1 gives no lower bound, and is not offered"),
        ({"objective": "elbo"}, "objective str offers no differentiable_loss"),
        ({"steps": 1.5}, "steps must be a whole number, not 1.5"),
        ({"steps": True}, "steps must be a whole number, not True"),
        ({"epochs": 0.5}, "epochs must be a whole number, not 0.5; .* give steps"),
        ({"batch_size": 8.0}, "batch_size must be a whole number"),
        ({"seed": "one"}, "seed must be a whole number, not 'one'"),
        ({"patience": 1.5}, "patience must be a whole number"),
        ({"every": 1.5}, "every must be a whole number"),
        ({"minutes": "ten"}, "minutes must be positive and finite, not 'ten'"),
        ({"minutes": float("inf")}, "minutes must be positive and finite, not inf"),
        ({"device": "gpu"}, "device must be one of cpu.*, not 'gpu'"),
        ({"device": "cuda:99"}, "device must be one of cpu.*, not 'cuda:99'"),
        ({"device": "meta"}, "device must be one of cpu.*, not 'meta'"),
        ({"device": None}, "device must be one of cpu"),
        ({"callbacks": print}, "callbacks must be a list of functions"),
        ({"callbacks": ["log"]}, "callbacks must be a list of functions"),
        ({"checkpoint": True}, "checkpoint and resume are paths of a checkpoint"),
        ({"resume": True}, "checkpoint and resume are paths of a checkpoint"),
        ({"labels": torch.zeros(2)}, r"pass TensorDataset\(images, labels\) as data"),
    ],
)
def test_arguments_that_are_refused(images, arguments, match):
    model, guide = pair()
    before = states(model, guide)
    with pytest.raises(ValueError, match=match) as caught:
        fit(model, guide, images, **SHORT | arguments)
    assert "\n" not in str(caught.value)
    assert_same(before, states(model, guide))


def test_numpy_integers_and_fractions_of_minutes_are_taken(tmp_path, images):
    path = tmp_path / "run.safetensors"
    model, guide = pair()
    settings = {"seed": np.int64(3), "every": np.int32(2), "batch_size": np.int64(16)}
    options = {"minutes": np.float64(5.5), "checkpoint": path, **settings}
    run = fit(model, guide, images, **SHORT | options | {"steps": np.int64(3)})
    assert run.steps == 3 and list(run.history["loss"]) == losses(images, seed=3)[:3]


# Transforms


def test_transforms_of_images_alone(images):
    class Noise(nn.Module):
        def forward(self, images):
            return (images + torch.rand_like(images)) / 2

    assert losses(images, transform=lambda images: images) == losses(images)
    noisy = losses(images, transform=Noise())
    assert noisy == losses(images, transform=Noise()) != losses(images)


def test_an_argument_of_a_group_names_its_new_place(images):
    places = {
        "schedule": r"fit takes schedule as pace=Pace\(schedule=...\); import Pace from",
        "labels": r"inputs=Inputs\(labels=...\)",
    }
    for name, place in places.items():
        with pytest.raises(ValueError, match=place):
            inference.fit(*pair(), images, steps=1, **{name: 1})
    for name, kind in (("pace", "Pace"), ("inputs", "Inputs"), ("checks", "Checks")):
        with pytest.raises(ValueError, match=f"{name} must be a {kind} of .*, not 'cosine'"):
            inference.fit(*pair(), images, steps=1, **{name: "cosine"})


def test_fit_takes_fifteen_arguments():
    assert len(inspect.signature(inference.fit).parameters) <= 15


def test_later_settings_replace_earlier_ones_field_by_field():
    earlier = {
        "lr": 1.0,
        "pace": Pace("linear", warmup=50, clip=1e4),
        "inputs": Inputs(labels=True),
    }
    later = {"lr": 2.0, "pace": Pace(clip=3.0), "checks": Checks(patience=2)}
    assert combined(earlier, later) == {
        "lr": 2.0,
        "pace": Pace("linear", warmup=50, clip=3.0),
        "inputs": Inputs(labels=True),
        "checks": Checks(patience=2),
    }


def test_minutes_of_the_processor_do_not_pass_while_the_process_waits(images, monkeypatch):
    """Steps that wait end a run of one second of wall time, and none of processor time."""
    waited = itertools.count()
    clocks = SimpleNamespace(monotonic=lambda: 0.2 * next(waited), process_time=lambda: 0.0)
    monkeypatch.setattr(progress, "time", clocks)
    limits = QUIET | {"minutes": 1 / 60, "steps": 12, "every": 100}
    steps = {c: fit(*pair(), images, clock=c, **limits).steps for c in ("wall", "processor")}
    assert 0 < steps["wall"] < 9 and steps["processor"] == 12
    with pytest.raises(ValueError, match="clock must be"):
        fit(*pair(), images, clock="sun", **limits)


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
