"""Evaluation on held-out images: bounds in nats, importance weights and posterior draws.

>>> idata = evaluate(model, guide, dataset.test[:1000], num_particles=100, seed=0)
>>> idata.sample_stats.log_weight      # (chain, draw, image): log p(x, z) - log q(z | x)
>>> summarize(idata)["iwae"]
>>> idata.to_netcdf("evaluation.nc")
"""

import time
from collections.abc import Callable, Iterator
from operator import index
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from capsule_zoo.data import Split
from capsule_zoo.inference.evaluation.bound import not_a_bound, point_sites
from capsule_zoo.inference.evaluation.collected import Chain, dims_of_group
from capsule_zoo.inference.evaluation.inference_data import Variables, inference_data
from capsule_zoo.inference.evaluation.prepare import is_per_image, prepare
from capsule_zoo.inference.isolation import isolated_parameters
from capsule_zoo.inference.log_weight import log_weights
from capsule_zoo.inference.objectives.base import repeated
from capsule_zoo.models.checks import check_seed, check_whole
from capsule_zoo.models.common.modes import in_eval_mode, seeded
from capsule_zoo.models.common.spaces import ObservationSpace, space_of

if TYPE_CHECKING:
    from arviz import InferenceData

# index of the first particle and number of particles; images and labels, repeated per particle
Pass = tuple[tuple[int, int], Tensor, Tensor | None]


def evaluate(
    model: Callable,
    guide: Callable,
    images: Tensor | Split | np.ndarray,
    *,
    labels: Tensor | np.ndarray | None = None,
    num_particles: int = 50,
    chains: int = 1,
    seed: int = 0,
    discrete: bool = True,
    draws: int = 4,
    log_likelihood: bool = False,
    batch_size: int = 512,
) -> "InferenceData":
    """Compute the importance weights of a guide's draws under the model, image by image.

    Args:
        model, guide: the pair, on its present device and in its present precision. Both are modules
            or plain functions of (images, labels=None); the parameters of a function stay in
            Pyro's store. Among Pyro's AutoGuides, AutoNormal and AutoDelta have a density for each
            image. The others (AutoDiagonalNormal, AutoMultivariateNormal,
            AutoLowRankMultivariateNormal, AutoIAFNormal, AutoLaplaceApproximation, AutoStructured)
            have one for the whole batch, and are fitted and evaluated on one image at a time. None
            of them draws discrete sites: for a model with relaxed presences pass `discrete=False`.
        images: (N, C, H, W), a tensor, a NumPy array, or a `Split`, whose labels are not used.
        labels: (N,) whole numbers, given to both unless None. A supervised model needs them.
        num_particles: draws for each image, K, in each chain.
        chains: repetitions with other seeds, for r_hat and for errors between runs. The draws of
            a chain depend on the seed and on the chain's number only.
        seed: seed of the draws; torch's random state is left as it was.
        discrete: evaluate `discretized()` where model and guide offer it. A relaxed
            pair has a log weight too, but it is a bound on the relaxed model only.
        draws: posterior draws to keep for each image and chain, at most `num_particles`.
        log_likelihood: keep log p(image | latents) at the kept draws as well.
        batch_size: rows in one pass: images times particles. A guide with parameters per image
            (AutoGuides, guides with `per_image = True`) gets all images in every pass.

    Returns:
        An arviz InferenceData with the groups sample_stats (log_weight: chain, draw = K, image),
        posterior (by site, without auxiliary sites), posterior_predictive and, on request,
        log_likelihood (both absent when the model sums sites out) and observed_data. Images are
        the variable `pixels` there, because `image` is the dim; other dims have the names of the
        model's plates.

        The draws come from the guide, and each image has its own latents. `arviz.loo` of their
        `log_likelihood` is then the harmonic mean estimate of log p(image), which is correct for
        the exact posterior only. Rank by `iwae` instead.

        The attributes of the result (str, int and float, as netCDF needs them) hold estimator,
        num_particles, num_chains, num_images, seed, names, versions and seconds, and these
        descriptions of the measurement:

        - presence: "discrete", "relaxed", or "none" for a model that has nothing to relax.
        - bound_on: the quantity that the log weights bound in expectation: "log p(image)", or the
          same "of the relaxed model", "log p(image, label)" where labels are observed as well, and
          "log p(label | image)" for a supervised model, exact where no site is latent.
        - is_bound: 1, or 0 where `not_a_bound` holds a reason: the guide has a Delta over a
          continuous site (named in point_sites), for which the log weight is a MAP objective; the
          model is not `normalized` (see `log_partition`); or labels enter as a factor
          only.

    Raises:
        ValueError: images or labels are not what the model takes, a supervised model is given no
            labels, or a number is not allowed.
        IncompatibleGuide: the guide does not fit the model.
    """
    check_whole(1, num_particles=num_particles, chains=chains, batch_size=batch_size)
    check_whole(0, draws=draws)
    seed = check_seed(seed)
    pair = prepare(model, guide, images, labels=labels, seed=seed, discrete=discrete)
    model, guide, images, labels = pair[:4]
    space = space_of(model)
    kept: list[Chain] = []
    began = time.perf_counter()
    with isolated_parameters(model, guide), in_eval_mode(model, guide), torch.no_grad():
        for number in range(chains):
            kept.append(Chain(draws, space, log_likelihood))
            passes = _passes(guide, images, labels, num_particles, batch_size)
            with seeded(chain_seed(seed, number)):
                for particles, part, numbers in passes:
                    weight, model_trace, guide_trace = log_weights(model, guide, part, numbers)
                    kept[-1].add(particles, weight, model_trace, guide_trace)
    seconds = time.perf_counter() - began
    points = point_sites(model_trace, guide_trace)
    reasons = not_a_bound(model, model_trace, points)
    attributes = {
        "estimator": "importance weighting",
        "num_particles": index(num_particles),
        "num_chains": index(chains),
        **pair.attributes(model_trace, seed),
        "is_bound": int(not reasons),
        "not_a_bound": "; ".join(reasons),
        "point_sites": ", ".join(sorted(points)),
        "seconds": seconds,
    }
    return inference_data(_groups(kept, images, space), attributes)


