"""The capsule RBM against brute force over every state, in float64, for every pair of families."""

import pyro
import pytest
import torch
from pyro import poutine
from scipy.stats import chi2
from small_rbms import (
    PAIRS,
    log_masses,
    negative_energy,
    randomized,
    small,
    states,
    switches,
    table_given,
)

from capsule_zoo.models import RBM, CapsuleRBM
from capsule_zoo.models.capsule_rbm import COUPLING_LIMIT
from capsule_zoo.models.units.switched_units import CapsuleState

EXACT = dict(rtol=0, atol=1e-10)
KINDS = pytest.mark.parametrize("kind", [CapsuleRBM, RBM])
FAMILIES = pytest.mark.parametrize("families", PAIRS, ids="-".join)


def some_images(model, families, number=3):
    torch.manual_seed(7)
    distribution = model.visible.distribution()
    return distribution.sample((number,)).detach()


@KINDS
@FAMILIES
def test_posterior_and_free_energy_are_those_of_brute_force(families, kind):
    model = small(*families, kind=kind)
    images = some_images(model, families)
    distribution = model.posterior(images)
    mean = distribution.mean()
    for i, x in enumerate(images):
        energies, z, h = table_given(model, families, x)
        total = energies.flatten().logsumexp(0)
        torch.testing.assert_close(model.free_energy(images)[i], -total, **EXACT)
        posterior = (energies - total).exp()
        switch = torch.einsum("zh,zk->k", posterior, z)
        activity = torch.einsum("zh,zk,hkj->kj", posterior, z, h)
        torch.testing.assert_close(distribution.switch_probability[i], switch, **EXACT)
        torch.testing.assert_close(mean.activity[i], activity, **EXACT)


@KINDS
@FAMILIES
def test_conditional_of_images_is_that_of_brute_force(families, kind):
    model = small(*families, kind=kind)
    images, _ = states(families[0], *model.image_shape)
    torch.manual_seed(1)
    z = switches(model)[-1:]
    h = model.hidden.distribution().sample((1,))
    energies = negative_energy(model, families, images, z, h)
    expected = torch.einsum("s,schw->chw", energies.softmax(0), images)
    field = model.visible_field(CapsuleState(z, z[..., None] * h))
    torch.testing.assert_close(model.visible.mean(field)[0], expected, **EXACT)


@KINDS
@FAMILIES
def test_trace_is_the_unnormalized_joint_over_the_base_partitions(families, kind):
    model = small(*families, kind=kind)
    images = some_images(model, families)
    if families[0] == "gaussian":
        images = images.clamp(-1, 1)
    trace = poutine.trace(model).get_trace(images)
    h = trace.nodes["capsule_hidden"]["value"]
    z = trace.nodes["capsule_switch"]["value"] if model.switched else torch.ones(3, 1)
    expected = negative_energy(model, families, images, z.double(), h).sum()
    expected = expected - len(images) * model.log_base_partition()
    torch.testing.assert_close(trace.log_prob_sum(), expected, **EXACT)


@KINDS
def test_gibbs_leaves_the_exact_distribution_unchanged(kind):
    """Pearson's test at a false failure rate of one in a million."""
    model, families, number = small(kind=kind), PAIRS[0], 40_000
    masses, images = log_masses(model, families)
    distribution = masses.softmax(0).detach()
    torch.manual_seed(11)
    start = images[torch.multinomial(distribution, number, replacement=True)]
    moved = model.gibbs(start, 3)
    assert (moved != start).flatten(1).any(1).double().mean() > 0.3  # the chain does move
    code = (moved.flatten(1) * 2.0 ** torch.arange(3, -1, -1)).sum(1).long()
    counts = torch.bincount(code, minlength=len(images)).double()
    statistic = ((counts - number * distribution).square() / (number * distribution)).sum().item()
    assert statistic < chi2.isf(1e-6, len(images) - 1)


@KINDS
@FAMILIES
def test_drawn_capsules_have_the_moments_of_the_posterior(families, kind):
    model, number = small(*families, kind=kind), 40_000
    image = some_images(model, families, 1).expand(number, -1, -1, -1)
    torch.manual_seed(2)
    distribution = model.posterior(image)
    drawn, mean = distribution.sample(), distribution.mean()
    for sample, expected in zip(drawn, mean, strict=True):
        error = sample.mean(0) - expected[0]
        assert (error.abs() <= 5.5 * sample.std(0) / number**0.5 + 1e-12).all()


def test_rbm_is_the_capsule_rbm_with_its_switch_held_on():
    rbm = small(kind=RBM)
    capsule = CapsuleRBM((1, 2, 2), 1, rbm.num_units).double()
    capsule.load_state_dict(
        {
            **rbm.state_dict(),
            "switch_weight": torch.zeros(4, 1),
            "switch_bias": torch.full((1,), 40.0),
        }
    )  # on, but for e^-40
    images = some_images(rbm, PAIRS[0])
    torch.testing.assert_close(capsule.free_energy(images) + 40, rbm.free_energy(images), **EXACT)
    torch.testing.assert_close(capsule.reconstruct(images), rbm.reconstruct(images), **EXACT)


