"""Training: what it converges to, when it stops, and that a resumed run is the same run."""

from __future__ import annotations

import json
import math
import os
import signal

import pandas as pd
import pytest
import torch
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from toys import (
    BernoulliMixture,
    Conjugate,
    ExactGuide,
    LinearGuide,
    NoGuide,
    PointGuide,
    binary_images,
    conjugate_images,
)

from capsule_zoo.data import Dataset, Split
from capsule_zoo.inference import CheckpointError, NonFiniteLoss, Objective, fit

quiet = {"progress": False, "batch_size": 16, "lr": 0.02}


def pair(seed=1):
    torch.manual_seed(seed)
    model = Conjugate().double()
    return model, LinearGuide(model).double()


def dataset(number=60):
    def split(n):
        return Split(conjugate_images(n), torch.zeros(n, dtype=torch.int64))

    return Dataset("toy", split(number), split(20), split(20))


def states(*modules):
    return {f"{i}.{n}": v.clone() for i, m in enumerate(modules) for n, v in m.state_dict().items()}


def assert_same(left, right):
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


def assert_same_history(left, right):
    columns = ["step", "epoch", "loss", "held_out", "gradient_norm", "lr"]
    pd.testing.assert_frame_equal(left[columns], right[columns], check_exact=True)


class Interrupt:
    """A transform that presses Ctrl-C, or raises what it is given, at one of its calls."""

    def __init__(self, call, error=None):
        self.calls, self.call, self.error = 0, call, error

    def __call__(self, images, generator=None):
        self.calls += 1
        if self.calls == self.call:
            if self.error is not None:
                raise self.error
            os.kill(os.getpid(), signal.SIGINT)
        return images + 1e-3 * torch.rand(images.shape, generator=generator)


# What training converges to


def test_training_finds_the_posterior():
    model, guide = pair()
    images = conjugate_images(200)
    fit(model, guide, images, steps=600, freeze="model", schedule="linear", **quiet | {"lr": 0.05})
    _, scale = model.posterior(images)
    slope = 4 / (1 + 4 * 4)  # variance / noise^2
    assert guide.slope.item() == pytest.approx(slope, abs=0.01)
    assert guide.scale.item() == pytest.approx(scale[0].item(), rel=0.05)


def test_training_an_enumerated_model_raises_the_evidence():
    model, images = BernoulliMixture().double(), binary_images(64)
    before = model.log_evidence(images).mean().item()
    run = fit(model, NoGuide(model), images, epochs=20, **quiet)
    after = model.log_evidence(images).mean().item()
    assert after > before + 0.05
    assert run.history["loss"].iloc[-4:].mean() < run.history["loss"].iloc[:4].mean()


def test_a_whole_batch_keeps_its_order_for_guides_with_parameters_per_image():
    model, _ = pair()
    images = torch.linspace(0, 1, 5, dtype=torch.float64)[:, None, None, None].expand(5, 1, 2, 2)
    guide = AutoNormal(model)
    fit(model, guide, images.clone(), steps=400, freeze="model", **quiet)
    torch.testing.assert_close(guide.median()["code"], model.posterior(images)[0], atol=0.1, rtol=0)


def test_two_autoguides_of_one_class_both_train():
    model, _ = pair()
    images = conjugate_images(3)
    medians = []
    for shift in (0.0, 1.0):
        guide = AutoNormal(model)
        shifted = (images + shift) / 2
        fit(model, guide, shifted, steps=300, freeze="model", **quiet)
        torch.testing.assert_close(
            guide.median()["code"], model.posterior(shifted)[0], atol=0.15, rtol=0
        )
        medians.append(guide.median()["code"])
    assert (medians[1] - medians[0]).min() > 0.2


