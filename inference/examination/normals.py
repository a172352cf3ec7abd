"""Normal guides to single rows, fitted by Pyro's automatic guides or by moments of NUTS.

    auto_low_rank    Pyro's AutoLowRankMultivariateNormal
    auto_laplace     Pyro's AutoLaplaceApproximation
    nuts             the normal distribution with the moments of draws of Pyro's NUTS

Each is normal in unconstrained space, and becomes a `GaussNewton` guide, with a density for each
row, so that it can be evaluated as all other guides are.
"""

import warnings

import pyro
import torch
from pyro import poutine
from pyro.infer import MCMC, NUTS
from pyro.infer.autoguide import (
    AutoContinuous,
    AutoLaplaceApproximation,
    AutoLowRankMultivariateNormal,
    init_to_value,
)
from pyro.ops.stats import split_gelman_rubin
from torch import Tensor

from capsule_zoo.guides import FreeForm, GaussNewton, Guide
from capsule_zoo.guides.per_image.site_distributions import UnservedSite
from capsule_zoo.inference.check import name_of, one_line
from capsule_zoo.inference.isolation import isolated_parameters
from capsule_zoo.inference.posterior.fitted import fit_to_images
from capsule_zoo.inference.training.settings import Checks
from capsule_zoo.models.base import Model
from capsule_zoo.models.common.modes import use_seed

AGREEING = 1.1  # R-hat above which chains disagree
_CHAINS = 2
_AUTOGUIDES: dict[str, type[AutoContinuous]] = {
    "auto_low_rank": AutoLowRankMultivariateNormal,
    "auto_laplace": AutoLaplaceApproximation,
}


def normal_guide(
    kind: str, model: Model, start: Guide, rows: Tensor, *, steps: int, seed: int
) -> GaussNewton:
    """Fit one of Pyro's automatic guides to each row alone, and return the normal guide.

    Args:
        kind: "auto_low_rank" or "auto_laplace".
        start: the guide whose answers are the first guess.
        rows: (B, F).
        steps: updates for each row.
        seed: seed of the noise.

    Raises:
        UnservedSite: a site is discrete and not summed out; or, for Laplace's method, it is summed
            out, or the curvature at the mode is not positive.
    """
    summed = [site.name for site in model.sites if site.enumerated]
    _refuse_discrete(kind, model, summed if kind == "auto_laplace" else [])
    points = FreeForm(model, rows, start)
    free = poutine.block(model, hide=summed) if summed else model
    start_values = points.point_values()
    means, factors = [], []
    for place, row in enumerate(rows.split(1)):
        values = {name: value[place : place + 1].detach() for name, value in start_values.items()}
        guide = _AUTOGUIDES[kind](free, init_loc_fn=init_to_value(values=values))
        with use_seed(seed), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            fit_to_images(guide, model, row, steps=steps, seed=seed, checks=Checks(progress=False))
            with isolated_parameters(model, guide), pyro.validation_enabled(False):
                mean, factor = _moments(guide, row)
        means.append(mean)
        factors.append(factor)
    return _as_guide(points, torch.stack(means), torch.stack(factors))


def _moments(guide: AutoContinuous, row: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean (D,) and covariance factor (D, D) of a fitted automatic guide.

    Raises:
        UnservedSite: Laplace's method finds no positive curvature.
    """
    if not isinstance(guide, AutoLaplaceApproximation):
        posterior = guide.get_posterior()
        return posterior.loc.detach(), posterior.scale_tril.detach()
    try:
        posterior = guide.laplace_approximation(row).get_posterior()
        return posterior.loc.detach(), posterior.scale_tril.detach()
    except Exception as error:
        raise UnservedSite(
            f"AutoLaplaceApproximation finds no positive curvature at its mode ({one_line(error)})"
            "; use gauss_newton"
        ) from None


def _refuse_discrete(kind: str, model: Model, summed: list[str]) -> None:
    """Raise UnservedSite if a site is discrete."""
    discrete = [site.name for site in model.latent_sites if site.discrete] + summed
    if discrete:
        raise UnservedSite(
            f"{kind} serves continuous sites alone, and {', '.join(discrete)} of "
            f"{name_of(model)} is discrete; use free_form"
        )


def _as_guide(points: FreeForm, means: Tensor, factors: Tensor) -> GaussNewton:
    """Return the normal guide with means (B, D) and covariance factors (B, D, D)."""
    sizes = [loc[0].numel() for loc in points.locs.values()]
    for loc, part in zip(points.locs.values(), means.split(sizes, 1), strict=True):
        loc.data.copy_(part.reshape(loc.shape))
    return GaussNewton(points, dict(zip(points.locs, factors.split(sizes, 1), strict=True)))


def nuts_guide(
    model: Model, start: Guide, rows: Tensor, *, draws: int, seed: int
) -> tuple[GaussNewton, float]:
    """Run NUTS; return the normal guide with its moments, and the chains' largest split R-hat.

    Two chains of half the draws each, after as many updates of their steps, start at the answers
    of a guide. Discrete sites are summed out.

    Raises:
        UnservedSite: a site is discrete and not summed out.
    """
    _refuse_discrete("nuts", model, [])
    points = FreeForm(model, rows, start)
    values = {name: value.detach() for name, value in points.point_values().items()}
    number = max(2, draws // _CHAINS)
    chains = []
    for chain in range(_CHAINS):
        with isolated_parameters(model), use_seed(seed + chain), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kernel = NUTS(model, max_tree_depth=6, init_strategy=init_to_value(values=values))
            sampler = MCMC(kernel, number, warmup_steps=number, disable_progbar=True)
            with pyro.validation_enabled(False):
                sampler.run(rows)
            samples = sampler.get_samples()
        free = [points.continuous(name).transform.inv(samples[name]) for name in points.locs]
        chains.append(torch.cat([element.reshape(number, len(rows), -1) for element in free], 2))
    both = torch.stack(chains)  # (chains, draws, B, D)
    worst = float(split_gelman_rubin(both, chain_dim=0, sample_dim=1).max())
    every = both.flatten(0, 1)
    mean = every.mean(0)
    apart = (every - mean).transpose(0, 1)  # (B, draws, D)
    covariance = apart.mT @ apart / (len(every) - 1)
    ridge = 1e-6 * covariance.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
    factor = torch.linalg.cholesky(covariance + ridge * torch.eye(mean.shape[1]).to(mean))
    return _as_guide(points, mean, factor), worst
