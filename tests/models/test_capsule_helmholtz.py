"""The capsule Helmholtz machine against the paper's energies, summed by brute force."""

import itertools

import pytest
import torch
from machines import binary, helmholtz_pair
from pyro import poutine

from capsule_zoo.inference import check_pair
from capsule_zoo.models.units.switched_units import CapsuleState

EXACT = dict(rtol=0, atol=1e-10)


def every_state(model):
    """Return all values of all latent sites, (states, ...) by name."""
    tables = []
    for name, layer in zip(model.layer_names, model.layers, strict=True):
        capsules, units = layer.hidden.bias.shape
        tables.append((f"{name}_switch", binary(capsules)))
        tables.append((f"{name}_hidden", binary(capsules, units)))
    indices = torch.cartesian_prod(*[torch.arange(len(table)) for _, table in tables])
    return {name: table[indices[:, i]] for i, (name, table) in enumerate(tables)}


def log_joint(program, values, images):
    """Compute the log density of a model or a guide at these values of the latent sites, (B,)."""
    trace = poutine.trace(poutine.condition(program, data=values)).get_trace(images)
    trace.compute_log_prob()
    sites = [site for site in trace.nodes.values() if site["type"] == "sample"]
    return sum(s["log_prob"].sum(-1) for s in sites if s["log_prob"].dim() == 2)


def energy_of_layer(layer, z, h, above):
    """Compute -E of a layer given the one above, as in the paper; z (..., K), h (..., K, J)."""
    total = (layer.hidden.bias * h).sum((-2, -1)) + (layer.switch_bias * z).sum(-1)
    if above is None:
        return total
    coupling = layer.coupling
    (capsules, units), above_units = layer.hidden.bias.shape, above[1].shape[-1]
    weight = coupling.weight.view(-1, above_units, capsules, units)
    for k, j in itertools.product(range(capsules), range(units)):
        for i, u in itertools.product(range(above[0].shape[-1]), range(above_units)):
            pull = above[0][..., i] * above[1][..., i, u] * weight[i, u, k, j]
            total = total + pull * z[..., k] * h[..., k, j]
    return total + (z * (above[0] @ coupling.switch_weight)).sum(-1)


def test_the_joint_is_the_product_of_normalized_energies():
    """Every conditional is exp(-E) over its partition function, found by summing all states."""
    model, _ = helmholtz_pair(4, (2, 2), 1)
    values = every_state(model)
    size = len(next(iter(values.values())))
    images = torch.randint(2, (1, 1, 2, 2)).double().expand(size, -1, -1, -1)
    expected = torch.zeros(size, dtype=torch.float64)
    above = None
    for name, layer in zip(model.layer_names, model.layers, strict=True):
        z, h = values[f"{name}_switch"], values[f"{name}_hidden"]
        capsules, units = layer.hidden.bias.shape
        every = torch.cartesian_prod(
            torch.arange(2**capsules), torch.arange(2 ** (capsules * units))
        )
        all_z, all_h = binary(capsules)[every[:, 0]], binary(capsules, units)[every[:, 1]]
        told = None if above is None else tuple(v[:, None] for v in above)
        normalizer = energy_of_layer(layer, all_z, all_h, told).logsumexp(-1)
        expected = expected + energy_of_layer(layer, z, h, above) - normalizer
        above = (z, h)
    z, h = above
    field = model.visible.bias.flatten() + z @ model.switch_weight.T
    field = field + torch.einsum("sk,skj,mkj->sm", z, h, model.weight)
    pixels = images.flatten(1)
    expected = expected + (pixels * field - (1 + field.exp()).log()).sum(1)
    torch.testing.assert_close(log_joint(model, values, images), expected, **EXACT)


