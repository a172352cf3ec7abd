"""Mixtures of factor analyzers of part sets, fitted by expectation maximization (EM).

A part set has presences t_i and poses A_i. A mixture of factor analyzers is the story of shape
codes without the object's pose, the dummy, and the influence of codes on presences:

    k   ~ Categorical(fraction)
    c   ~ Normal(0, I)                                            # (d,)
    t_i ~ Bernoulli(presence_ik)                                  # (P,)
    A_i ~ Normal(mean_ik + loadings_ik c, variance_ik)            # (P, 6), seen where t_i is 1

The code has a closed form given the kind, so that EM fits tens of thousands of part sets in seconds
per kind. Variances have a floor, which falls from one round of updates to the next. Where the floor
is high, kinds are distinguished by what is large in a part set, and not by the small but regular
habits of the network that found the parts.

References:
    Ghahramani & Hinton 1996, "The EM algorithm for mixtures of factor analyzers".
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from capsule_zoo.models import Capsules

_LEAST_FRACTION = 1e-3  # least probability of presences and kinds
_NEGLIGIBLE = 1e-4  # responsibility below which an image does not count
_INNER = 3  # updates of loadings and variances for each update of the responsibilities
_FIRST_FRACTION = 0.5  # first fraction of a part's variance that is not due to the code


class FactorAnalyzers(NamedTuple):
    """A mixture of K factor analyzers of P parts.

    Attributes:
        fraction: probability of each kind, (K,).
        presence: probability that a part is present, (K, P).
        mean: (K, P, 6).
        loadings: (K, P, 6, d).
        variance: (K, P, 6).
    """

    fraction: Tensor
    presence: Tensor
    mean: Tensor
    loadings: Tensor
    variance: Tensor

    def log_joint(self, parts: Capsules) -> Tensor:
        """Compute log p(k, parts) for every kind, (N, K), in nats.

        It is exact where all parts are present. Where some are not, the code's covariance is taken
        to be the same as if they were.
        """
        part_presence = parts.presence
        mask = part_presence.repeat_interleave(6, dim=-1)
        pose = parts.pose.flatten(1)
        log_densities = []
        for k in range(len(self.fraction)):
            scale = self.variance[k].flatten().sqrt()
            slope = self.loadings[k].flatten(0, 1) / scale[:, None]  # (6 P, d)
            root = torch.linalg.cholesky(_with_prior(slope.T @ slope))
            away = mask * (pose - self.mean[k].flatten()) / scale
            solved = torch.linalg.solve_triangular(root, (away @ slope).T, upper=False)
            constant = (2 * math.pi * self.variance[k]).log().sum(-1)  # (P,)
            below = away.square().sum(-1) - solved.square().sum(0) + part_presence @ constant
            log_densities.append(-below / 2 - root.diagonal().log().sum())
        below = torch.stack(log_densities, dim=-1)
        presence = part_presence @ self.presence.logit().T + (-self.presence).log1p().sum(-1)
        return self.fraction.log() + presence + below

    def posterior_precision(self) -> Tensor:
        """Compute the precision of the code given its kind and all parts, (K, d, d)."""
        slope = (self.loadings / self.variance.sqrt()[..., None]).flatten(1, 2)
        return _with_prior(slope.mT @ slope)

    def principal(self) -> "FactorAnalyzers":
        """Return an equal distribution whose codes are independent of each other given the parts.

        The first number of a code is what the parts determine best.
        """
        _, vectors = torch.linalg.eigh(self.posterior_precision())
        rotation = vectors.flip(-1)
        return self._replace(loadings=torch.einsum("kpid,kde->kpie", self.loadings, rotation))


def fit_factor_analyzers(
    parts: Capsules,
    clusters: Tensor,
    kinds: int,
    factors: int,
    floors: Sequence[float],
    updates: int = 8,
) -> FactorAnalyzers:
    """Fit a mixture of factor analyzers to part sets, initialized by clusters.

    Args:
        parts: presences (N, P), 0 or 1, and poses (N, P, 6).
        clusters: the kind with which each part set starts, (N,).
        kinds, factors: K and d.
        floors: least standard deviations of poses, one for each round, the last for the result.
        updates: updates of the responsibilities in each round.

    Returns:
        The mixture, with principal codes.
    """
    belief = F.one_hot(clusters, kinds).to(parts.pose)
    whole = _first(parts)
    mixture = whole._replace(
        **{
            name: getattr(whole, name).expand(kinds, *getattr(whole, name).shape[1:]).clone()
            for name in ("fraction", "presence", "mean", "variance")
        },
        loadings=parts.pose.new_zeros(kinds, *parts.pose.shape[1:], factors),
    )
    for k in range(kinds):
        _update(mixture, k, belief[:, k], parts, whole, floors[0], start=True)
    for floor in floors:
        for _ in range(updates):
            fraction = belief.mean(0).clamp(min=_LEAST_FRACTION / kinds)
            mixture.fraction.copy_(fraction / fraction.sum())
            belief = mixture.log_joint(parts).softmax(-1)
            for k in range(kinds):
                _update(mixture, k, belief[:, k], parts, whole, floor)
    return mixture.principal()


def cluster_parts(
    parts: Capsules, number: int, seed: int, subset: Tensor | slice = slice(None)
) -> Tensor:
    """Cluster part sets, (N,), by k-means on presences and poses of present parts.

    Args:
        parts: presences (N, P) and poses (N, P, 6).
        number: number of clusters.
        seed: seed of their first means.
        subset: index of the part sets that the clusters are fitted to; the others join the nearest.
    """
    from sklearn.cluster import KMeans  # takes a second, and few need it

    part_presence = parts.presence[..., None]
    features = (
        torch.cat([part_presence, part_presence * parts.pose], dim=-1).flatten(1).cpu().double()
    )
    means = KMeans(number, n_init=1, random_state=seed).fit(features[subset].numpy())
    return torch.from_numpy(means.predict(features.numpy())).long().to(parts.pose.device)


def _with_prior(gram: Tensor) -> Tensor:
    """Add the prior precision of codes, the identity, to a matrix."""
    return gram + torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)


def _first(parts: Capsules) -> FactorAnalyzers:
    """Return the means and variances of all part sets, as a mixture of one kind."""
    part_presence = parts.presence[..., None]
    number = part_presence.sum(0).clamp(min=1)
    mean = (part_presence * parts.pose).sum(0) / number
    variance = (part_presence * (parts.pose - mean).square()).sum(0) / number
    fraction = parts.presence.mean(0).clamp(_LEAST_FRACTION, 1 - _LEAST_FRACTION)
    one = parts.pose.new_ones(1)
    return FactorAnalyzers(one, fraction[None], mean[None], mean[None, ..., None], variance[None])


def _update(
    mixture: FactorAnalyzers,
    k: int,
    belief: Tensor,
    parts: Capsules,
    whole: FactorAnalyzers,
    floor: float,
    start: bool = False,
) -> None:
    """Update one kind in place, given its responsibilities for all part sets (N,).

    One more part set, with mean and variance of all, counts for every kind.
    """
    rows = (belief > _NEGLIGIBLE).nonzero()[:, 0]
    weight = belief[rows]
    part_weight = weight[:, None] * parts.presence[rows]  # (n, P)
    number = part_weight.sum(0) + 1
    present = (part_weight.sum(0) + whole.presence[0]) / (weight.sum() + 1)
    mixture.presence[k] = present.clamp(_LEAST_FRACTION, 1 - _LEAST_FRACTION)
    pose = parts.pose[rows]
    mean = (torch.einsum("np,npi->pi", part_weight, pose) + whole.mean[0]) / number[:, None]
    mixture.mean[k] = mean
    away = (parts.presence[rows][..., None] * (pose - mean)).flatten(1)
    scale = number.rsqrt().repeat_interleave(6)
    covariance = (weight[:, None] * away).T @ away * scale[:, None] * scale
    covariance += torch.diag((whole.variance[0] / number[:, None]).flatten())
    loadings = mixture.loadings[k].flatten(0, 1)  # a view, (6 P, d)
    variance = mixture.variance[k].flatten()
    if start:
        variance.copy_((_FIRST_FRACTION * covariance.diagonal()).clamp(min=floor**2))
        loadings.copy_(_principal_loadings(covariance, variance, loadings.shape[-1]))
    for _ in range(_INNER):
        _explain(covariance, loadings, variance, floor)


def _principal_loadings(covariance: Tensor, variance: Tensor, factors: int) -> Tensor:
    """Return the loadings (D, d) that best explain a covariance, for given variances (D,)."""
    scale = variance.sqrt()
    values, vectors = torch.linalg.eigh(covariance / scale[:, None] / scale)
    size = (values - 1).clamp(min=1e-3).sqrt()
    best = (scale[:, None] * vectors * size).flip(-1)[:, :factors]
    return F.pad(best, (0, factors - best.shape[-1]))


def _explain(covariance: Tensor, loadings: Tensor, variance: Tensor, floor: float) -> None:
    """Do one EM update of loadings (D, d) and variances (D,), in place, for a covariance."""
    weighted = loadings / variance[:, None]
    posterior = torch.linalg.inv(_with_prior(loadings.T @ weighted))  # covariance of the code
    cross = covariance @ weighted @ posterior  # (D, d)
    second = posterior + posterior @ weighted.T @ cross  # second moment of the code, mean of c c^T
    loadings.copy_(torch.linalg.solve(second, cross.T).T)
    variance.copy_((covariance.diagonal() - (loadings * cross).sum(-1)).clamp(min=floor**2))
