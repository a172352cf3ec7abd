"""log Z against brute force over every state, and annealing against log Z."""

import math

import pytest
import torch
from small_rbms import PAIRS, log_masses, randomized, small

from capsule_zoo.inference import log_partition
from capsule_zoo.inference.energy import enumeration
from capsule_zoo.inference.energy.enumeration import (
    _log_mass_of_capsules,
    _log_mass_of_images,
    _masses_of_switches,
    exact_log_partition,
    exact_samples,
    is_countable,
)
from capsule_zoo.inference.energy.log_partition import _anneal, annealing_schedule
from capsule_zoo.inference.energy.tempering import TemperedRBM
from capsule_zoo.models import RBM, CapsuleRBM
from capsule_zoo.models.units.exponential_family import base_rates

KINDS = pytest.mark.parametrize("kind", [CapsuleRBM, RBM])
COUNTABLE = [pair for pair in PAIRS if pair != ("poisson", "poisson")]


@KINDS
@pytest.mark.parametrize("families", COUNTABLE, ids="-".join)
def test_exact_is_the_sum_over_every_image_switch_and_hidden_unit(families, kind):
    model = small(*families, kind=kind)
    masses, _ = log_masses(model, families)
    estimate = log_partition(model, "exact")
    assert estimate.value == pytest.approx(masses.logsumexp(0).item(), abs=1e-10)
    assert estimate.standard_error == 0 and estimate.direction == "exact"


@KINDS
def test_summing_over_images_or_over_capsules_is_the_same(kind):
    options = dict(hidden=6) if kind is RBM else dict(capsules=3, units=2)
    model = randomized(kind(9, **options))
    states = (2**2 + 1) ** 3 if kind is CapsuleRBM else 2**6
    by_images = _log_mass_of_images(model, torch.arange(2**9)).logsumexp(0)
    by_capsules = _log_mass_of_capsules(model, torch.arange(states)).logsumexp(0)
    torch.testing.assert_close(by_images, by_capsules, rtol=0, atol=1e-10)
    torch.testing.assert_close(exact_log_partition(model), by_images, rtol=0, atol=1e-10)


def joint_gaussian(model, switch):
    """Return natural parameters of x and h given the switches: precision matrix and bias."""
    bias = torch.cat([model.visible.bias.flatten(), model.hidden.bias.flatten()])
    scales = [model.visible.precision.flatten(), model.hidden.precision.flatten()]
    precision, split = torch.diag(torch.cat(scales)), len(scales[0])
    coupling = (model.weight * switch[:, None]).flatten(1)
    precision[:split, split:], precision[split:, :split] = -coupling, -coupling.T
    if model.switched:
        bias[:split] += model.switch_weight @ switch
    return precision, bias


def log_mass_of_switches(model, switch):
    """Compute the log of the Gaussian integral over x and h, by one determinant."""
    precision, bias = joint_gaussian(model, switch)
    square = bias @ torch.linalg.solve(precision, bias)
    normal = len(bias) * math.log(2 * math.pi) - precision.logdet()
    offset = model.switch_bias @ switch if model.switched else 0.0
    return 0.5 * (square + normal) + offset


@KINDS
@pytest.mark.parametrize("at_once", [2**17, 100])
@torch.no_grad()
def test_deciding_switches_one_by_one_is_the_sum_of_all_determinants(kind, at_once, monkeypatch):
    """All forms together, and a few of them at a time."""
    monkeypatch.setattr(enumeration, "NUMBERS_AT_ONCE", at_once)
    options = dict(hidden=6) if kind is RBM else dict(capsules=6, units=3)
    families = dict(visible_family="gaussian", hidden_family="gaussian")
    model = randomized(kind(9, **families, **options)).double()
    count = model.num_capsules
    states = torch.arange(2**count)[:, None] // 2 ** torch.arange(count) % 2
    states = states.double() if model.switched else torch.ones(1, count).double()
    masses = torch.stack([log_mass_of_switches(model, switch) for switch in states])
    assert not model.switched or masses.std() > 0.5  # not all alike
    torch.testing.assert_close(exact_log_partition(model), masses.logsumexp(0), rtol=0, atol=1e-9)
    computed, order = _masses_of_switches(model)
    digits = order[:, None] // 2 ** torch.arange(count).flip(0) % 2
    expected = torch.stack([log_mass_of_switches(model, switch.double()) for switch in digits])
    torch.testing.assert_close(computed, expected, rtol=0, atol=1e-9)


@KINDS
@torch.no_grad()
def test_exact_samples_have_the_probabilities_and_moments_of_the_joint_gaussians(kind):
    """Some 120 comparisons within 5 standard errors: one seed in 10,000 would fail."""
    options = dict(hidden=4) if kind is RBM else dict(capsules=3, units=2)
    families = dict(visible_family="gaussian", hidden_family="gaussian")
    model = randomized(kind(4, **families, **options), scale=0.3).double()
    number, split = 40_000, 4
    torch.manual_seed(0)
    drawn = exact_samples(model, number)
    patterns = drawn.switch.unique(dim=0)
    masses = torch.stack([log_mass_of_switches(model, switch) for switch in patterns])
    probability = (masses - exact_log_partition(model)).exp()
    assert probability.sum() > 0.999 and len(patterns) == (8 if model.switched else 1)
    for pattern, expected in zip(patterns, probability, strict=True):
        rows = (drawn.switch == pattern).all(1)
        error = (expected * (1 - expected) / number).sqrt()
        assert abs(rows.double().mean() - expected) <= 5 * error + 1e-12
        precision, bias = joint_gaussian(model, pattern)
        units = pattern.repeat_interleave(model.num_units).bool()
        assert (drawn.activity[rows].flatten(1)[:, ~units] == 0).all()
        covariance = precision.inverse()
        mean = (covariance @ bias)[split:][units]
        covariance = covariance[split:, split:][units][:, units]
        factor = torch.linalg.cholesky(covariance)
        activity = drawn.activity[rows].flatten(1)[:, units]
        white = torch.linalg.solve_triangular(factor, (activity - mean).T, upper=False)
        count = rows.sum().item()
        assert (white.mean(1).abs() <= 5 / count**0.5).all()
        second = white @ white.T / count - torch.eye(len(white))
        assert (second.abs() <= 5 * (2 / count) ** 0.5).all()