@pytest.mark.parametrize("frozen", ["model", "guide"])
def test_freeze_leaves_the_frozen_alone_and_moves_the_other(frozen):
    model, guide = pair()
    modules = {"model": model, "guide": guide}
    before = {role: states(m) for role, m in modules.items()}
    fit(model, guide, conjugate_images(40), steps=5, freeze=frozen, **quiet)
    for role, module in modules.items():
        after = states(module)
        changed = any(not torch.equal(after[n], before[role][n]) for n in after)
        assert changed == (role != frozen)
    assert all(p.requires_grad for m in modules.values() for p in m.parameters())


def test_a_parameter_that_the_user_froze_stays():
    model, guide = pair()
    guide.slope.requires_grad_(False)
    fit(model, guide, conjugate_images(40), steps=5, **quiet)
    assert guide.slope.item() == pytest.approx(0.1) and not guide.slope.requires_grad
    assert guide.offset.item() != 0


def test_learning_rates_follow_their_schedule_and_group():
    model, guide = pair()
    rates = {"model": 0.1, "guide": 0.2}
    options = quiet | {"lr": rates}
    run = fit(model, guide, conjugate_images(40), steps=10, schedule="cosine", **options)
    fraction = torch.arange(10, dtype=torch.float64) / 10
    expected = 0.1 * (1 + torch.cos(math.pi * fraction)) / 2
    torch.testing.assert_close(torch.tensor(run.history["lr"].to_numpy()), expected)


def test_any_torch_optimizer_and_clipping():
    model, guide = pair()
    before = guide.offset.item()
    options = quiet | {"lr": 1.0}
    fit(
        model, guide, conjugate_images(40), steps=1, optimizer=torch.optim.SGD, clip=1e-3, **options
    )
    assert 0 < abs(guide.offset.item() - before) <= 1e-3


def test_labels_are_handed_on():
    seen = []

    class Labelled(Conjugate):
        def forward(self, images=None, labels=None, batch_size=1):
            seen.append(labels)
            return super().forward(images, labels, batch_size)

    model = Labelled().double()
    data = Split(conjugate_images(8), torch.arange(8))
    fit(model, LinearGuide(model).double(), data, steps=1, labels=True, **quiet)
    assert torch.equal(seen[-1], torch.arange(8))
    with pytest.raises(ValueError, match="labels=True needs data with labels"):
        fit(model, LinearGuide(model), data.images, steps=1, labels=True, **quiet)


# When it stops


def test_the_record_of_a_run(tmp_path):
    model, guide = pair()
    run = fit(model, guide, dataset(), epochs=3, validate_every=5, **quiet)
    assert run.steps == 12 and run.stopped == "reached 3 epochs"
    assert list(run.history["epoch"]) == [0] * 4 + [1] * 4 + [2] * 4
    assert list(run.history["held_out"].dropna().index + 1) == [5, 10, 12]
    assert run.best_loss == run.history["held_out"].min()
    run.save(tmp_path / "run")
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "run" / "history.csv"), run.history)
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["steps"] == 12 and metrics["units"] == "nats per image"


def test_the_held_out_value_does_not_disturb_the_run():
    losses = []
    for every in (2, 100):
        model, guide = pair()
        torch.manual_seed(2)
        run = fit(model, guide, dataset(), steps=8, validate_every=every, **quiet)
        losses.append(list(run.history["loss"]))
    assert losses[0] == losses[1]


def test_early_stopping_says_why_and_restores_the_best_state():
    model, guide = pair()
    images = conjugate_images(60)
    labels = torch.zeros(60, dtype=torch.int64)
    far = Split(1 - images, labels)  # training on bright images makes dark ones less likely
    data = Dataset("toy", Split(images * 0.2, labels), far, far)
    options = {"steps": 400, "validate_every": 4, "patience": 3, "seed": 3}
    run = fit(model, guide, data, freeze="guide", **options, **quiet)
    assert run.steps < 400 and run.steps == run.best_step + 12
    assert "no lower value in 3 checks" in run.stopped and f"step {run.best_step}" in run.stopped
    other, other_guide = pair()
    only = options | {"steps": run.best_step, "patience": None}
    fit(other, other_guide, data, freeze="guide", **only, **quiet)
    assert_same(states(model, guide), states(other, other_guide))