def chain_seed(seed: int, chain: int) -> int:
    """Return the seed of one chain, never shared by evaluations with neighboring seeds."""
    if chain == 0:
        return seed
    state = np.random.SeedSequence(seed, spawn_key=(chain,)).generate_state(1, np.uint64)
    return int(state[0]) >> 1


def _groups(chains: list[Chain], images: Tensor, space: ObservationSpace) -> dict[str, Variables]:
    """Return dims and arrays by group and variable."""
    by_chain = [chain.values() for chain in chains]
    arrays: dict[str, dict[str, np.ndarray]] = {}
    for group, variable in by_chain[0]:
        stacked = np.stack([values[group, variable] for values in by_chain])
        arrays.setdefault(group, {})[variable] = stacked
    groups: dict[str, Variables] = {}
    for group, variables in arrays.items():
        names = {variable: chains[0].names[group, variable] for variable in variables}
        dims = dims_of_group(variables, names, space)
        groups[group] = {name: (dims[name], array) for name, array in variables.items()}
    observed = ["image", *space.dims], images.cpu().numpy()
    groups["observed_data"] = {space.variable: observed}
    return groups


def _passes(
    guide: Callable, images: Tensor, labels: Tensor | None, particles: int, rows: int
) -> Iterator[Pass]:
    """Yield passes of at most `rows` rows: (first particle, number), repeated images, labels."""
    size = len(images) if is_per_image(guide) else min(len(images), rows)
    at_once = 1 if is_per_image(guide) else max(1, rows // size)
    for begin in range(0, len(images), size):
        part = images[begin : begin + size]
        part_labels = None if labels is None else labels[begin : begin + size]
        for first in range(0, particles, at_once):
            count = min(at_once, particles - first)
            yield (first, count), *repeated(part, part_labels, count)
