"""`examine` and `auto_encoder`: the table against the truth, refusals, and what stays untouched."""

import math
import random
import signal
from contextlib import nullcontext

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoLaplaceApproximation, AutoNormal
from test_programs import (
    LOADINGS,
    NOISE,
    X,
    components,
    components_together,
    double,
    marginal,
    mixture,
)

from capsule_zoo.inference import auto_encoder, evaluate, examine, fit_guide, summarize
from capsule_zoo.inference.calibration import check_calibration
from capsule_zoo.inference.examination.encoder import AutoEncoder, InterruptedFit, trained_encoder
from capsule_zoo.inference.examination.normals import normal_guide, nuts_guide
from capsule_zoo.inference.examination.program import UnservedProgram, as_model
from capsule_zoo.inference.posterior.widen import Widened
from capsule_zoo.inference.training.trainer import Trainer

SHORT: dict = dict(steps=60, fitting=20, temperatures=12, simulated=3, particles=100)


@pytest.fixture(scope="module")
def examined():
    held = double(21, 5, 2) @ LOADINGS + NOISE * double(22, 5, 5)
    names = ["encoder", "free_form", "gauss_newton", "mixture", "auto_laplace"]
    return examine(components, X, held_out={"x": held}, guides=names, rows=4, **SHORT), held[:4]


def test_the_bounds_and_losses_are_those_of_the_exact_evidence(examined):
    examination, rows = examined
    exact = marginal(rows).mean().item()
    assert examination.lower == pytest.approx(exact, abs=0.05)
    assert examination.upper == pytest.approx(exact, abs=0.1)
    for name in ("gauss_newton", "mixture"):  # the posterior is normal
        assert examination.table.loc[name, "elbo"] == pytest.approx(exact, abs=1e-4)
    lost = examination.lower - examination.table["elbo"]
    np.testing.assert_allclose(examination.table["lost_elbo"], lost, atol=1e-9)
    assert examination.table.loc["encoder", "elbo"] < exact + 0.01


def test_the_result_can_be_read_and_drawn(examined):
    examination, _ = examined
    assert {"iwae_100", "iwae", "ess", "pareto_k", "lost_iwae", "seconds"} <= {*examination.table}
    assert "log p(x) is" in str(examination) and "loses least by its ELBO" in examination.verdict
    assert examination.evaluations["mixture"].posterior["code"].sizes["image"] == 4
    labels = [text.get_text() for text in examination.draw().axes[0].get_yticklabels()]
    assert labels == ["encoder", "free form", "gauss newton", "mixture", "auto laplace"]


def test_discrete_sites_leave_out_the_guides_that_cannot_serve_them():
    examination = examine(
        mixture, X, guides=["free_form", "mixture", "auto_laplace"], rows=2, **SHORT
    )
    assert [*examination.table.index] == ["free_form"]
    assert {*examination.left_out} == {"mixture", "auto_laplace"}
    assert "auto_laplace is left out: auto_laplace serves continuous sites" in examination.verdict


@pytest.mark.long
def test_an_encoder_of_linear_components_is_the_posterior():
    """Its loss on new rows is below a tenth of a nat, and its ranks are uniform."""
    rows = double(23, 60, 2) @ LOADINGS + NOISE * double(24, 60, 5)
    guide = auto_encoder(components, rows, steps=600)
    new = double(25, 100, 2) @ LOADINGS + NOISE * double(26, 100, 5)
    idata = evaluate(guide.model, guide, guide.model.rows_of(new), num_particles=20)
    assert summarize(idata)["elbo"] == pytest.approx(marginal(new).mean().item(), abs=0.1)
    assert check_calibration(guide.model, guide, number=300, draws=15).p > 1e-3


def offset(x):
    with pyro.plate("cases", len(x)):
        scale = pyro.sample("scale", dist.LogNormal(x.new_zeros(()), 0.3))
        pyro.sample("x", dist.Normal(x.new_zeros(6), scale[:, None]).to_event(1), obs=x)


