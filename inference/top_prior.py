"""A mixture prior for the top sites of a trained model, fitted to what its guide infers.

A factorial prior is a poor model of the objects in an image, because it draws every object
independently. After training, a mixture replaces the prior of the top sites, and everything below
stays as it is. The mixture is fitted by expectation maximization to the guide's draws on the
training images (the aggregate posterior):

    z ~ Categorical(weight)                                 # the kind of image, one of M
    t | z ~ Bernoulli(probability_z)                        # all binary numbers, (T,)
    a | z ~ Normal(mean_z, covariance)                      # all real numbers, (R,)

All kinds share one covariance, so joint movements of objects (slant, width) are learned from all
images at once. The mixture is a proper density: `log_prob` on held-out images measures its gain in
nats. It works with any model whose top sites can be given values.

>>> top = fit_top_prior(model, infer(guide, images, ["object_presence", "object_pose"]))
>>> mean_images(model, 36, top.sample(36))

References:
    Ghosh, Sajjadi, Vergari, Black & Scholkopf 2020, "From Variational to Deterministic
    Autoencoders" (arXiv 1903.12436), who fit the density of a decoder's codes after training.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from capsule_zoo.data.tensors import accept_arrays
from capsule_zoo.inference.posterior.site_vector import SiteVector
from capsule_zoo.models.base import Model
from capsule_zoo.models.checks import check_whole
from capsule_zoo.models.common.modes import use_seed

_RIDGE = 1e-4  # least variance of a real number, in units of its variance over the images
_NARROWEST = 1e-3  # least standard deviation over the images, in units of the largest
_COUNT = 0.5  # pseudo-count of each value of a binary number


@dataclass(frozen=True, eq=False)
class TopPrior:
    """The mixture prior fitted by `fit_top_prior`; see the top of this file.

    Attributes:
        layout: the columns of the binary sites, and of the real ones.
        log_weight: log weights of the kinds, (M,).
        logits: logits of the binary numbers, (M, T).
        mean: means of the real numbers, (M, R).
        scale_tril: lower Cholesky factor of their covariance, (R, R).
        dtype: type of the draws. The mixture itself is in float64 because some poses hardly vary.
    """

    layout: tuple[SiteVector, SiteVector]
    log_weight: Tensor
    logits: Tensor
    mean: Tensor
    scale_tril: Tensor
    dtype: torch.dtype = torch.float64

    def sample(self, number: int, seed: int = 0) -> dict[str, Tensor]:
        """Sample values (number, ...) of every top site."""
        with use_seed(seed):
            kind = torch.multinomial(self.log_weight.exp(), number, replacement=True)
            binary = torch.bernoulli(self.logits[kind].sigmoid())
            noise = torch.randn_like(self.mean[kind])
        real = self.mean[kind] + noise @ self.scale_tril.T
        tables = zip(self.layout, (binary, real), strict=True)
        parts = [sites.split(table.to(self.dtype))[0] for sites, table in tables]
        return {**parts[0], **parts[1]}

    @accept_arrays("values")
    def log_prob(self, values: Mapping[str, Tensor]) -> Tensor:
        """Compute the log density (N,) of values (N, ...) of the top sites, in nats."""
        binary, real = (sites.join(values).to(self.mean) for sites in self.layout)
        return self.log_joint(binary, real).logsumexp(1)

    def log_joint(self, binary: Tensor, real: Tensor) -> Tensor:
        """Compute log p(z, t, a) for every mixture component z, (N, M)."""
        on, off = F.logsigmoid(self.logits), F.logsigmoid(-self.logits)
        of_binary = binary @ on.T + (1 - binary) @ off.T
        return self.log_weight + of_binary + self._log_normal(real)

    def _log_normal(self, real: Tensor) -> Tensor:
        """Compute log Normal(a; mean_z, covariance), (N, M)."""
        white = torch.linalg.solve_triangular(self.scale_tril, real.T, upper=False).T
        center = torch.linalg.solve_triangular(self.scale_tril, self.mean.T, upper=False).T
        distance = torch.cdist(white, center).square()
        normalizer = real.shape[1] * math.log(2 * math.pi) / 2
        return -distance / 2 - self.scale_tril.diagonal().log().sum() - normalizer


@accept_arrays("values", like="model")
def fit_top_prior(
    model: Model,
    values: Mapping[str, Tensor],
    components: int = 100,
    steps: int = 50,
    seed: int = 0,
) -> TopPrior:
    """Fit the mixture prior to the guide's samples of the top sites, by expectation maximization.

    Args:
        model: the model, which knows the binary sites.
        values: draws (N, ...) by site, as `infer` gives them.
        components: kinds of images, M.
        steps: steps of expectation maximization.
        seed: seed of the choice of images at which the kinds start.

    Raises:
        ValueError: fewer draws than components, a choice, a site that the model does not have.
    """
    check_whole(1, components=components, steps=steps)
    number = len(next(iter(values.values())))
    if number < components:
        raise ValueError(
            f"values hold {number} draws, fewer than components={components}; give more draws, or "
            "fewer components"
        )
    sites = {site.name: site for site in model.discretize().sites}
    if strangers := sorted(set(values) - set(sites)):
        raise ValueError(f"values hold {strangers}, but the model's sites are {sorted(sites)}")
    layout = SiteVector(), SiteVector()
    for name, value in values.items():
        if not value.is_floating_point():
            raise ValueError(
                f"values hold {name!r}, a choice; leave it out, and the model draws it"
            )
        layout[not sites[name].discrete].add(name, value)
    binary, real = (block.join(values).double() for block in layout)
    shift, scale = real.mean(0), real.std(0)
    scale = scale.clamp_min(_NARROWEST * scale.max().item()) if scale.numel() else scale
    real = (real - shift) / scale
    responsibility = _nearest_start(torch.cat([binary, real], dim=1), components, seed)
    total = real.T @ real
    for _ in range(steps):
        prior = _maximize(layout, binary, real, responsibility, total)
        responsibility = prior.log_joint(binary, real).softmax(1)
    prior = _maximize(layout, binary, real, responsibility, total)
    mean, scale_tril = prior.mean * scale + shift, prior.scale_tril * scale[:, None]
    dtype = next(iter(values.values())).dtype
    return replace(prior, mean=mean, scale_tril=scale_tril, dtype=dtype)


def _nearest_start(rows: Tensor, components: int, seed: int) -> Tensor:
    """Assign every row (N, D) wholly to the nearest of `components` chosen rows, (N, M)."""
    permutation = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    nearest = torch.cdist(rows, rows[permutation[:components]]).argmin(1)
    return F.one_hot(nearest, components).to(rows)


def _maximize(
    layout: tuple[SiteVector, SiteVector],
    binary: Tensor,
    real: Tensor,
    responsibility: Tensor,
    total: Tensor,
) -> TopPrior:
    """Return the likeliest mixture given the components' responsibilities, (N, M).

    `total` is the scatter of all real numbers, (R, R). The scatter within kinds is the total minus
    the scatter between kinds.
    """
    count = responsibility.sum(0) + 1e-9
    mean = responsibility.T @ real / count[:, None]
    probability = (responsibility.T @ binary + _COUNT) / (count[:, None] + 2 * _COUNT)
    scatter = total - mean.T @ (count[:, None] * mean)
    covariance = scatter / len(real) + _RIDGE * torch.eye(real.shape[1]).to(real)
    weight = (count / count.sum()).log()
    return TopPrior(layout, weight, probability.logit(), mean, torch.linalg.cholesky(covariance))