@torch.no_grad()
def test_sixteen_thousand_gaussians_take_a_second_and_little_memory():
    """Without couplings log Z is that of independent units, whatever the number of states."""
    families = dict(visible_family="gaussian", hidden_family="gaussian")
    model = CapsuleRBM(784, 14, 16, **families).double()
    model.weight.zero_()
    model.switch_bias.normal_()
    units = (784 + 14 * 16) / 2 * math.log(2 * math.pi)
    switches = torch.nn.functional.softplus(model.switch_bias).sum().item()
    assert log_partition(model).value == pytest.approx(units + switches, rel=1e-12)


def test_machines_are_countable_where_one_side_has_few_states():
    families = dict(visible_family="gaussian", hidden_family="gaussian")
    assert is_countable(CapsuleRBM(784, 25, 16, **families))
    assert not is_countable(CapsuleRBM(784, 26, 16, **families))
    assert is_countable(RBM(784, 500, **families))
    assert is_countable(RBM(25, 500)) and not is_countable(RBM(36, 500))


def test_exact_probabilities_of_all_images_sum_to_one():
    model = small()
    _, images = log_masses(model, PAIRS[0])
    log_density = -model.free_energy(images) - log_partition(model).value
    assert log_density.logsumexp(0).item() == pytest.approx(0, abs=1e-10)


def log_weights_of_annealing(model, families, number, temperatures, reverse):
    """Return log weights divided by the exact ratio of partition functions, in either direction."""
    masses, listed = log_masses(model, families)
    torch.manual_seed(9)
    exact = listed[torch.multinomial(masses.softmax(0).detach(), number, replacement=True)]
    machine = TemperedRBM(model, base_rates(model.visible, exact) - model.visible.bias)
    log_ratio = log_partition(model).value - machine.log_base_partition()
    betas = annealing_schedule(temperatures).tolist()
    if reverse:
        return _anneal(machine, exact, betas[::-1]) + log_ratio
    return _anneal(machine, machine.base_images(number), betas) - log_ratio


@KINDS
@pytest.mark.parametrize("families", [PAIRS[0], ("poisson", "bernoulli")], ids="-".join)
@pytest.mark.parametrize("reverse", [False, True])
@torch.no_grad()
def test_weights_are_unbiased_even_after_a_hasty_annealing(reverse, families, kind):
    """E[w] = Z / Z_0, and its inverse in reverse, for any number of temperatures; here three."""
    weight = log_weights_of_annealing(small(*families, kind=kind), families, 50_000, 3, reverse)
    weight = weight.exp()
    assert (weight.mean() - 1).abs() < 5.5 * weight.std() / math.sqrt(50_000) < 0.1


@KINDS
@torch.no_grad()
def test_a_hasty_annealing_errs_in_the_stated_direction(kind):
    """By Jensen, log Z is low on average over forward chains, and high over reverse ones."""
    model = randomized(small(kind=kind), scale=1.0)
    for reverse in (False, True):
        log_weight = log_weights_of_annealing(model, PAIRS[0], 200_000, 1, reverse)
        assert log_weight.mean() + 5.5 * log_weight.std() / math.sqrt(200_000) < 0


@KINDS
def test_annealing_brackets_the_exact_value(kind):
    """The machine has 12 to 16 hidden units and couplings as large as after training."""
    options = dict(hidden=16) if kind is RBM else dict(capsules=4, units=3)
    model = randomized(kind(16, **options), scale=1.0)
    exact = log_partition(model).value
    start = model.gibbs(model.base_images(400), 400)
    low = log_partition(model, "ais", images=start, temperatures=300)
    high = log_partition(model, "raise", images=start, chains=400, temperatures=300)
    assert (low.direction, high.direction) == ("low", "high")
    assert abs(low.value - exact) < max(0.1, 3 * low.standard_error)
    assert abs(high.value - exact) < max(0.1, 3 * high.standard_error)
    assert low.value - 3 * low.standard_error < exact < high.value + 3 * high.standard_error


def test_gaussian_annealing_agrees_with_the_determinants():
    model = randomized(CapsuleRBM(4, 3, 2, visible_family="gaussian", hidden_family="gaussian"))
    exact = log_partition(model).value
    estimate = log_partition(model, "ais", chains=300, temperatures=300)
    assert abs(estimate.value - exact) < max(0.05, 5 * estimate.standard_error)


def test_the_schedule_is_denser_towards_one():
    betas = annealing_schedule(14_500)
    assert betas[0] == 0 and betas[-1] == 1 and (betas.diff() > 0).all()
    for beta, below in ((0.5, 500), (0.9, 4_500)):
        assert ((betas <= beta + 1e-12).sum() - 1).item() == below


def test_a_machine_whose_density_cannot_be_normalized_is_refused():
    wild = small("gaussian", "gaussian")
    with torch.no_grad():
        wild.weight.mul_(10)
    with pytest.raises(ValueError, match="has no partition function"):
        log_partition(wild)
    with pytest.raises(ValueError, match="has no partition function"):
        exact_samples(wild, 3)
