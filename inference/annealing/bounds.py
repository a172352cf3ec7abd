"""Lower and upper bounds on the log-likelihood of a directed model, by annealing both ways.

>>> idata = annealed_log_likelihood(model, guide, test[:100])      # -> arviz InferenceData
>>> annealed_bounds(idata)["lower"]                                # nats per image
>>> annealed_bounds(idata)["gap"]                                  # how loose that can be

Annealed importance sampling moves chains from a guide, or from the prior, to the posterior of an
image (`inference.annealing.path`). The mean of their weights is p(image), so that the log
of the mean over K chains is a lower bound in expectation, which K and the number of temperatures
tighten. How tight it is cannot be seen from below. On images that the model itself draws the
latents are known: they are an exact draw of the posterior. Chains that start there and anneal back
give an upper bound in expectation (bidirectional Monte Carlo). The gap between both bounds on such
images is the largest error, in expectation, of either.

    lower     log mean_k w_k,           w: from the guide to the posterior
    upper     -log mean_k 1 / w'_k,     w': from one exact draw of the posterior back to the guide

The gap is exact for simulated images only. It says as much of real ones as the model is like them,
and as the guide is as good on the one as on the other. Where the prior has heavy tails, one
simulated image can decide the mean gap; then its median tells more.

Chains that start at a poor guide may miss a mode of an image, and neither bound shows it. So give
all guides at hand: chains start at the best one, and the result says in words where the
importance-weighted bound of any guide exceeds the annealed one (see `exceedance`).

>>> guides = {"encoder": encoder, "mixture": SemiAmortized(encoder, kind="mixture")}
>>> idata = annealed_log_likelihood(model, guides, test[:100])

References:
    Neal 2001, "Annealed Importance Sampling". Grosse, Ghahramani & Adams 2015, "Sandwiching the
    marginal likelihood using bidirectional Monte Carlo" (arXiv 1511.02543). Wu, Burda,
    Salakhutdinov & Grosse 2017, "On the Quantitative Analysis of Decoder-Based Generative Models"
    (arXiv 1611.04273): Hamiltonian steps, and temperatures along a sigmoid.
"""

import json
import time
from collections.abc import Callable, Mapping
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple
from warnings import warn

import numpy as np
import pyro
import torch
from torch import Tensor

from capsule_zoo.data import Split
from capsule_zoo.data.progress import announce
from capsule_zoo.guides import GaussNewton
from capsule_zoo.inference.annealing.exceedance import (
    STORED,
    Bound,
    annealed_bound,
    bound_of_guide,
    bounds_of_guides,
    describe_exceedances,
    exceedances,
)
from capsule_zoo.inference.annealing.path import AnnealedPath, simulate
from capsule_zoo.inference.annealing.transitions import (
    Moves,
    anneal,
    pilot,
    space_temperatures,
    temperatures_along_sigmoid,
)
from capsule_zoo.inference.check import latent_sites, name_of
from capsule_zoo.inference.evaluation.bound import point_sites
from capsule_zoo.inference.evaluation.evaluate import chain_seed, evaluate
from capsule_zoo.inference.evaluation.inference_data import inference_data
from capsule_zoo.inference.evaluation.prepare import Prepared, is_per_image, prepare
from capsule_zoo.inference.evaluation.summary import (
    log_mean,
    log_mean_error,
    pool_chains,
    standard_error,
)
from capsule_zoo.inference.examination.pairs import model_of_program
from capsule_zoo.inference.isolation import isolated_parameters
from capsule_zoo.inference.log_weight import log_weights
from capsule_zoo.inference.not_finite import NonFiniteGuide
from capsule_zoo.inference.posterior.fitted import SemiAmortized
from capsule_zoo.models.checks import check_seed, check_whole
from capsule_zoo.models.common.modes import eval_mode, frozen, use_seed
from capsule_zoo.models.common.spaces import space_of, tile_batch

if TYPE_CHECKING:
    from arviz import InferenceData