def test_with_one_parent_the_joint_sums_over_every_choice_of_parents():
    """The choices of the lower capsules are listed, and each conditional is normalized alone."""
    model, _ = helmholtz_pair(4, (2, 2), 1, parents="one")
    lower = model.layers[1]
    values = every_state(model)
    images = torch.randint(2, (1, 1, 2, 2)).double()
    images = images.expand(len(values["capsule1_switch"]), -1, -1, -1)
    z, h = values["capsule2_switch"], values["capsule2_hidden"]
    below, units = values["capsule1_switch"], values["capsule1_hidden"]
    states = torch.cartesian_prod(torch.arange(2.0), torch.arange(2.0)).double()

    def log_choice(k, parent):
        weights = torch.cat([torch.ones_like(z[:, :1]), z * lower.log_affinity[:, k].exp()], 1)
        return (weights / weights.sum(1, keepdim=True))[:, parent].log()

    def energy(k, parent, switch, unit):
        pull = push = torch.zeros(())
        if parent:
            on = z[:, parent - 1]
            pull = on * h[:, parent - 1, 0] * lower.coupling.weight[parent - 1, k, 0]
            push = on * lower.coupling.switch_weight[parent - 1, k]
        total = switch * (lower.switch_bias[k] + push + unit * pull)
        return total + unit * lower.hidden.bias[k, 0]

    terms = []
    for choice in itertools.product(range(3), repeat=2):
        term = torch.zeros(len(z)).double()
        for k, parent in enumerate(choice):
            normalizer = torch.stack([energy(k, parent, *state) for state in states]).logsumexp(0)
            term = term + log_choice(k, parent) - normalizer
            term = term + energy(k, parent, below[:, k], units[:, k, 0])
        terms.append(term)
    both, _ = helmholtz_pair(4, (2, 2), 1)  # equal at the top and at the image
    both.load_state_dict(model.state_dict(), strict=False)
    trace = poutine.trace(poutine.condition(both, data=values)).get_trace(images)
    trace.compute_log_prob()
    others = ("capsule2_switch", "capsule2_hidden", "image")
    others = sum(trace.nodes[name]["log_prob"].sum(-1) for name in others)
    expected = torch.stack(terms).logsumexp(0) + others
    torch.testing.assert_close(log_joint(model, values, images), expected, **EXACT)


@pytest.mark.parametrize("hidden_family", ["bernoulli", "gaussian", "poisson"])
def test_one_parent_of_one_capsule_that_is_always_preferred_is_all_parents(hidden_family):
    """With a single parent of nearly infinite affinity nothing is left to choose."""
    options = dict(hidden_family=hidden_family, scale=0.3)
    one, guide = helmholtz_pair(4, (1, 2), 2, parents="one", **options)
    both, _ = helmholtz_pair(4, (1, 2), 2, **options)
    both.load_state_dict(one.state_dict(), strict=False)
    torch.nn.init.constant_(one.layers[1].log_affinity, 200.0)
    images = torch.rand(6, 1, 2, 2).double()
    check_pair(one, guide, images)
    trace = poutine.trace(guide).get_trace(images)
    values = {name: trace.nodes[name]["value"] for name in (s.name for s in both.sites)}
    on = values["capsule2_switch"].all(1)
    assert on.sum() > 0
    joints = [log_joint(model, values, images) for model in (one, both)]
    torch.testing.assert_close(joints[0][on], joints[1][on], **EXACT)
    states = [
        m.layers[1](CapsuleState(*[torch.ones(6, 1, *u).double() for u in ((), (2,))]), 6)
        for m in (one, both)
    ]
    for mine, expected in zip(*(state.mean() for state in states), strict=True):
        torch.testing.assert_close(mine, expected, **EXACT)


def test_units_with_one_parent_have_the_moments_of_their_mixture():
    model, _ = helmholtz_pair(1, (2, 1), 2, parents="one", hidden_family="gaussian")
    above = CapsuleState(torch.ones(1, 2).double(), torch.randn(1, 2, 2).double())
    distribution = model.layers[1](above, 1)
    units = distribution.hidden(torch.ones(1, 1).double())
    values = units.sample((40_000,))[:, 0, 0]
    weight, spread = units.log_weight.exp()[:, 0, 0], distribution.units.precision.rsqrt()
    means = distribution.units.mean(distribution.conditional.field)[:, 0, 0]
    mean = (weight[:, None] * means).sum(0)
    variance = (weight[:, None] * means.square()).sum(0) - mean.square() + spread[0].square()
    assert ((values.mean(0) - mean).abs() < 5 * (variance / 40_000).sqrt()).all()
    torch.testing.assert_close(values.var(0), variance, rtol=0.05, atol=0)


