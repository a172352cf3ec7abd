"""Training: its limit, its end, and its refusals; see also test_resume."""

import itertools
import json
import math
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pandas as pd
import pyro
import pyro.distributions as dist
import pytest
import small_scenes
import torch
from pyro.infer.autoguide import AutoNormal
from toys import (
    QUIET,
    BernoulliMixture,
    NoGuide,
    assert_same,
    binary_images,
    conjugate_images,
    dataset,
    fit,
    pair,
    states,
)

from capsule_zoo.data import Dataset, Split
from capsule_zoo.data import progress as bars
from capsule_zoo.inference import NonFiniteLoss
from capsule_zoo.inference.training import progress


def test_training_finds_the_posterior():
    model, guide = pair()
    images = conjugate_images(200)
    fit(model, guide, images, steps=600, freeze="model", schedule="linear", **QUIET | {"lr": 0.05})
    _, scale = model.posterior(images)
    slope = 4 / (1 + 4 * 4)  # variance / noise^2
    assert guide.slope.item() == pytest.approx(slope, abs=0.01)
    assert guide.scale.item() == pytest.approx(scale[0].item(), rel=0.05)


def test_training_an_enumerated_model_raises_the_evidence():
    model, images = BernoulliMixture().double(), binary_images(64)
    before = model.log_evidence(images).mean().item()
    run = fit(model, NoGuide(model), images, epochs=20, **QUIET)
    after = model.log_evidence(images).mean().item()
    assert after > before + 0.05
    assert run.history["loss"].iloc[-4:].mean() < run.history["loss"].iloc[:4].mean()


def test_a_whole_batch_keeps_its_order_for_guides_with_parameters_per_image():
    model, _ = pair()
    images = torch.linspace(0, 1, 5, dtype=torch.float64)[:, None, None, None].expand(5, 1, 2, 2)
    guide = AutoNormal(model)
    fit(model, guide, images.clone(), steps=400, freeze="model", **QUIET)
    torch.testing.assert_close(guide.median()["code"], model.posterior(images)[0], atol=0.1, rtol=0)


def test_an_autoguide_whose_values_are_of_all_images_takes_minibatches():
    def model(images, labels=None):
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        with pyro.plate("images", len(images), dim=-1):
            distribution = dist.Normal(mean, 0.1).expand(images.shape).to_event(3)
            pyro.sample("image", distribution, obs=images)

    guide = AutoNormal(model)
    fit(model, guide, torch.full((6, 1, 2, 2), 0.5), batch_size=2, lr=0.1, steps=150)
    assert guide.median()["mean"].item() == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("frozen", ["model", "guide"])
def test_freeze_leaves_the_frozen_alone_and_moves_the_other(frozen):
    model, guide = pair()
    modules = {"model": model, "guide": guide}
    before = {role: states(m) for role, m in modules.items()}
    fit(model, guide, conjugate_images(40), steps=5, freeze=frozen, **QUIET)
    for role, module in modules.items():
        after = states(module)
        changed = any(not torch.equal(after[n], before[role][n]) for n in after)
        assert changed == (role != frozen)
    assert all(p.requires_grad for m in modules.values() for p in m.parameters())


def test_a_parameter_that_the_user_froze_stays():
    model, guide = pair()
    guide.slope.requires_grad_(False)
    fit(model, guide, conjugate_images(40), steps=5, **QUIET)
    assert guide.slope.item() == pytest.approx(0.1) and not guide.slope.requires_grad
    assert guide.offset.item() != 0


def test_learning_rates_follow_their_schedule_and_group():
    model, guide = pair()
    rates = {"model": 0.1, "guide": 0.2}
    made = []

    def optimizer(groups):
        made.append(torch.optim.Adam(groups))
        return made[0]

    options = QUIET | {"lr": rates, "optimizer": optimizer, "schedule": "cosine"}
    run = fit(model, guide, conjugate_images(40), steps=10, **options)
    fraction = torch.arange(10, dtype=torch.float64) / 10
    expected = 0.1 * (1 + torch.cos(math.pi * fraction)) / 2
    torch.testing.assert_close(torch.tensor(run.history["lr"].to_numpy()), expected)
    last = [group["lr"] for group in made[0].param_groups]
    assert last == pytest.approx([expected[-1].item(), 2 * expected[-1].item()])
    assert made[0].param_groups[1]["params"] == list(guide.parameters())


def test_rates_rise_over_the_warmup_under_the_schedule():
    run = fit(*pair(), conjugate_images(40), steps=8, warmup=4, schedule="linear", **QUIET)
    expected = [QUIET["lr"] * min((step + 1) / 4, 1) * (1 - step / 8) for step in range(8)]
    assert run.history["lr"].tolist() == pytest.approx(expected)


def test_the_guide_says_how_to_train_it_and_the_caller_has_the_last_word():
    """`fit_settings` fill what was not given, and only that; without them rates are 1e-3."""
    images = conjugate_images(40)

    def rates(settings, **options):
        model, guide = pair()
        guide.fit_settings = settings
        return fit(model, guide, images, steps=4, progress=False, **options).history["lr"].tolist()

    settings = {"lr": {"model": 0.1, "guide": 0.2}, "schedule": "linear", "warmup": 2}
    assert rates(settings) == pytest.approx([0.05, 0.075, 0.05, 0.025])
    assert rates(settings, lr=1.0) == pytest.approx([0.5, 0.75, 0.5, 0.25])
    assert rates(settings, schedule="constant", warmup=0) == pytest.approx([0.1] * 4)
    assert rates({}) == pytest.approx([1e-3] * 4)


