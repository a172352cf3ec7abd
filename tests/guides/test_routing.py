"""Routings: each step at its optimum, bounds that climb, and the mistakes of public code."""

import itertools
import math

import pytest
import torch
from torch.nn.functional import normalize

from capsule_zoo.guides import DynamicRouting, EMRouting, VBRouting
from capsule_zoo.models.routing.parent_distribution import (
    ParentDistribution,
    best_belief,
    free_energy,
)
from capsule_zoo.models.routing.votes import Votes, Windows

B, I, J, D = 3, 8, 4, 5  # noqa: E741
KINDS = [EMRouting, VBRouting, DynamicRouting]
STANDARDIZED = EMRouting(3, anneal="linear", costs="standardized")
ROUTINGS = [EMRouting(3), EMRouting(3, e_step="exact"), VBRouting(3), DynamicRouting(3)]
ROUTINGS += [STANDARDIZED]


def rand(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def distribution(parents=J, inverse_temperature=1.0, noise=0.05, beta_a=0.2, beta_u=-6.0):
    betas = (torch.full((parents,), float(beta)).double() for beta in (beta_a, beta_u))
    return ParentDistribution(*betas, inverse_temperature, noise)


@pytest.fixture
def votes():
    return Votes.dense(rand(B, I, J, D), torch.rand(B, I, dtype=torch.float64))


def free_energy_of(votes, responsibility, mean, variance, logits, distribution):
    belief = best_belief(votes, responsibility, distribution)
    return free_energy(
        votes, belief._replace(mean=mean, variance=variance, logits=logits), distribution
    ).sum()


@pytest.mark.parametrize("inverse_temperature", [1.0, 0.01])
def test_m_step_is_the_minimum_of_the_free_energy(votes, inverse_temperature):
    rule = distribution(inverse_temperature=inverse_temperature)
    responsibility = votes.compete(rand(B, 1, J, I))
    best = best_belief(votes, responsibility, rule)
    point = [x.clone().requires_grad_() for x in (best.mean, best.variance, best.logits)]
    slopes = torch.autograd.grad(free_energy_of(votes, responsibility, *point, rule), point)
    assert max(s.abs().max() for s in slopes) < 1e-9
    least = free_energy_of(votes, responsibility, *point, rule)
    for _ in range(20):
        near = [p * torch.exp(0.1 * torch.randn_like(p)) for p in point]
        assert free_energy_of(votes, responsibility, *near, rule) > least


def test_exact_e_step_is_the_minimum_of_the_free_energy(votes):
    rule = distribution()
    belief = best_belief(votes, votes.compete(rand(B, 1, J, I)), rule)
    best = belief._replace(
        responsibility=EMRouting(e_step="exact").responsibilities(votes, belief, rule)
    )
    least = free_energy(votes, best, rule)
    for _ in range(20):
        other = (best.responsibility.log() + 0.1 * rand(B, 1, J, I)).softmax(2)
        assert (free_energy(votes, best._replace(responsibility=other), rule) > least).all()


@pytest.mark.parametrize("power", [0.2, 0.6, 1.5])
def test_e_step_with_a_power_is_the_minimum_with_the_entropy_divided_by_it(votes, power):
    """A temperature 1 / power adds (1 / power - 1) sum_ij w_i R_ij ln R_ij to the free energy."""
    rule = distribution()
    belief = best_belief(votes, votes.compete(rand(B, 1, J, I)), rule)
    routing = EMRouting(e_step="exact", power=power)

    def tempered(responsibility):
        negentropy = (votes.presence * torch.xlogy(responsibility, responsibility)).sum((1, 2, 3))
        energy = free_energy(votes, belief._replace(responsibility=responsibility), rule)
        return energy + (1 / power - 1) * negentropy

    best = routing.responsibilities(votes, belief, rule)
    for _ in range(20):
        other = (best.log() + 0.1 * rand(B, 1, J, I)).softmax(2)
        assert (tempered(other) > tempered(best)).all()


def test_the_power_of_a_routing_flattens_the_responsibilities(votes):
    rule = distribution()
    belief = best_belief(votes, votes.uniform(), rule)
    posterior = VBRouting().posterior(votes.gather(votes.uniform()), rule)
    for sharp, flat, condition in (
        (EMRouting(), EMRouting(power=0.5), belief),
        (VBRouting(), VBRouting(power=0.5), posterior),
    ):
        root = sharp.responsibilities(votes, condition, rule).sqrt()
        responsibility = flat.responsibilities(votes, condition, rule)
        torch.testing.assert_close(responsibility, root / root.sum(2, keepdim=True))


def test_papers_e_step_is_a_times_n(votes):
    rule = distribution()
    belief = best_belief(votes, votes.uniform(), rule)
    values = votes.values.unflatten(0, votes.shape)
    normal = torch.distributions.Normal(belief.mean[..., None], belief.variance[..., None].sqrt())
    density = normal.log_prob(values) - 0.5 * rule.noise / belief.variance[..., None]
    claim = belief.presence[..., None] * density.sum(3).exp()
    responsibility = EMRouting().responsibilities(votes, belief, rule)
    torch.testing.assert_close(responsibility, claim / claim.sum(2, keepdim=True))


@pytest.mark.parametrize("inverse_temperature", [1.0, 0.1, 0.01])
def test_free_energy_of_exact_em_never_rises(votes, inverse_temperature):
    rule = distribution(inverse_temperature=inverse_temperature)
    energies = EMRouting(15, anneal=0, e_step="exact").free_energies(votes, rule)
    assert (energies.diff(dim=0) < 1e-9).all()
    assert (energies[0] - energies[-1] > 1e-3).all()


def test_free_energy_of_exact_em_never_rises_between_windows():
    windows = Windows.sliding(4, 4, 3, 1)
    votes = Votes(rand(2, 4, J, D, 18), torch.rand(2, 4, 18, dtype=torch.float64), windows)
    energies = EMRouting(10, anneal=0, e_step="exact").free_energies(votes, distribution())
    assert (energies.diff(dim=0) < 1e-9).all()


def test_bound_of_variational_bayes_never_falls(votes):
    rule, routing = distribution(), VBRouting(15)
    bounds = torch.stack(
        [routing.bound(votes, b.responsibility, rule) for b in routing.beliefs(votes, rule)]
    )
    assert (bounds.diff(dim=0) > -1e-9).all()
    assert (bounds[-1] - bounds[0] > 1e-3).all()


def test_variational_bayes_of_many_votes_under_a_vague_prior_is_em():
    votes = Votes.dense(rand(1, 2000, J, D))
    vague = VBRouting(1, kappa=1e-12, nu=1e-12, psi=1e-12)
    belief, expected = (routing(votes, distribution()) for routing in (vague, EMRouting(1)))
    torch.testing.assert_close(belief.mean, expected.mean)
    torch.testing.assert_close(belief.variance, expected.variance)
    torch.testing.assert_close(belief.logits, expected.logits, rtol=0.05, atol=0)


def log_evidence(values, routing):
    """Compute the evidence of votes (n, D) of one parent, Normal-Gamma prior with mean 0."""
    n = len(values)
    kappa, shape = routing.kappa + n, (routing.nu + n) / 2
    mean = values.mean(0) if n else torch.zeros(values.shape[1]).double()
    scatter = (values - mean).square().sum(0) + routing.kappa * n / kappa * mean.square()
    rate = torch.as_tensor((routing.psi + scatter) / 2)
    prior = routing.nu / 2
    terms = (
        math.lgamma(shape)
        - math.lgamma(prior)
        + prior * math.log(routing.psi / 2)
        - shape * rate.log()
        + 0.5 * math.log(routing.kappa / kappa)
        - 0.5 * n * math.log(2 * math.pi)
    )
    return terms.sum()


def test_bound_of_variational_bayes_is_the_evidence_of_a_single_parent():
    values, routing = rand(1, 6, 1, D), VBRouting(2, kappa=0.7, nu=5.0, psi=2.0)
    votes = Votes.dense(values)
    bounds = routing.bound(votes, votes.uniform(), distribution(1, noise=0.0))
    torch.testing.assert_close(bounds[0], log_evidence(values[0, :, 0], routing))


def test_bound_of_variational_bayes_lies_below_the_evidence():
    """The evidence sums all 3^4 choices of parents, with the weights integrated out."""
    values, parents, routing = rand(1, 4, 3, 2), 3, VBRouting(30, alpha=0.8, nu=4.0)
    terms = []
    for choice in itertools.product(range(parents), repeat=4):
        counts = torch.tensor([choice.count(j) for j in range(parents)]).double()
        weights = torch.lgamma(routing.alpha + counts).sum() - torch.lgamma(
            torch.tensor(parents * routing.alpha + 4)
        )
        weights += math.lgamma(parents * routing.alpha) - parents * math.lgamma(routing.alpha)
        assignment = torch.tensor(choice)
        fits = [log_evidence(values[0, assignment == j, j], routing) for j in range(parents)]
        terms.append(weights + sum(fits))
    evidence = torch.stack(terms).logsumexp(0)
    votes = Votes.dense(values)
    *_, last = routing.beliefs(votes, distribution(parents, noise=0.0))
    bound = routing.bound(votes, last.responsibility, distribution(parents, noise=0.0))[0]
    assert evidence - 3 < bound < evidence


def test_dynamic_routing_is_the_papers_procedure():
    values = rand(B, I, J, D)
    agreement = torch.zeros(B, I, J, dtype=torch.float64)
    for _ in range(3):
        total = (agreement.softmax(2)[..., None] * values).sum(1) / (I / J)
        length = total.norm(dim=-1, keepdim=True)
        vector = length**2 / (1 + length**2) * total / length
        agreement = agreement + (values * vector[:, None]).sum(-1)
    belief = DynamicRouting(3)(Votes.dense(values), distribution())
    torch.testing.assert_close(normalize(belief.mean[:, 0], dim=2), normalize(vector, dim=2))
    torch.testing.assert_close(belief.presence[:, 0], vector.norm(dim=2))


def test_temperatures_are_those_of_the_released_code(votes):
    """lambda_t = .01 (1 - .95^(t + 1)); with equal fractions log-odds are proportional to it."""
    rule = distribution(inverse_temperature=0.01)
    (first,) = EMRouting(1).beliefs(votes, rule)
    plain = best_belief(votes, votes.uniform(), rule._replace(inverse_temperature=1.0))
    torch.testing.assert_close(first.logits, 0.01 * (1 - 0.95) * plain.logits)
    cooled = EMRouting(3)._cool(rule, 2)
    assert cooled.inverse_temperature == pytest.approx(0.01 * (1 - 0.95**3))


@pytest.mark.parametrize("routing", ROUTINGS, ids=repr)
def test_parents_are_those_of_the_last_belief(routing, votes):
    *_, last = routing.beliefs(votes, distribution())
    torch.testing.assert_close(routing.parents(votes, distribution()), (last.mean, last.logits))
    torch.testing.assert_close(routing(votes, distribution()), last)


@pytest.mark.parametrize("routing", ROUTINGS, ids=repr)
def test_a_childs_presence_counts(routing):
    """Renormalizing r a over the parents would cancel it."""
    values, presence = rand(1, I, J, D), torch.ones(1, I, dtype=torch.float64)
    half = presence.clone()
    half[0, 0] = 0.5
    beliefs = [
        routing(Votes.dense(values, w), distribution(inverse_temperature=0.1))
        for w in (presence, half)
    ]
    assert (beliefs[0].mean - beliefs[1].mean).abs().max() > 1e-3
    assert (beliefs[0].logits - beliefs[1].logits).abs().max() > 1e-3


def test_standardized_costs_compare_the_parents_of_a_position(votes):
    """Hui's M step, number by number; the temperature of the distribution does not matter."""
    rule = distribution(beta_a=0.7, inverse_temperature=0.3)
    values = votes.values.unflatten(0, votes.shape)
    for iteration, belief in enumerate(STANDARDIZED.beliefs(votes, rule), start=1):
        for b in range(B):
            costs = []
            for j in range(J):
                weight = votes.presence[b, 0, 0] * belief.responsibility[b, 0, j]
                mean = (weight * values[b, 0, j]).sum(1) / weight.sum()
                apart = (values[b, 0, j] - mean[:, None]).square()
                variance = (weight * apart).sum(1) / weight.sum() + rule.noise
                entropy = 0.5 * (2 * math.pi * math.e * variance).log().sum()
                costs.append(((entropy + rule.beta_u[j]) * weight.sum()).item())
            middle = sum(costs) / J
            scale = math.sqrt(sum((cost - middle) ** 2 for cost in costs) / J)
            for j, cost in enumerate(costs):
                fraction = 0.7 / (D * I / J)
                expected = iteration * (fraction + (middle - cost) / scale)
                assert belief.logits[b, 0, j].item() == pytest.approx(expected)


@pytest.mark.parametrize("kind", KINDS[:2])
def test_a_linear_temperature_starts_at_the_distributions_and_rises_by_it(kind, votes):
    once, still = (
        kind(1, anneal=schedule)(votes, distribution()).logits for schedule in ("linear", 0)
    )
    torch.testing.assert_close(once, still)
    assert [kind(anneal="linear").factor(iteration) for iteration in range(3)] == [1, 2, 3]


@pytest.mark.parametrize("routing", ROUTINGS[:3], ids=repr)
def test_nothing_is_there_when_no_child_is(routing):
    """Standardized costs would switch half of the parents on where votes are scattered."""
    rule = distribution(beta_a=-4.0)
    belief = routing(Votes.dense(rand(1, I, J, D), torch.zeros(1, I).double()), rule)
    cold = 1.0 - routing.anneal**routing.iterations
    torch.testing.assert_close(belief.logits, torch.full_like(belief.logits, -4.0 * cold))
    scattered = routing(Votes.dense(10 * rand(1, I, J, D)), rule._replace(inverse_temperature=10.0))
    assert (scattered.presence < 0.5).all()


@pytest.mark.parametrize("routing", ROUTINGS[:2], ids=repr)
def test_moving_all_votes_moves_the_parents_and_nothing_else(routing):
    """This holds for EM alone: VB's prior and dynamic routing's squash tie poses to the origin."""
    values, shift = rand(B, I, J, D), rand(D)
    still, moved = (routing(Votes.dense(v), distribution()) for v in (values, values + shift))
    torch.testing.assert_close(moved.mean, still.mean + shift)
    torch.testing.assert_close(moved.logits, still.logits)


@pytest.mark.parametrize("routing", ROUTINGS, ids=repr)
def test_free_energies_are_reported_on_the_same_votes(routing, votes):
    energies = routing.free_energies(votes, distribution())
    assert energies.shape == (3, B)
    torch.testing.assert_close(energies[0], EMRouting().free_energies(votes, distribution())[0])


def test_softmax_is_over_all_parents_of_a_windowed_layer():
    """One parent type, nine windows: a child seen from all nine gives a ninth to each at first."""
    windows = Windows.sliding(5, 5, 3, 1)
    votes = Votes(rand(1, 9, 1, D, 9), torch.ones(1, 9, 9).double(), windows)
    responsibility = EMRouting(1)(votes, distribution(1)).responsibility
    middle = (windows.cells == 12).nonzero()
    assert len(middle) == 9
    for position, place in middle.tolist():
        assert responsibility[0, position, 0, place] == pytest.approx(1 / 9)