_SCALED = 16  # draws of the start, for the standard deviation of each coordinate
_FEWER = 4  # the pilot has this many times fewer temperatures
_HALVINGS = 16  # of the pilot's first temperature, where chains start at a guide and the prior
_FLIPS = 16  # proposed flips at each temperature, unless the sites have fewer coordinates
_WEIGHED = 100  # draws for each guide's bound, to compare guides with each other and the chains
_OF_SIMULATED = "simulated_log_weight", "reverse_log_weight"
_PILOT, _MAIN, _SIMULATED, _BACK = range(4)  # streams of random numbers


@torch.inference_mode(False)
def annealed_log_likelihood(
    model: Callable,
    guide: Callable | Mapping[str, Callable] | None,
    images: Tensor | Split | np.ndarray,
    *,
    chains: int = 16,
    temperatures: int = 500,
    leapfrogs: int = 5,
    simulated: int = 16,
    pilot_chains: int = 4,
    prior_fraction: float = 0.0,
    seed: int = 0,
    discrete: bool = True,
    batch_size: int = 512,
    progress: bool = False,
) -> "InferenceData":
    """Bound log p(image) from below by annealing; measure the gap on images drawn from the model.

    It serves every directed model whose latents are continuous, Bernoulli or categorical.

    Args:
        model: the model, on its present device and in its present precision. Or a plain Pyro
            program, next to a guide that was made for it, or None.
        guide: the start of every chain, a guide with a density at all sites; None starts at the
            prior. A good guide needs fewer temperatures. Any guide gives valid bounds, but chains
            of a poor one can miss modes: of several guides, by name, chains start at the one with
            the highest importance-weighted bound of 100 draws, on average over the images.
        images: (N, C, H, W), a tensor, a NumPy array, or a `Split`. Of a plain program its data: a
            tensor, or values by the names of arguments and sites.
        chains: annealed chains of each image, K.
        temperatures: distributions between the start and the posterior; the time grows with their
            number.
        leapfrogs: steps of each Hamiltonian trajectory, one trajectory for each temperature; or,
            without continuous sites, proposals to change many binary values at once.
        simulated: number of images that the model draws, on which the gap is measured; 0 for none.
        pilot_chains: chains of each image that find the lengths of the steps, and are thrown away.
            Chains that adapted their own steps would give a biased estimate.
        prior_fraction: fraction of chains that start at the prior, from 0 to below 1. It costs a
            fifth more time, and saves many nats where the guide gives no density to some of the
            posterior.
        seed: seed of everything; torch's random state is left as it was.
        discrete: measure `discretize()` where model and guide offer it; see `evaluate`.
        batch_size: rows in one pass: images times chains. A guide with parameters for each image
            gets all images in every pass.
        progress: show a progress bar for each pass.

    Returns:
        An arviz InferenceData with the attributes of `evaluate`'s. Its group sample_stats holds:

        - log_weight (chain, draw, image): one annealed chain in each draw. `summarize` reads it as
          it reads importance weights: `iwae` is the lower bound.
        - acceptance_rate: acceptance rate of the steps (chain, draw, image).
        - simulated_log_weight, reverse_log_weight (chain, draw, simulated), if any are simulated:
          log weights forward, and back from the exact draw. See `annealed_bounds`.

        The group observed_data holds the images, and `simulated_pixels`; constant_data holds the
        bounds of the given guides, guide_bound and guide_bound_error (guide, image). The attribute
        `start` names the guide at which chains start, and `exceeded` is a sentence on which guides'
        bounds lie above the annealed one, "" if none does. These words are a warning too.

    Raises:
        ValueError: a number is out of range; the model is not a normalized model of images; a
            guide has points, auxiliary sites, or parameters that belong to its own images while
            others are to be simulated.
        UnservedSite: a site that annealing cannot move; the message names it.
        IncompatibleGuide: the guide does not fit the model.
        NonFiniteGuide: log weights of the guide, or of the chains, are not numbers for some image.
    """
    check_whole(1, chains=chains, leapfrogs=leapfrogs)
    check_whole(1, pilot_chains=pilot_chains, batch_size=batch_size)
    check_whole(2, temperatures=temperatures)
    check_whole(0, simulated=simulated)
    if not 0 <= prior_fraction < 1:
        raise ValueError(
            f"prior_fraction must be from 0 to below 1, not {prior_fraction}; pass guide=None to "
            "start at the prior alone"
        )
    seed = check_seed(seed)
    refuse_unnormalized(model)
    began = time.perf_counter()
    guides = _name_guides(guide)
    if not guides:
        model, images = model_of_program(model, images)
    options: dict[str, Any] = dict(labels=None, seed=seed, discrete=discrete)
    pairs = {name: prepare(model, proposal, images, **options) for name, proposal in guides.items()}
    for name, pair in pairs.items():
        refuse_start(pair, guides[name], simulated)
    bounds = _bounds(pairs, seed=seed, discrete=discrete, batch_size=batch_size)
    best = _highest(bounds)
    pair = pairs[best] if guides else prepare(model, model, images, prior=True, **options)
    start = pair.guide if guides else None
    settings = chains, temperatures, leapfrogs, pilot_chains, prior_fraction, progress
    mode, freeze = eval_mode(pair.model, pair.guide), frozen(pair.model, pair.guide)
    with isolated_parameters(pair.model, pair.guide), mode, freeze, pyro.validation_enabled(False):
        run = _Run(pair.model, start, seed, *settings)
        rows = len(pair.images) if is_per_image(pair.guide) else max(1, batch_size // chains)
        arrays, drawn = run.anneal_chains(pair.images, rows), None
        if simulated:
            with use_seed(run.stream(_SIMULATED, 0)):
                drawn, latents = simulate(pair.model, simulated)
            arrays |= run.anneal_chains(drawn, rows, latents)
    if len(bad := np.flatnonzero(~(arrays["log_weight"] < np.inf).all(0))):
        subject = f"the annealing of {name_of(model)} from {best!r}"
        raise NonFiniteGuide.of(subject, bad.tolist(), len(pair.images), None)
    lower = log_mean(arrays["log_weight"]), log_mean_error(arrays["log_weight"])
    if message := describe_exceedances(exceedances(lower, bounds)):
        warn(message, stacklevel=2)
    attributes = {
        **_attributes(pair, start, seed),
        "start": best,
        "guides": json.dumps([*bounds]),
        "exceeded": message,
        "num_particles": index(chains),
        "temperatures": index(temperatures),
        "leapfrogs": index(leapfrogs),
        "simulated": index(simulated),
        "seconds": time.perf_counter() - began,
    }
    return inference_data(_groups(pair, arrays, drawn, bounds), attributes)


def _name_guides(guide: Callable | Mapping[str, Callable] | None) -> dict[str, Callable]:
    """Return the given guides by name; an empty mapping for the prior."""
    if guide is None:
        return {}
    if not isinstance(guide, Mapping):
        return {name_of(guide): guide}
    if wrong := [name for name, candidate in guide.items() if not callable(candidate)]:
        raise ValueError(
            f"guide {wrong[0]!r} is not a guide; leave it out, or pass guide=None alone"
        )
    if not guide:
        raise ValueError("guide is empty; give guides by name, or None to start at the prior")
    return dict(guide)


def _bounds(pairs: Mapping[str, Prepared], **options: Any) -> dict[str, Bound]:
    """Return the importance-weighted bound of each pair on every image, by name."""
    return {
        name: bound_of_guide(evaluate(*pair[:3], num_particles=_WEIGHED, draws=0, **options))
        for name, pair in pairs.items()
    }


def _highest(bounds: Mapping[str, Bound]) -> str:
    """Return the name of the guide with the highest mean bound; "prior" if there is no guide."""
    means = {name: np.nan_to_num(iwae.mean(), nan=-np.inf) for name, (iwae, _) in bounds.items()}
    return max(means, key=lambda name: means[name], default="prior")


def annealed_bounds(
    idata: "InferenceData", guides: "Mapping[str, InferenceData] | None" = None
) -> dict[str, Any]:
    """Compute the bounds of an annealing, in nats per image, with standard errors over images.

    Args:
        guides: evaluations (`evaluate`) of further guides on the same images, by name. None of
            their importance-weighted bounds should exceed `lower`.

    Returns:
        lower: the mean over the given images of the lower bound on log p(image). If images were
        simulated, also simulated_lower and simulated_upper, the two bounds on these, and gap, the
        mean of their difference. Each comes with its standard error, `<name>_se`, NaN for a single
        image. gap_median and gap_largest, of the gap by simulated image, tell whether a few images
        decide the mean; `annealed_gaps` returns all. acceptance_rate of the steps, num_chains,
        num_images and num_simulated. images_exceeded: the number of images on which the bound of
        some guide exceeds the lower one by two standard errors or more, see
        `inference.annealing.exceedance`. If any guide exceeds it, also on average,
        `warning` says so. The guides are the annealing's and those in `guides`.

    Raises:
        ValueError: the evaluation is not an annealing, several were joined that differ, or a guide
            was evaluated on other images.
    """
    if "temperatures" not in idata.attrs:
        raise ValueError(
            "idata has no temperatures, so it is not an annealing; give what "
            "annealed_log_likelihood returned, and summarize(idata) any other evaluation"
        )
    lower = annealed_bound(idata)
    result: dict[str, Any] = {"lower": float(lower[0].mean()), "lower_se": standard_error(lower[0])}
    stats = idata.sample_stats
    if "simulated_log_weight" in stats:
        below, above = _sides(idata)
        sides = {"simulated_lower": below, "simulated_upper": above, "gap": above - below}
        for name, values in sides.items():
            result[name] = float(values.mean())
            result[f"{name}_se"] = standard_error(values)
        result["gap_median"] = float(np.median(above - below))
        result["gap_largest"] = float((above - below).max())
    result["acceptance_rate"] = float(stats["acceptance_rate"].mean())
    chains = int(stats.sizes["chain"] * stats.sizes["draw"])
    numbers = {"num_chains": chains, "num_images": len(lower[0])}
    result |= {**numbers, "num_simulated": int(stats.sizes.get("simulated", 0))}
    bounds = {name: bound_of_guide(item) for name, item in (guides or {}).items()}
    exceeding = exceedances(lower, bounds_of_guides(idata) | bounds)
    result["images_exceeded"] = len({image for item in exceeding for image in item.images})
    message = describe_exceedances(exceeding)
    if any(item.guide in bounds for item in exceeding):
        warn(message, stacklevel=2)
    return result | ({"warning": message} if message else {})


def annealed_gaps(idata: "InferenceData") -> np.ndarray:
    """Return upper minus lower bound on log p of each simulated image, (simulated,), in nats."""
    below, above = _sides(idata)
    return above - below


def _sides(idata: "InferenceData") -> tuple[np.ndarray, np.ndarray]:
    """Return lower and upper bound on log p of each simulated image, (simulated,)."""
    stats = idata.sample_stats
    below = log_mean(pool_chains(stats["simulated_log_weight"]))
    return below, -log_mean(-pool_chains(stats["reverse_log_weight"]))


class _Run(NamedTuple):
    """The settings of all passes of one annealing; see `annealed_log_likelihood`."""

    model: Callable
    guide: Callable | None
    seed: int
    chains: int
    temperatures: int
    leapfrogs: int
    pilot_chains: int
    prior_fraction: float
    progress: bool

    def anneal_chains(
        self, images: Tensor, rows: int, latents: dict[str, Tensor] | None = None
    ) -> dict[str, np.ndarray]:
        """Anneal chains to the posterior of images, and back from exact latents if they are given.

        Returns:
            Arrays (chains, images) by the names of their variables in sample_stats.
        """
        parts = []
        for number, part in enumerate(images.split(rows)):
            kind, last = "simulated images" if latents else "images", number * rows + len(part)
            announce(f"annealing {kind} {number * rows + 1} to {last} of {len(images)}")
            part_latents = latents and {
                name: value.split(rows)[number] for name, value in latents.items()
            }
            try:
                arrays = self._anneal_part(part, number, part_latents)
            except NonFiniteGuide as error:  # its image indices count within the part
                subject = (
                    error.subject if latents is None else f"{error.subject}, to simulated images,"
                )
                bad = (number * rows + row for row in error.images)
                raise NonFiniteGuide.of(subject, bad, len(images), error.site) from None
            parts.append(
                {n: array.view(-1, len(part)).cpu().numpy() for n, array in arrays.items()}
            )
        return {name: np.concatenate([part[name] for part in parts], axis=1) for name in parts[0]}

    def _anneal_part(
        self, images: Tensor, number: int, latents: dict[str, Tensor] | None
    ) -> dict[str, Tensor]:
        """Return what `anneal_chains` does, (chains x images,), for the images of one pass."""
        guide = self.guide
        if isinstance(guide, SemiAmortized):
            guide = guide.refined_to(images)
        path = AnnealedPath(self.model, guide, tile_batch(images, self.chains), self.prior_fraction)
        number = number if latents is None else number + 1 << 32  # not a stream of given images
        moves, betas, epsilons = self._tune_moves(path, images, number)
        with use_seed(self.stream(_MAIN, number)):
            forward, rate = anneal(path, path.draw(), betas, epsilons, moves, False, self.progress)
        if latents is None:
            return {"log_weight": forward, "acceptance_rate": rate}
        exact = path.state({name: tile_batch(latents[name], self.chains) for name in path.latents})
        with use_seed(self.stream(_BACK, number)):
            back, _ = anneal(path, exact, betas, epsilons, moves, True, self.progress)
        return dict(zip(_OF_SIMULATED, (forward, back), strict=True))

    def _tune_moves(
        self, path: AnnealedPath, images: Tensor, number: int
    ) -> tuple[Moves, Tensor, Tensor]:
        """Return the moves, and a pilot's temperatures and step lengths, (T + 1, rows) each."""
        size = sum(path.choices[name].size for name in path.flipped)
        flips = min(size, _FLIPS)
        betas = temperatures_along_sigmoid(max(self.temperatures // _FEWER, 2))
        if self.prior_fraction:  # draws of the prior may differ from the posterior by many nats
            betas[1:1] = [betas[1] * 2.0**-halving for halving in range(_HALVINGS, 0, -1)]
        with use_seed(self.stream(_PILOT, number)):
            scale = _scale(path, images)
            copies = self.pilot_chains, *[1] * (scale.dim() - 1)
            small = path.at(tile_batch(images, self.pilot_chains))
            whole = scale.dim() == 3
            initial_moves = Moves(self.leapfrogs, flips, scale if whole else scale.repeat(copies))
            statistics = pilot(small, len(images), betas, initial_moves)
        placed, epsilons = space_temperatures(betas, *statistics, self.temperatures)
        scale = scale if whole else scale.repeat(self.chains, 1)
        moves = Moves(self.leapfrogs, flips, scale)
        return moves, placed.repeat(1, self.chains), epsilons.repeat(1, self.chains)

    def stream(self, kind: int, number: int) -> int:
        """Return the seed of one stream of random numbers in one pass."""
        return chain_seed(self.seed, 1 + 4 * number + kind)


def _scale(path: AnnealedPath, images: Tensor) -> Tensor:
    """Return the start's covariance factor (images, D, D), or its standard deviations, (images, D).

    Where sites may be permuted it is averaged over permutations, so that it has the posterior's
    symmetry.
    """
    orders = path.columns_in_orders()
    if isinstance(path.guide, GaussNewton) and path.guide.whole:
        start_factor = path.guide.factor()
        order = path.columns_of(path.guide.locs).to(start_factor.device)
        factor = torch.empty_like(start_factor).index_copy(1, order, start_factor)
        if len(orders) == 1:
            return factor
        covariance = factor @ factor.mT
        moved = [covariance[:, columns][:, :, columns] for columns in orders]
        return torch.linalg.cholesky(torch.stack(moved).mean(0))
    draws = torch.stack([path.at(images).draw().position for _ in range(_SCALED)])
    if not path.columns:
        return draws[0]
    scale = draws.std(0).clamp(min=1e-6)
    return torch.stack([scale[:, columns] for columns in orders]).mean(0)


def refuse_unnormalized(model: Callable) -> None:
    """Raise ValueError for a model without a normalized p(image)."""
    if getattr(model, "supervised", False):
        raise ValueError(
            f"{name_of(model)} explains labels, so it has no log p(image); measure its error rate"
        )
    if not getattr(model, "normalized", True):
        raise ValueError(
            f"{name_of(model)} is an energy model, whose joint density is known up to log Z only; "
            "use log_partition, which anneals it"
        )


def refuse_start(pair: Prepared, guide: Callable | None, simulated: int) -> None:
    """Raise ValueError for a guide from which no chain can start."""
    if guide is None:
        return
    mode = eval_mode(pair.model, pair.guide)
    with isolated_parameters(pair.model, pair.guide), mode, torch.no_grad(), use_seed(0):
        subset = pair.images if is_per_image(guide) else pair.images[:2]
        _, model_trace, guide_trace = log_weights(pair.model, pair.guide, subset)
    drawn = latent_sites(guide_trace)
    names = [name for name, site in drawn.items() if site["infer"].get("is_auxiliary")]
    if names:
        raise ValueError(
            f"{name_of(guide)} draws the auxiliary sites {', '.join(names)}, so it has no density "
            "at given latents; start at another guide, such as FreeForm(distribution='normal'), or "
            "at the prior (guide=None)"
        )
    if points := point_sites(model_trace, guide_trace):
        raise ValueError(
            f"{name_of(guide)} places points at {', '.join(sorted(points))}, where it has no "
            "density; widen it first, by fit_guide('widened', ...), or start at the prior "
            "(guide=None)"
        )
    if simulated and is_per_image(guide):
        raise ValueError(
            f"the parameters of {name_of(guide)} belong to its own images, so it cannot start "
            f"chains of {simulated} simulated ones; pass simulated=0, or a guide that reads the "
            "image"
        )


def _attributes(pair: Prepared, guide: Callable | None, seed: int) -> dict[str, Any]:
    with torch.no_grad(), use_seed(0), isolated_parameters(pair.model, pair.guide):
        first = pair.images if is_per_image(pair.guide) else pair.images[:1]
        trace = pyro.poutine.trace(pair.model).get_trace(first)
    start = {"guide": "prior"} if guide is None else {}
    bound = {"is_bound": 1, "not_a_bound": "", "point_sites": ""}
    estimator = {"estimator": "annealed importance sampling", "num_chains": 1}
    return {**estimator, **pair.attributes(trace, seed), **start, **bound}


def _groups(
    pair: Prepared, arrays: dict[str, np.ndarray], drawn: Tensor | None, bounds: Mapping[str, Bound]
) -> dict[str, Any]:
    """Return dims and arrays of the InferenceData, by group and variable."""
    rows = {name: "simulated" if name in _OF_SIMULATED else "image" for name in arrays}
    space = space_of(pair.model)
    observed = {space.variable: (["image", *space.dims], pair.images.cpu().numpy())}
    if drawn is not None:
        observed[f"simulated_{space.variable}"] = (["simulated", *space.dims], drawn.cpu().numpy())
    stats = {name: (["chain", "draw", rows[name]], array[None]) for name, array in arrays.items()}
    groups = {"sample_stats": stats, "observed_data": observed}
    if bounds:
        named = zip(STORED, np.moveaxis(np.array([*bounds.values()]), 1, 0), strict=True)
        groups["constant_data"] = {name: (["guide", "image"], array) for name, array in named}
    return groups
