"""Simulation-based calibration: a test of whether a guide equals the posterior of its model.

>>> result = check_calibration(model, guide, number=1000)
>>> result.p                                           # small: the guide is not the posterior
>>> print(result)                                      # the quantities that are off, worst first

Latents and images are drawn from the model. The latents of an image are then one exact draw of its
posterior. Among L draws from an exact guide their rank is uniform, from 0 to L, for every quantity.
Quantities are all numbers of all sites, and the log joint density, which depends on the image too.
The worst quantity counts, and its p-value is multiplied by the number of quantities (Bonferroni:
valid under any dependence).

No approximate guide is exactly calibrated, and with enough simulations every one is refused. The
size of the standard deviation is in the ranks: a guide that is too narrow has too many ranks at
both ends, and a shifted one at one end.

>>> ranks = sbc_ranks(truth, draws)                    # (N, D) among (L, N, D)
>>> rank_uniformity(ranks, len(draws)).p               # small: not a posterior of this prior

References:
    Talts, Betancourt, Simpson, Vehtari & Gelman 2018, "Validating Bayesian Inference Algorithms
    with Simulation-Based Calibration" (arXiv 1804.06788). Modrak et al. 2023, "Simulation-Based
    Calibration Checking for Bayesian Computation: The Choice of Test Quantities Shapes
    Sensitivity" (arXiv 2211.02383): ranks of parameters alone do not notice a posterior that
    ignores the data, so some quantity must depend on both.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from pyro import poutine, validation_enabled
from torch import Tensor

from capsule_zoo.data.tensors import accept_arrays
from capsule_zoo.inference.annealing.path import score_latents, simulate
from capsule_zoo.inference.check import check_pair, latent_sites, name_of
from capsule_zoo.inference.evaluation.prepare import discrete_form, is_per_image
from capsule_zoo.inference.examination.pairs import replace_program
from capsule_zoo.inference.isolation import isolated_parameters
from capsule_zoo.inference.log_weight import enumerated_sites, log_density
from capsule_zoo.models.checks import check_seed, check_whole
from capsule_zoo.models.common.modes import eval_mode, use_seed
from capsule_zoo.models.common.spaces import ObservationSpace, space_of, tile_batch

Values = Mapping[str, Tensor]
JOINT = "log joint"
_FEWEST = 5  # expected simulations per bin; with fewer the chi-square distribution fails


class Outcome(NamedTuple):
    """The result of a test: its statistic and p-value.

    Attributes:
        statistic: the worst chi-square, or the worst absolute z.
        n: independent simulations.
        p: the p-value of the worst statistic, corrected for the number of statistics examined.
    """

    statistic: float
    n: int
    p: float


@accept_arrays("truth", "draws")
def sbc_ranks(truth: Tensor, draws: Tensor) -> Tensor:
    """Return the number of posterior draws below each prior draw, (N, D); ties are broken randomly.

    Args:
        truth: quantities of the prior draws, (N, D).
        draws: the same quantities of L posterior draws for each, (L, N, D); ranks go from 0 to L.
    """
    below = (draws < truth).sum(0)
    ties = (draws == truth).sum(0)
    lot = torch.rand(truth.shape, dtype=torch.float64, device=truth.device)
    return below + (lot * (ties + 1)).long()


@accept_arrays("ranks")
def rank_uniformity(ranks: Tensor, draws: int, bins: int = 16) -> Outcome:
    """Test by chi-square that ranks (N, D) are uniform from 0 to `draws`.

    Args:
        bins: number of bins of neighboring ranks, at most the number of possible ranks.

    Raises:
        ValueError: fewer than five simulations are expected in a bin.
    """
    number, bins = len(ranks), min(bins, draws + 1)
    bin_of = torch.arange(draws + 1) * bins // (draws + 1)
    expected = number * torch.bincount(bin_of).double() / (draws + 1)
    if expected.min() < _FEWEST:
        raise ValueError(
            f"ranks hold {number} simulations, too few for {bins} bins; give "
            f"{math.ceil(_FEWEST * number / expected.min().item())} or more, or fewer bins"
        )
    columns = bin_of[ranks.cpu()].T  # (D, N)
    observed = torch.stack([torch.bincount(column, minlength=bins) for column in columns])
    statistic = ((observed - expected).square() / expected).sum(1)
    freedom = torch.full_like(statistic, bins - 1)
    p = torch.special.gammaincc(freedom / 2, statistic / 2)
    return worst(statistic, number, p)


def worst(statistic: Tensor, number: int, p: Tensor) -> Outcome:
    """Return the largest of D statistics (D,), and the smallest p-value, corrected for D tests."""
    if not statistic.isfinite().all():
        return Outcome(math.inf, number, 0.0)
    return Outcome(statistic.max().item(), number, min(1.0, len(p) * p.min().item()))


@dataclass(frozen=True)
class Calibration:
    """Ranks of prior draws among the guide's draws, and a test that they are uniform.

    Attributes:
        quantities: the names of the quantities, such as "object_pose[3]", and "log joint".
        ranks: (simulations, quantities), from 0 to `draws`.
        draws: the guide's draws for each simulation, L.
        p_values: p-value of the chi-square test of each quantity, not corrected.
        outcome: the worst statistic, with its corrected p-value.
    """

    quantities: tuple[str, ...]
    ranks: Tensor
    draws: int
    p_values: Tensor
    outcome: Outcome

    @property
    def p(self) -> float:
        """The p-value of uniform ranks of all quantities, corrected for several tests."""
        return self.outcome.p

    def __str__(self) -> str:
        lines = [f"{len(self.ranks)} simulations, {self.draws} draws each: p = {self.p:.2g}"]
        for index in self.p_values.argsort()[:10].tolist():
            fraction = (self.ranks[:, index].double().mean() / self.draws).item()
            name, p = self.quantities[index], self.p_values[index]
            lines.append(f"  {name:24} p = {p:.2g}, mean rank {fraction:.2f}")
        return "\n".join(lines)


def check_calibration(
    model: Callable,
    guide: Callable,
    number: int = 1000,
    draws: int = 31,
    *,
    simulated: tuple[Values, Tensor] | None = None,
    bins: int = 16,
    seed: int = 0,
    batch_size: int = 10_000,
) -> Calibration:
    """Run simulation-based calibration of a guide to a model; see the top of this file.

    The discrete pair is used. Simulated pixels may leave the pixel range of the model. Scenes of
    points that the model does not take (fewer than two points) are left out, which keeps ranks
    uniform.

    Args:
        model: any model that can be called as `model(batch_size=number)`, or the plain Pyro program
            for which the guide was made.
        guide: any guide whose parameters do not belong to certain images.
        number: simulations from the model.
        draws: draws from the guide for each of them, L.
        simulated: values of the latent sites (N, ...) by name, and images (N, ...), drawn from the
            joint density in another way. Energy models need it, because their own draws come from
            chains.
        bins: neighboring ranks are counted in this many bins.
        seed: seed of all draws; torch's random state is left as it was.
        batch_size: images in one pass.

    Raises:
        ValueError: a number out of range, too few simulations for the bins, an energy model without
            `simulated`, or a guide with parameters for each image.
        IncompatibleGuide: the guide does not fit the model.
    """
    check_whole(1, number=number, draws=draws, batch_size=batch_size)
    check_whole(2, bins=bins)
    check_seed(seed)
    if is_per_image(guide):
        raise ValueError(
            f"{name_of(guide)} has parameters for certain images and cannot answer simulated ones; "
            "give an amortized guide"
        )
    model, _ = replace_program(model, guide, None)
    model, guide = discrete_form(model), discrete_form(guide)
    if simulated is None and not getattr(model, "normalized", True):
        raise ValueError(
            f"{name_of(model)} is known up to a constant only, and its draws come from chains; "
            "pass simulated=(values, images) with independent draws"
        )
    mode = eval_mode(model, guide)
    with isolated_parameters(model, guide), mode, use_seed(seed), validation_enabled(False):
        values, images = _accept_images(model, *(simulated or _simulate(model, number)))
        check_pair(model, guide, images[:2])
        return calibration_of(model, guide, values, images, draws, bins, batch_size)


@torch.no_grad()
def calibration_of(
    model: Callable,
    guide: Callable,
    values: Values,
    images: Tensor,
    draws: int,
    bins: int = 16,
    batch_size: int | None = None,
) -> Calibration:
    """Rank given samples of the joint distribution among a guide's; see `check_calibration`.

    Args:
        values: draws of the model's latents, (N, ...) by site.
        images: images drawn with these latents, (N, ...).
        draws, bins, batch_size: as for `check_calibration`; by default all in one pass.
    """
    repeated = tile_batch(images, draws)
    rows = repeated.split(batch_size or len(repeated))
    traces = (poutine.trace(guide).get_trace(batch).nodes for batch in rows)
    parts = [{name: nodes[name]["value"] for name in values} for nodes in traces]
    drawn = {name: torch.cat([part[name] for part in parts]) for name in values}
    quantities = _quantities(model, drawn, repeated, batch_size)
    truth = _quantities(model, values, images, batch_size)
    ranks = sbc_ranks(truth, quantities.unflatten(0, (draws, len(images))))
    columns = [rank_uniformity(column[:, None], draws, bins).p for column in ranks.T]
    outcome = rank_uniformity(ranks, draws, bins)
    return Calibration(_names(values), ranks, draws, torch.tensor(columns), outcome)


def _quantities(model: Callable, values: Values, images: Tensor, batch_size: int | None) -> Tensor:
    """Return all values of all sites, and the log joint density, (rows, quantities)."""
    columns = [values[name].reshape(len(images), -1) for name in values]
    joint = []
    for rows in torch.arange(len(images)).split(batch_size or len(images)):
        batch = images[rows]
        trace = score_latents(model, {name: value[rows] for name, value in values.items()}, batch)
        joint.append(log_density(trace, batch))
    return torch.cat([*columns, torch.cat(joint)[:, None].round(decimals=8)], 1)  # keeps ties


def _names(values: Values) -> tuple[str, ...]:
    sizes = {site: value[0].numel() for site, value in values.items()}
    names = (f"{site}[{i}]" if n > 1 else site for site, n in sizes.items() for i in range(n))
    return (*names, JOINT)


@torch.no_grad()
def _simulate(model: Callable, number: int) -> tuple[Values, Tensor]:
    """Sample latents, by site, and images from a model; sites that it sums out are left out."""
    images, values = simulate(model, number)
    trace = poutine.trace(model).get_trace(images[:1])
    summed = enumerated_sites(trace)
    return {name: values[name] for name in latent_sites(trace) if name not in summed}, images


def _accept_images(model: Callable, values: Values, images: Tensor) -> tuple[Values, Tensor]:
    """Keep the observations that the model's space accepts; pixels may have any value."""
    space = space_of(model)
    if space.site == "image":
        return values, images
    mask = torch.tensor([_takes(space, row[None]) for row in images], device=images.device)
    return {name: value[mask] for name, value in values.items()}, images[mask]


def _takes(space: ObservationSpace, batch: Tensor) -> bool:
    try:
        space.check(batch)
    except ValueError:
        return False
    return True