@pytest.mark.parametrize("parents", ["all", "one"])
def test_the_joint_sums_to_one(parents):
    model, _ = helmholtz_pair(1, (2, 1), 2, parents=parents)
    values, total = every_state(model), []
    size = len(next(iter(values.values())))
    for pixel in (0.0, 1.0):
        images = torch.full((size, 1, 1, 1), pixel).double()
        total.append(log_joint(model, values, images).logsumexp(0))
    assert torch.stack(total).logsumexp(0).item() == pytest.approx(0, abs=1e-10)


def test_recognition_sums_to_one_and_fits_every_family():
    model, guide = helmholtz_pair(4, (1, 2), 2)
    values = every_state(model)
    images = torch.rand(1, 1, 2, 2).double().expand(len(values["capsule1_switch"]), -1, -1, -1)
    assert log_joint(guide, values, images).logsumexp(0).item() == pytest.approx(0, abs=1e-10)
    for families in itertools.product(("bernoulli", "gaussian", "poisson"), repeat=2):
        options = dict(zip(("visible_family", "hidden_family"), families, strict=True))
        pair = helmholtz_pair((1, 2, 3), (3, 2), 2, scale=0.3, **options)  # counts stay finite
        check_pair(*pair, torch.rand(2, 1, 2, 3).double())


def test_units_of_capsules_that_are_off_cancel():
    """Both halves draw them from one base distribution, so log weights do not depend on them."""
    model, guide = helmholtz_pair(4, (2, 2), 2)
    images = torch.rand(6, 1, 2, 2).double()
    trace = poutine.trace(guide).get_trace(images)

    def log_weight():
        total = 0
        for sign, program in ((1, model), (-1, guide)):
            replayed = poutine.trace(poutine.replay(program, trace=trace)).get_trace(images)
            total = total + sign * replayed.log_prob_sum()
        return total

    before = log_weight()
    for name in model.layer_names:
        off = trace.nodes[f"{name}_switch"]["value"] == 0
        assert off.any()
        hidden = trace.nodes[f"{name}_hidden"]
        hidden["value"] = torch.where(off[..., None], 1 - hidden["value"], hidden["value"])
    torch.testing.assert_close(log_weight(), before, **EXACT)


@pytest.mark.parametrize("parents", ["all", "one"])
def test_ancestral_draws_have_the_exact_mean(parents):
    model, _ = helmholtz_pair(1, (2, 1), 2, parents=parents)
    values = every_state(model)
    size = len(next(iter(values.values())))
    images = torch.ones(size, 1, 1, 1).double()
    mean = log_joint(model, values, images).logsumexp(0).exp().item()
    drawn = model(batch_size=20_000)
    assert drawn.mean().item() == pytest.approx(mean, abs=5.5 * 0.5 / 20_000**0.5)


def test_gibbs_recognizes_all_layers_and_generates_from_the_top_one():
    model, guide = helmholtz_pair(4, (2, 2), 2)
    images = expected = torch.rand(5, 1, 2, 2).double()
    torch.manual_seed(0)
    for _ in range(3):
        nodes = poutine.trace(guide).get_trace(expected).nodes
        top = {name: nodes[name]["value"] for name in ("capsule2_switch", "capsule2_hidden")}
        expected = poutine.condition(model, data=top)(batch_size=5)
    torch.manual_seed(0)
    assert torch.equal(guide.gibbs(images, 3), expected)
    assert torch.equal(guide.gibbs(images, 0), images)


def test_expectations_are_means_of_recognition():
    _, guide = helmholtz_pair(4, (2, 2), 2)
    images = torch.rand(1, 1, 2, 2).double().expand(40_000, -1, -1, -1)
    trace = poutine.trace(guide).get_trace(images)
    switch = trace.nodes["capsule1_switch"]["value"]
    activity = switch[..., None] * trace.nodes["capsule1_hidden"]["value"]
    expected = guide.expectations(images[:1])
    for drawn, mean in ((switch, expected.switch), (activity, expected.activity)):
        assert ((drawn.mean(0) - mean[0]).abs() < 5.5 * 0.5 / 200).all()