def test_a_time_limit_ends_the_run_and_the_schedule():
    model, guide = pair()
    run = fit(model, guide, dataset(), minutes=0.3 / 60, schedule="linear", **quiet)
    assert run.stopped.startswith("reached 0.005 minutes")
    assert run.history["lr"].iloc[-1] < 0.5 * run.history["lr"].iloc[0]


def test_a_loss_that_is_not_finite_names_the_site_and_keeps_the_checkpoint(tmp_path):
    class Fragile(Conjugate):
        broken = False

        def forward(self, images=None, labels=None, batch_size=1):
            if self.broken:
                self.noise = float("nan")
            return super().forward(images, labels, batch_size)

    torch.manual_seed(1)
    model = Fragile().double()
    guide = LinearGuide(model).double()
    path = tmp_path / "run.safetensors"

    def break_later(images, generator=None):
        break_later.calls += 1
        model.broken = break_later.calls == 7
        return images

    break_later.calls = 0
    options = {"validate_every": 3, "transform": break_later, "checkpoint": path}
    with pytest.raises(NonFiniteLoss, match=r"at step 7: .*'image'") as caught:
        fit(model, guide, dataset(), steps=20, **options, **quiet)
    assert caught.value.site == "image" and str(path) in str(caught.value)
    resumed, resumed_guide = pair()
    resumed.__class__ = Fragile
    model.broken = False
    run = fit(resumed, resumed_guide, dataset(), steps=8, resume=path, **quiet)
    assert run.steps == 8 and len(run.history) == 8


def test_a_guide_that_turns_nan_is_named_before_the_model():
    model, guide = pair()

    def poison(images, generator=None):
        with torch.no_grad():
            guide.offset.fill_(math.nan)
        return images

    with pytest.raises(NonFiniteLoss, match="'code'"):
        fit(model, guide, dataset(), steps=3, transform=poison, **quiet)


# A resumed run is the same run


@pytest.mark.parametrize("error", [None, KeyboardInterrupt()], ids=["signal", "exception"])
@pytest.mark.parametrize("call", [3, 7])
def test_an_interrupted_and_resumed_run_is_the_uninterrupted_run(tmp_path, call, error):
    path = tmp_path / "run.safetensors"
    options = {"steps": 13, "validate_every": 5, "schedule": "cosine", "seed": 4, **quiet}
    torch.manual_seed(0)
    data = dataset()
    whole = pair()
    expected = fit(*whole, data, transform=Interrupt(0), **options)
    parts = pair()
    stopped = fit(*parts, data, transform=Interrupt(call, error), checkpoint=path, **options)
    assert stopped.stopped == "interrupted"
    assert stopped.steps == (call if error is None else call - 1)
    again = pair(seed=9)  # other parameters, all of which the checkpoint replaces
    torch.manual_seed(1234)
    resumed = fit(*again, data, transform=Interrupt(0), resume=path, checkpoint=path, **options)
    assert_same(states(*whole), states(*again))
    assert_same_history(expected.history, resumed.history)
    assert (expected.best_loss, expected.best_step) == (resumed.best_loss, resumed.best_step)
    assert resumed.seconds > stopped.seconds


def test_a_finished_run_can_be_prolonged(tmp_path):
    path = tmp_path / "run.safetensors"
    torch.manual_seed(0)
    data = dataset()
    whole, parts = pair(), pair()
    fit(*whole, data, epochs=4, **quiet)
    fit(*parts, data, epochs=2, checkpoint=path, **quiet)
    fit(*parts, data, epochs=4, resume=path, **quiet)
    assert_same(states(*whole), states(*parts))