@pytest.mark.long
def test_an_encoder_of_scales_is_calibrated():
    x = double(27, 60, 6)
    guide = auto_encoder(offset, x, steps=800)
    assert check_calibration(guide.model, guide, number=200, draws=15).p > 1e-4


def test_a_module_of_a_user_reads_the_rows():
    network = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Tanh())
    guide = auto_encoder(components, X, network=network, steps=2)
    assert guide.network is network and network[0].weight.dtype == torch.float64
    assert guide(guide.model.rows_of(X))["code"].shape == (7, 1, 2)


def test_missing_values_of_new_rows_may_be_elsewhere():
    x, new = X.clone(), X.clone()
    x[0, 1] = new[3, :2] = math.nan
    guide = auto_encoder(components, x, steps=2)
    rows = guide.model.rows_of(new)
    idata = evaluate(guide.model, guide, rows, num_particles=5)
    assert np.isfinite(idata.sample_stats.log_weight).all()


@pytest.mark.long
def test_normal_guides_of_pyro_have_the_moments_of_a_normal_posterior():
    model, rows = as_model(components, X[:2])
    encoder = trained_encoder(model, rows, steps=60, seed=0)
    exact = marginal(X[:2]).mean().item()
    nuts, worst = nuts_guide(model, encoder, rows, draws=120, seed=0)
    laplace = normal_guide("auto_laplace", model, encoder, rows, steps=300, seed=0)
    low_rank = normal_guide("auto_low_rank", model, encoder, rows, steps=300, seed=0)
    assert worst < 1.2
    for guide, loss in ((nuts, 0.3), (laplace, 0.01), (low_rank, 0.3)):
        elbo = summarize(evaluate(model, guide, rows, num_particles=100))["elbo"]
        assert exact - loss < elbo < exact + 0.05


def raise_error(*arguments, **settings):
    raise ArithmeticError


ENDS = {
    "no error": (None, None, None),
    "an error while the encoder trains": (ArithmeticError, "training.trainer.Trainer._step", None),
    "an error of chains": (ArithmeticError, "annealing.bounds.anneal", None),
    "an error of a guide": (ArithmeticError, "examination.losses.evaluate", None),
    "an interrupt while the encoder trains": (InterruptedFit, None, AutoEncoder),
    "an interrupt while a guide is fitted": (None, None, AutoNormal),
}


@pytest.mark.parametrize(
    ("end", "validation"), [*((end, True) for end in ENDS), ("no error", False)]
)
def test_everything_stays_as_it_was(end, validation, monkeypatch):
    error, failing, interrupted = ENDS[end]
    if failing:
        monkeypatch.setattr(f"capsule_zoo.inference.{failing}", raise_error)
    if interrupted:
        interrupt_training_of(interrupted, monkeypatch)
    pyro.get_param_store().clear()
    pyro.param("other", torch.tensor(1.0))
    held = pyro.get_param_store()["other"]
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    names = ["encoder", "auto_normal"]
    with pyro.validation_enabled(validation), pytest.raises(error) if error else nullcontext():
        try:
            examine(components, X, guides=names, rows=2, **{**SHORT, "steps": 3, "fitting": 2})
        finally:
            assert dist.is_validation_enabled() is validation
            assert torch.distributions.Distribution._validate_args is validation
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.random.get_state()[1].tolist() == states[1] and random.getstate() == states[2]
    assert list(pyro.get_param_store()) == ["other"] and pyro.get_param_store()["other"] is held


