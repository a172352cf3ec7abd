"""The layer as a Pyro model: its ELBO is minus the free energy, its marginals are the E step."""

import math

import numpy as np
import pytest
import torch
from pyro.infer import TraceEnum_ELBO, config_enumerate

from capsule_zoo.guides import EMRouting, RoutedParents
from capsule_zoo.models import SwitchableGaussians
from capsule_zoo.models.routing.parent_distribution import (
    ParentDistribution,
    free_energy,
    parent_logits,
    unclaimed_log_density,
    vote_log_density,
)
from capsule_zoo.models.routing.votes import Votes

B, I, J, D = 2, 5, 3, 4  # noqa: E741


@pytest.fixture
def layer():
    torch.manual_seed(0)
    return SwitchableGaussians(I, J, D, beta_a=0.3, beta_u=-4.0, noise=0.1).double()


@pytest.fixture
def votes():
    return torch.randn(B, I, J, D, dtype=torch.float64)


def exact(layer, iterations):
    routing = EMRouting(iterations, anneal=0, e_step="exact")
    return RoutedParents(layer, routing)


def test_compute_marginals_are_the_e_step(layer, votes):
    guide = exact(layer, 3)
    marginals = TraceEnum_ELBO(max_plate_nesting=2).compute_marginals(layer, guide, votes)
    responsibility = marginals["child_parent"].probs.squeeze()  # (B, I, J)
    dense = Votes.dense(votes)
    expected = guide.routing.responsibilities(
        dense, guide.routing(dense, layer.distribution()), layer.distribution()
    )
    torch.testing.assert_close(responsibility, expected[:, 0].mT, rtol=0, atol=1e-6)
    assert (responsibility - 1 / J).abs().max() > 0.1


def test_the_elbo_is_minus_the_free_energy_after_an_e_step(layer, votes):
    """Children are partly present, sum_i w_i ln sum_j ..., and the two agree to the digit."""
    presence = torch.rand(B, I, dtype=torch.float64)
    guide = exact(layer, 3)
    loss = TraceEnum_ELBO(max_plate_nesting=2).loss(
        layer, config_enumerate(guide, "parallel"), votes, presence
    )
    dense, distribution = Votes.dense(votes, presence), layer.distribution()
    belief = guide.routing(dense, distribution)
    belief = belief._replace(
        responsibility=guide.routing.responsibilities(dense, belief, distribution)
    )
    assert loss == pytest.approx(free_energy(dense, belief, distribution).sum().item(), abs=1e-9)


def test_vote_log_density_is_the_mean_over_noisy_votes(layer, votes):
    """The mean E ln Normal(V + e; mu, sigma2) is computed by Gauss-Hermite quadrature."""
    mean, variance = torch.randn(B, 1, J, D).double(), torch.rand(B, 1, J, D).double() + 0.1
    points, weights = map(torch.tensor, np.polynomial.hermite_e.hermegauss(5))
    noisy = votes[..., None] + math.sqrt(layer.noise) * points
    distribution = torch.distributions.Normal(mean[..., None], variance[..., None].sqrt())
    expected = (distribution.log_prob(noisy) * weights / weights.sum()).sum((-1, -2))  # (B, I, J)
    log_density = vote_log_density(Votes.dense(votes), mean, variance, layer.noise)
    torch.testing.assert_close(log_density[:, 0].mT, expected)


def test_presence_is_the_papers_logistic_of_cost():
    """Procedure 1 has a = sigmoid(lambda [beta_a - sum_d (beta_u + ln sigma_d) n])."""
    beta_a, beta_u = torch.tensor([0.7]).double(), torch.tensor([0.4]).double()
    count, variance = torch.tensor([[2.5]]).double(), torch.rand(1, 16).double()
    distribution = ParentDistribution(beta_a, unclaimed_log_density(beta_u, 16), 0.01)
    cost = (beta_u + 0.5 * variance.log()).sum() * 2.5
    torch.testing.assert_close(parent_logits(count, variance, distribution), 0.01 * (beta_a - cost))
