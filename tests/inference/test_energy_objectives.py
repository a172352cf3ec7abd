"""An energy model is not trained by a bound, which has no floor without its partition function."""

import math

import pyro
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, RenyiELBO, Trace_ELBO, TraceEnum_ELBO, TraceMeanField_ELBO
from small_entries import check_refused
from toys import Conjugate, LinearGuide, conjugate_images

from capsule_zoo.guides import ExactSwitches, FreeForm
from capsule_zoo.inference import (
    Checks,
    ContrastiveDivergence,
    ImportanceWeightedELBO,
    Objective,
    ReweightedWakeSleep,
    WakeSleep,
    fit,
    log_partition,
    loss_per_image,
)
from capsule_zoo.inference.objectives.score_function import ScoreFunctionELBO
from capsule_zoo.inference.objectives.thermodynamic import ThermodynamicObjective
from capsule_zoo.models import RBM, CapsuleRBM

BOUNDS = [
    Trace_ELBO(),
    TraceEnum_ELBO(),
    TraceMeanField_ELBO(),
    ImportanceWeightedELBO(2),
    ScoreFunctionELBO(2),
    ThermodynamicObjective(2),
    WakeSleep(recycle_top=False),
    ReweightedWakeSleep(2),
]
PATTERN = "is an energy model, whose density is known up to log Z only, .* has no floor; pass"
QUIET = dict(checks=Checks(progress=False))
KINDS = pytest.mark.parametrize("kind", [RBM, CapsuleRBM])


def small(kind=RBM):
    pyro.set_rng_seed(0)
    model = RBM(4, hidden=3) if kind is RBM else CapsuleRBM(4, 2, 2)
    images = torch.tensor([[0, 0, 1, 1], [1, 1, 0, 0.0], [1, 1, 1, 0]]).view(3, 1, 2, 2)
    return model, ExactSwitches(model), images.repeat(20, 1, 1, 1)


@KINDS
def test_without_an_objective_an_rbm_learns_by_contrastive_divergence(kind):
    model, guide, images = small(kind)

    def likelihood():
        return -model.free_energy(images).mean().item() - log_partition(model).value

    before = likelihood()
    run = fit(model, guide, images, steps=150, lr=0.03, **QUIET)
    assert likelihood() > before + 0.4
    model, guide, _ = small(kind)
    same = fit(model, guide, images, steps=150, lr=0.03, objective=ContrastiveDivergence(), **QUIET)
    assert list(run.history["loss"]) == list(same.history["loss"])


@pytest.mark.parametrize("objective", BOUNDS, ids=lambda item: type(item).__name__)
def test_a_bound_is_refused_before_the_first_step(objective):
    model, guide, images = small()
    before = [p.detach().clone() for p in model.parameters()]
    remedy = r"objective=ContrastiveDivergence\(\)"
    match = rf"^RBM {PATTERN} {remedy}"
    check_refused(lambda: fit(model, guide, images, steps=3, objective=objective, **QUIET), match)
    calls = [lambda: loss_per_image(objective, model, guide, images)]
    if isinstance(objective, Objective):  # in Pyro's own training too
        svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.1}), loss=objective)
        calls += [lambda: svi.step(images), lambda: objective(model, guide)]
    for call in calls:
        check_refused(call, PATTERN)
    assert all(map(torch.equal, before, model.parameters()))


@KINDS
def test_pyros_own_training_refuses_an_elbo(kind):
    model, guide, images = small(kind)
    adam = pyro.optim.Adam({"lr": 0.1})
    before = [p.detach().clone() for p in model.parameters()]
    for loss in (Trace_ELBO(), TraceEnum_ELBO(max_plate_nesting=2), RenyiELBO(num_particles=2)):
        with pytest.raises(ValueError, match=rf"^{kind.__name__} is an energy model.*loss=Contras"):
            SVI(model, guide, adam, loss=loss).step(images)
    assert all(map(torch.equal, before, model.parameters()))
    assert math.isfinite(SVI(model, guide, adam, loss=ContrastiveDivergence()).step(images))
    hidden = poutine.block(model, hide_types=["param"])
    weights = [p.detach().clone() for p in model.parameters()]
    free = FreeForm(model, images[:3])
    assert math.isfinite(SVI(hidden, free, adam, loss=Trace_ELBO()).step(images[:3]))
    assert all(map(torch.equal, weights, model.parameters()))
    assert math.isfinite(SVI(model, guide, adam, loss=Trace_ELBO()).evaluate_loss(images))


def test_a_guide_to_an_energy_model_that_is_not_trained_has_a_bound():
    """With a constant log Z, the ELBO orders guides, and is highest at the exact posterior."""
    model, _, images = small(CapsuleRBM)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    bound = (model.free_energy(images[:3]) + model.log_base_partition()).mean().item()
    guide = FreeForm(model, images[:3])
    options = dict(lr=0.1, freeze="model", objective=ScoreFunctionELBO(20), **QUIET)
    losses = fit(model, guide, images[:3], steps=100, **options).history["loss"]
    assert losses[-20:].mean() < losses[:5].mean() - 0.5
    assert losses[-20:].mean() > bound - 0.05


def test_without_a_default_an_objective_is_asked_for():
    class Energy(Conjugate):
        normalized = False

    class MeanSquare(Objective):
        def differentiable_loss(self, model, guide, images, labels=None):
            return model.mean.square()

    model, images = Energy(), conjugate_images(4, torch.float32)
    guide = LinearGuide(model)
    with pytest.raises(ValueError, match=r"^Energy is an energy model.*pass objective=, a subclas"):
        fit(model, guide, images, steps=1, **QUIET)
    assert fit(model, guide, images, steps=1, objective=MeanSquare(), **QUIET).steps == 1
    assert fit(model, guide, images, steps=1, freeze="model", **QUIET).steps == 1
