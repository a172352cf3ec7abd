"""Mixtures of factor analyzers: densities in closed form, EM that never falls, absent parts."""

import pytest
import torch
from torch.distributions import Bernoulli, MultivariateNormal

from capsule_zoo.inference.training.starts.factor_analyzers import (
    FactorAnalyzers,
    fit_factor_analyzers,
)
from capsule_zoo.models import Capsules

KINDS, PARTS, FACTORS = 2, 3, 2


def some_mixture() -> FactorAnalyzers:
    torch.manual_seed(0)
    return FactorAnalyzers(
        torch.tensor([0.3, 0.7]).double(),
        0.1 + 0.8 * torch.rand(KINDS, PARTS).double(),
        torch.randn(KINDS, PARTS, 6).double(),
        0.5 * torch.randn(KINDS, PARTS, 6, FACTORS).double(),
        0.01 + 0.1 * torch.rand(KINDS, PARTS, 6).double(),
    )


def drawn(mixture: FactorAnalyzers, number: int, seed: int = 1) -> tuple[Capsules, torch.Tensor]:
    """Part sets of a mixture, and their kinds."""
    torch.manual_seed(seed)
    kind = torch.multinomial(mixture.fraction, number, replacement=True)
    code = torch.randn(number, FACTORS).double()
    mean = mixture.mean[kind] + torch.einsum("npid,nd->npi", mixture.loadings[kind], code)
    noise = mixture.variance[kind].sqrt() * torch.randn(number, PARTS, 6).double()
    return Capsules(torch.bernoulli(mixture.presence[kind]), mean + noise), kind


def covariance(mixture: FactorAnalyzers, kind: int) -> torch.Tensor:
    slope = mixture.loadings[kind].flatten(0, 1)
    return slope @ slope.T + mixture.variance[kind].flatten().diag()


def test_the_joint_is_the_density_of_the_story():
    mixture = some_mixture()
    parts, _ = drawn(mixture, 7)
    parts = parts._replace(presence=torch.ones(7, PARTS).double())
    for k in range(KINDS):
        distribution = MultivariateNormal(mixture.mean[k].flatten(), covariance(mixture, k))
        expected = distribution.log_prob(parts.pose.flatten(1)) + mixture.fraction[k].log()
        expected = expected + Bernoulli(mixture.presence[k]).log_prob(parts.presence).sum(-1)
        torch.testing.assert_close(mixture.log_joint(parts)[:, k], expected)


def test_principal_codes_are_the_same_distribution_and_independent_given_the_parts():
    mixture = some_mixture()
    rotated = mixture.principal()
    for k in range(KINDS):
        torch.testing.assert_close(covariance(rotated, k), covariance(mixture, k))
    precision = rotated.posterior_precision()
    torch.testing.assert_close(precision, torch.diag_embed(precision.diagonal(dim1=1, dim2=2)))
    assert (precision[:, 0, 0] > precision[:, 1, 1]).all()


def test_updates_raise_the_likelihood_and_find_the_mixture():
    """From clusters that are wrong for a fifth of the part sets."""
    truth = some_mixture()._replace(presence=torch.full((KINDS, PARTS), 0.999).double())
    parts, kind = drawn(truth, 1000)
    clusters = torch.where(torch.rand(1000) < 0.2, 1 - kind, kind)
    reached = []
    for updates in (0, 1, 3, 12):
        mixture = fit_factor_analyzers(parts, clusters, KINDS, FACTORS, [0.01], updates)
        reached.append(mixture.log_joint(parts).logsumexp(-1).mean().item())
    assert reached == sorted(reached)
    exact = truth.log_joint(parts).logsumexp(-1).mean().item()
    assert reached[-1] == pytest.approx(exact, abs=0.1)
    torch.testing.assert_close(mixture.fraction, truth.fraction, atol=0.05, rtol=0)
    torch.testing.assert_close(mixture.mean, truth.mean, atol=0.2, rtol=0)


def test_variances_stay_above_the_last_floor():
    parts, kind = drawn(some_mixture(), 500)
    mixture = fit_factor_analyzers(parts, kind, KINDS, FACTORS, [0.5, 0.2], 3)
    assert mixture.variance.min().item() == pytest.approx(0.04)


def test_poses_of_absent_parts_do_not_matter():
    parts, kind = drawn(some_mixture(), 200)
    away = parts._replace(pose=torch.where(parts.presence[..., None] > 0, parts.pose, 9.0))
    mixtures = [fit_factor_analyzers(p, kind, KINDS, FACTORS, [0.01], 3) for p in (parts, away)]
    for one, other in zip(*mixtures, strict=True):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(mixtures[0].log_joint(parts), mixtures[0].log_joint(away))


def test_a_kind_without_images_is_like_all_images():
    parts, kind = drawn(some_mixture(), 200)
    mixture = fit_factor_analyzers(parts, torch.zeros_like(kind), KINDS, FACTORS, [0.01], 0)
    mask = parts.presence[..., None]
    whole = (mask * parts.pose).sum(0) / mask.sum(0)
    torch.testing.assert_close(mixture.mean[1], whole)
    assert all(torch.isfinite(x).all() for x in mixture)