@KINDS
@FAMILIES
def test_contributions_add_up_to_the_field_of_the_image(families, kind):
    model = small(*families, kind=kind)
    capsules = model.posterior(some_images(model, families)).mean()
    terms = model.contributions(capsules)
    assert terms.shape[1:] == (model.num_capsules, *model.image_shape)
    torch.testing.assert_close(terms.sum(1), model.visible_field(capsules), **EXACT)
    rebuilt = model.visible.mean(terms.sum(1))
    torch.testing.assert_close(model.mean_image(capsules), rebuilt, **EXACT)


def test_projective_field_of_a_capsule_is_the_mean_image_of_its_own_machine():
    """With one switch on and the others off it is an RBM: compare with its exact distribution."""
    model = small()
    alone = RBM((1, 2, 2), model.num_units).double()
    with torch.no_grad():
        alone.weight.copy_(model.weight[:, 1:])
        alone.hidden.bias.copy_(model.hidden.bias[1:])
        alone.visible.bias.copy_(model.visible.bias + model.switch_weight[:, 1].view(1, 2, 2))
    masses, images = log_masses(alone, PAIRS[0])
    expected = torch.einsum("s,schw->chw", masses.softmax(0), images)
    mean = model.projective_field(1, steps=60, chains=20_000)
    assert ((mean - expected).abs() < 5.5 * 0.5 / 20_000**0.5).all()


def test_a_draw_without_images_follows_the_model():
    model = small()
    masses, images = log_masses(model, PAIRS[0])
    mean = torch.einsum("s,schw->chw", masses.softmax(0), images)
    drawn = model(batch_size=20_000)
    assert drawn.shape == (20_000, 1, 2, 2)
    assert ((drawn.mean(0) - mean).abs() < 5.5 * 0.5 / 20_000**0.5).all()


def test_base_rates_put_the_mean_of_the_images_into_the_biases():
    model = CapsuleRBM(4, 2, 2)
    images = torch.tensor([[0.0, 0.25, 0.5, 1.0]]).view(1, 1, 2, 2).expand(99, -1, -1, -1)
    model.set_base_rates(images)
    expected = torch.tensor([0.005, 0.25, 0.5, 0.995])
    torch.testing.assert_close(model.visible.mean().flatten(), expected)


def test_gaussian_couplings_stay_where_the_partition_function_exists():
    model = randomized(CapsuleRBM(4, 2, 3, visible_family="gaussian", hidden_family="gaussian"))
    with torch.no_grad():
        model.weight.mul_(10)
    assert model.coupling_norm() > 1
    model.keep_normalizable()
    assert model.coupling_norm() < 1
    # the quadratic form of -E with all switches on is negative definite
    coupling = model.weight.flatten(1)
    precision = torch.cat([model.visible.precision.flatten(), model.hidden.precision.flatten()])
    form = torch.diag(precision)
    form[:4, 4:], form[4:, :4] = -coupling, -coupling.T
    assert torch.linalg.eigvalsh(form).min() > 0
    before = model.weight.clone()
    model.keep_normalizable()
    torch.testing.assert_close(model.weight, before)  # nothing to do, nothing done


@pytest.mark.parametrize("pixels", [4, 16])  # fewer than hidden units, and more
def test_only_directions_in_which_gaussian_couplings_are_too_strong_are_cut(pixels):
    model = randomized(
        CapsuleRBM(pixels, 2, 3, visible_family="gaussian", hidden_family="gaussian")
    )
    left, right = (u.precision.flatten().sqrt().detach() for u in (model.visible, model.hidden))
    u, _, v = torch.linalg.svd(model.weight.detach().flatten(1), full_matrices=False)
    values = torch.linspace(3, 0.2, len(v)).to(u)
    with torch.no_grad():
        model.weight.copy_((left[:, None] * (u * values) @ v * right).view_as(model.weight))
    model.keep_normalizable()
    couplings = (model.weight.flatten(1) / left[:, None] / right).detach()
    expected = (u * values.clamp(max=COUPLING_LIMIT)) @ v
    torch.testing.assert_close(couplings, expected, atol=1e-12, rtol=0)


def test_poisson_couplings_may_not_attract():
    model = randomized(CapsuleRBM(4, 2, 2, visible_family="poisson", hidden_family="poisson"))
    assert model.weight.max() == 0 and model.weight.min() < 0


def test_gray_images_are_admitted_under_validation():
    with pyro.validation_enabled(True):
        trace = poutine.trace(small()).get_trace(torch.full((2, 1, 2, 2), 0.3).double())
        assert trace.log_prob_sum().isfinite()