def test_any_torch_optimizer_and_clipping():
    model, guide = pair()
    before = guide.offset.item()
    options = QUIET | {"lr": 1.0}
    fit(
        model, guide, conjugate_images(40), steps=1, optimizer=torch.optim.SGD, clip=1e-3, **options
    )
    assert 0 < abs(guide.offset.item() - before) <= 1e-3


def test_the_record_of_a_run(tmp_path):
    model, guide = pair()
    run = fit(model, guide, dataset(), epochs=3, every=5, **QUIET)
    assert run.steps == 12 and run.stopped == "reached 3 epochs"
    assert list(run.history["epoch"]) == [0] * 4 + [1] * 4 + [2] * 4
    assert list(run.history["held_out"].dropna().index + 1) == [5, 10, 12]
    assert run.best_loss == run.history["held_out"].min()
    run.save(tmp_path / "run")
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "run" / "history.csv"), run.history)
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["steps"] == 12 and metrics["units"] == "nats per image"
    replace(run, best_loss=math.inf).save(tmp_path / "run")  # stopped before the first check
    text = (tmp_path / "run" / "metrics.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail)["best_loss"] is None


def test_the_held_out_value_does_not_disturb_the_run():
    losses = []
    for every in (2, 100):
        model, guide = pair()
        torch.manual_seed(2)
        run = fit(model, guide, dataset(), steps=8, every=every, **QUIET)
        losses.append(list(run.history["loss"]))
    assert losses[0] == losses[1]


def test_early_stopping_says_why_and_restores_the_best_state():
    model, guide = pair()
    images = conjugate_images(60)
    labels = torch.zeros(60, dtype=torch.int64)
    far = Split(1 - images, labels)  # training on bright images makes dark ones less likely
    data = Dataset("toy", Split(images * 0.2, labels), far, far)
    options = {"steps": 400, "every": 4, "patience": 3, "seed": 3}
    run = fit(model, guide, data, freeze="guide", **options, **QUIET)
    assert run.steps < 400 and run.steps == run.best_step + 12
    assert "no lower value in 3 checks" in run.stopped and f"step {run.best_step}" in run.stopped
    other, other_guide = pair()
    only = options | {"steps": run.best_step, "patience": None}
    fit(other, other_guide, data, freeze="guide", **only, **QUIET)
    assert_same(states(model, guide), states(other, other_guide))


@pytest.fixture
def clock(monkeypatch):
    """Let a second of a training go by whenever its clock is read, however long it takes."""
    seconds = itertools.count()
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: float(next(seconds))))


@pytest.mark.usefixtures("clock")
def test_a_time_that_ends_in_the_warmup_is_told_and_steps_that_were_asked_for_are_not():
    """On a busy machine minutes may allow few steps, and the rates have not risen by then."""
    with pytest.warns(UserWarning, match=r"cut short \([2-9] of the 50 steps in .*--steps"):
        fit(*pair(), dataset(), minutes=0.2, warmup=50, **QUIET)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(*pair(), dataset(), minutes=0.2, warmup=1, **QUIET)
        fit(*pair(), dataset(), minutes=9, steps=3, warmup=50, **QUIET)


@pytest.mark.usefixtures("clock")
def test_a_time_limit_ends_the_run_and_the_schedule():
    model, guide = pair()
    run = fit(model, guide, dataset(), minutes=2, schedule="linear", **QUIET)
    assert run.stopped == "reached 2 minutes" and 10 < run.steps < 120
    rates = run.history["lr"]
    assert (rates.diff().dropna() < 0).all() and rates.iloc[-1] < 0.1 * rates.iloc[0]


def spoil_guide(model, guide):
    with torch.no_grad():
        guide.offset.fill_(math.nan)


def spoil_likelihood(model, guide):
    model.noise = math.nan


@pytest.mark.parametrize(("spoil", "site"), [(spoil_likelihood, "image"), (spoil_guide, "code")])
def test_a_loss_that_is_not_finite_names_the_site_and_keeps_the_checkpoint(spoil, site, tmp_path):
    """A guide that turns NaN is named before the model."""
    model, guide = pair()
    calls = itertools.count(1)

    def break_later(images, generator=None):
        if next(calls) == 7:
            spoil(model, guide)
        return images

    path = tmp_path / "run.safetensors"
    options = {"every": 3, "transform": break_later, "checkpoint": path}
    with pytest.raises(NonFiniteLoss, match=f"at step 7: .*'{site}'") as caught:
        fit(model, guide, dataset(), steps=20, **options, **QUIET)
    assert caught.value.site == site and path.exists()


@pytest.mark.filterwarnings("ignore:Encountered NaN")
@pytest.mark.parametrize("validated", [True, False])
def test_a_transform_that_spoils_the_images_is_told_from_a_rate_that_is_too_high(validated):
    with pyro.validation_enabled(validated), pytest.raises(ValueError, match="images holds NaN"):
        fit(*pair(), dataset(), steps=1, transform=lambda images: images * math.nan, **QUIET)


def test_training_shows_its_own_bar_alone(monkeypatch, capsys):
    """A guide that refines, or looks slot by slot, would show a bar in every step."""
    monkeypatch.setattr(bars, "SECONDS_TO_FIRST_LINE", 0)
    model, guide, images = small_scenes.pair()
    with bars.show_progress():
        fit(model, guide, images, steps=2, batch_size=3)
    assert {line.partition(":")[0] for line in capsys.readouterr().err.splitlines()} == {"training"}
