"""The exact guide has no variance; the mean field is a bound, computed as its definition says."""

import pytest
import torch
from pyro import poutine
from small_rbms import PAIRS, small, table_given

from capsule_zoo.guides import ExactSwitches, MeanFieldSwitches
from capsule_zoo.inference import check_pair, evaluate, log_weights, summarize
from capsule_zoo.models import RBM, CapsuleRBM

EXACT = dict(rtol=0, atol=1e-10)
FAMILIES = pytest.mark.parametrize("families", PAIRS, ids="-".join)


def some_images(model):
    torch.manual_seed(5)
    return model.visible.distribution().sample((3,)).clamp(*model.pixel_range).detach()


@pytest.mark.parametrize("kind", [CapsuleRBM, RBM])
@FAMILIES
def test_every_draw_of_the_exact_guide_has_the_same_log_weight(families, kind):
    """log p(x, h, z) - log q(h, z | x) = -F(x) - log of the base partitions, whatever is drawn."""
    model = small(*families, kind=kind)
    guide, images = ExactSwitches(model), some_images(model)
    check_pair(model, guide, images)
    expected = -model.free_energy(images) - model.log_base_partition()
    for _ in range(5):
        log_weight, _, guide_trace = log_weights(model, guide, images)
        torch.testing.assert_close(log_weight, expected, **EXACT)
    assert set(guide.covers) == {n for n in guide_trace.nodes if n.startswith("capsule")}
    torch.testing.assert_close(guide.free_energy(images), model.free_energy(images), **EXACT)


@FAMILIES
@torch.no_grad()
def test_mean_field_free_energy_is_its_definition_and_a_bound(families):
    model = small(*families)
    guide, images = MeanFieldSwitches(model, iterations=3), some_images(model)
    check_pair(model, guide, images)
    probability = guide.switch_probabilities(images)
    field = model.fields(images).hidden
    for i, x in enumerate(images):
        energies, z, h = table_given(model, families, x)
        on = probability[i]
        log_switch = (z * on.log() + (1 - z) * (1 - on).log()).sum(1)
        units = model.hidden.distribution(on[:, None] * field[i])
        log_hidden = units.log_prob(h).flatten(1).sum(1)
        log_measure = -log_hidden.logsumexp(
            0
        )  # the distribution of h sums to one over the listed states
        log_q = log_switch[:, None] + log_hidden + log_measure
        assert log_q.exp().sum() == pytest.approx(1, abs=1e-10)
        expected = (log_q.exp() * (log_q - energies)).sum()
        torch.testing.assert_close(guide.free_energy(images)[i], expected, rtol=0, atol=1e-9)
    gap = guide.free_energy(images) - model.free_energy(images)
    assert (gap >= -1e-12).all()


@FAMILIES
@torch.no_grad()
def test_expectations_of_the_mean_field_are_those_of_the_distribution_that_is_drawn(families):
    """The exact guide's expectations are the model's own (`test_capsule_rbm`)."""
    model = small(*families)
    images = some_images(model)
    guide = MeanFieldSwitches(model, 3)
    nodes = poutine.trace(guide).get_trace(images).nodes
    switch, hidden = (nodes[f"capsule_{name}"]["fn"].mean for name in ("switch", "hidden"))
    means = guide.expectations(images)
    torch.testing.assert_close(means.switch, switch, **EXACT)
    torch.testing.assert_close(means.activity, switch[..., None] * hidden, **EXACT)


def test_mean_field_of_uncoupled_units_is_exact_and_its_iteration_converges():
    model = small()
    images = some_images(model)
    once, more = (MeanFieldSwitches(model, n).switch_probabilities(images) for n in (200, 201))
    torch.testing.assert_close(once, more, **EXACT)
    with torch.no_grad():
        model.weight.zero_()
    guide = MeanFieldSwitches(model)
    torch.testing.assert_close(guide.free_energy(images), model.free_energy(images), **EXACT)
    torch.testing.assert_close(
        guide.switch_probabilities(images), model.switch_probabilities(images), **EXACT
    )


def test_at_a_fixed_point_the_gradient_is_that_of_the_definition():
    """The gradient holds pi constant; where the iteration has converged, this loses nothing."""
    model = small()
    images = some_images(model)
    guide = MeanFieldSwitches(model, 300)
    gradients = torch.autograd.grad(guide.free_energy(images).sum(), list(model.parameters()))
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        index = (0,) * parameter.dim()
        values = []
        for step in (1e-5, -1e-5):
            with torch.no_grad():
                parameter[index] += step
                values.append(guide.free_energy(images).sum().item())
                parameter[index] -= step
        numeric = (values[0] - values[1]) / 2e-5
        assert gradient[index].item() == pytest.approx(numeric, abs=1e-7)


def test_weights_of_an_unnormalized_joint_are_not_called_a_bound():
    model = small()
    summary = summarize(evaluate(model, ExactSwitches(model), some_images(model), draws=0))
    assert not summary["is_bound"] and summary["elbo"] != summary["elbo"]