REFUSED = {
    "an unknown guide": (dict(guides=["mixtur"]), ValueError, "unknown guide 'mixtur'.*'mixture'"),
    "particles": (dict(particles=150), ValueError, "multiple of 100, not 150"),
    "no rows": (dict(rows=0), ValueError, "rows must be at least 1"),
    "held-out data of another name": (dict(held_out={"y": X}), UnservedProgram, "'y'.*given.*x"),
    "held-out data without names": (dict(held_out=X), UnservedProgram, "held_out must be"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_measured_is_refused_in_one_line(name):
    settings, kind, message = REFUSED[name]
    with pytest.raises(kind, match=message) as caught:
        examine(components, X, **{**SHORT, **settings})
    assert "\n" not in str(caught.value)


def interrupt_training_of(kind: type, monkeypatch, before: int = 0) -> None:
    """Send this process an interrupt in a step that trains a guide of a kind, by default the first.

    Args:
        before: number of steps before that one.
    """
    step = Trainer._step
    steps = []

    def step_and_interrupt(trainer, *arguments):
        if isinstance(trainer.pair.guide, kind):
            steps.append(trainer)
            if len(steps) > before:
                signal.raise_signal(signal.SIGINT)
        return step(trainer, *arguments)

    monkeypatch.setattr(Trainer, "_step", step_and_interrupt)


@pytest.mark.long
def test_an_interrupt_keeps_the_finished_rows(monkeypatch):
    interrupt_training_of(AutoLaplaceApproximation, monkeypatch)
    names = ["encoder", "gauss_newton", "auto_laplace", "auto_normal"]
    examination = examine(components, X, guides=names, rows=2, **SHORT)
    assert [*examination.table.index] == [*examination.guides] == ["encoder", "gauss_newton"]
    exact = marginal(X[:2]).mean().item()
    assert examination.table.loc["gauss_newton", "elbo"] == pytest.approx(exact, abs=1e-4)
    assert {*examination.left_out} == {"auto_laplace", "auto_normal"}
    assert "auto_normal is left out: the call was interrupted" in examination.verdict


@pytest.mark.long
def test_an_interrupt_before_the_first_row_keeps_what_was_fitted(monkeypatch):
    pyro.get_param_store().clear()

    def interrupt(*arguments, **settings):
        raise KeyboardInterrupt

    monkeypatch.setattr("capsule_zoo.inference.examination.losses.evaluate", interrupt)
    with pytest.raises(InterruptedFit, match=r"error\.guides") as caught:
        examine(components, X, guides=["gauss_newton"], rows=2, **SHORT)
    guides = caught.value.guides
    assert {"encoder", "free_form", "mixture"} <= {*guides}
    for name in ("encoder", "mixture"):
        idata = evaluate(components, guides[name], X, num_particles=100)
        assert summarize(idata)["iwae"] == pytest.approx(marginal(X).mean().item(), abs=0.3)
    assert not list(pyro.get_param_store())


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("function", [auto_encoder, examine])
def test_an_interrupt_of_its_training_keeps_the_encoder(function, whole, monkeypatch):
    """In the last third of the updates, so that most of the training is done."""
    interrupt_training_of(AutoEncoder, monkeypatch, before=240)
    program = components_together if whole else components
    with pytest.raises(InterruptedFit, match=r"241 of 300.*error\.guides") as caught:
        function(program, X, steps=300)
    guide = caught.value.guides["encoder"]
    untrained = AutoEncoder(guide.model, guide.model.rows_of(X))
    elbos = [
        summarize(evaluate(program, element, X, num_particles=100))["elbo"]
        for element in (untrained, guide)
    ]
    exact = marginal(X).sum().item() if whole else marginal(X).mean().item()
    assert exact - 0.3 * (exact - elbos[0]) < elbos[1] < exact + 0.05


INTERRUPTED = {
    "auto_normal": (AutoNormal, lambda _: fit_guide("auto_normal", components, None, X, steps=5)),
    "widened": (Widened, lambda points: fit_guide("widened", components, points, X, steps=5)),
}


@pytest.mark.parametrize("name", INTERRUPTED)
def test_an_interrupt_leaves_no_guide_half_trained(name, monkeypatch):
    kind, call = INTERRUPTED[name]
    points = fit_guide("free_form", components, None, X, steps=2, distribution="delta")
    interrupt_training_of(kind, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        call(points)