def test_the_state_of_an_objective_is_part_of_the_checkpoint(tmp_path):
    class Momentous(Objective):
        """An objective whose loss depends on how often it was called."""

        def __init__(self):
            super().__init__()
            self.chain = torch.zeros(2, dtype=torch.float64)

        def differentiable_loss(self, model, guide, *args, **kwargs):
            self.chain = self.chain + torch.rand(2, dtype=torch.float64)
            loss = Trace_ELBO().differentiable_loss(model, guide, *args) / len(args[0])
            return loss * (1 + self.chain.sum())

        def state_dict(self):
            return {"chain": self.chain}

        def load_state_dict(self, state):
            self.chain = state["chain"]

    path = tmp_path / "run.safetensors"
    torch.manual_seed(0)
    data = dataset()
    options = {"validate_every": 3, **quiet}
    whole, parts = pair(), pair()
    fit(*whole, data, steps=8, objective=Momentous(), **options)
    fit(*parts, data, steps=5, objective=Momentous(), checkpoint=path, **options)
    fit(*parts, data, steps=8, objective=Momentous(), resume=path, **options)
    assert_same(states(*whole), states(*parts))


def test_a_checkpoint_of_another_model_is_refused_with_every_difference(tmp_path):
    path = tmp_path / "run.safetensors"
    model, guide = pair()
    fit(model, guide, conjugate_images(20), steps=1, checkpoint=path, **quiet)
    before = states(model, guide)
    with pytest.raises(CheckpointError) as caught:
        fit(model, PointGuide(model).double(), conjugate_images(20), steps=2, resume=path, **quiet)
    for part in (
        "another guide",
        "holds a LinearGuide",
        "extra offset",
        "extra scale_unconstrained",
    ):
        assert part in str(caught.value)
    assert_same(before, states(model, guide))


def test_a_checkpoint_of_a_run_with_other_settings_is_refused(tmp_path):
    path = tmp_path / "run.safetensors"
    model, guide = pair()
    fit(model, guide, conjugate_images(20), steps=1, checkpoint=path, **quiet)
    with pytest.raises(CheckpointError, match="seed=0, not 5"):
        fit(model, guide, conjugate_images(20), steps=2, seed=5, resume=path, **quiet)


# Bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "give epochs, steps or minutes"),
        ({"steps": 0}, "steps must be positive"),
        ({"steps": 1, "lr": -1.0}, "lr must be positive"),
        ({"steps": 1, "lr": {"model": 1.0}}, "needs the keys 'model' and 'guide'"),
        ({"steps": 1, "schedule": "stairs"}, "schedule must be one of constant, cosine, linear"),
        ({"steps": 1, "freeze": "both"}, "freeze must be None, 'model' or 'guide'"),
        ({"steps": 1, "patience": 0}, "patience must be at least 1"),
        ({"steps": 1, "validate_every": 0}, "validate_every must be at least 1"),
        ({"steps": 1, "clip": 0.0}, "clip must be positive"),
        ({"steps": 1, "batch_size": 0}, "batch_size must be at least 1"),
    ],
)
def test_arguments_that_are_refused(arguments, message):
    model, guide = pair()
    with pytest.raises(ValueError, match=message):
        fit(model, guide, conjugate_images(4), **{"progress": False} | arguments)


def test_nothing_to_train_and_programs_without_parameters_are_refused():
    model, _ = pair()
    with pytest.raises(ValueError, match="no parameter to train"):
        fit(model, ExactGuide(model), conjugate_images(4), steps=1, freeze="model", **quiet)
    with pytest.raises(ValueError, match=r"guide must be a torch\.nn\.Module"):
        fit(model, lambda images: None, conjugate_images(4), steps=1, **quiet)


@pytest.mark.parametrize("images", [torch.zeros(0, 1, 2, 2), torch.full((4, 1, 2, 2), math.nan)])
def test_images_that_are_refused(images):
    model, guide = pair()
    with pytest.raises(ValueError, match="images"):
        fit(model, guide, images, steps=1, **quiet)


def test_the_progress_bar_shows_the_loss_and_the_held_out_value(capsys):
    model, guide = pair()
    fit(model, guide, dataset(), steps=6, validate_every=2, **quiet | {"progress": True})
    shown = capsys.readouterr().err
    assert "6/6" in shown and "loss=" in shown and "held-out=" in shown
