"""Evaluation on held-out images: bounds in nats, importance weights and posterior draws.

>>> idata = evaluate(model, guide, dataset.test[:1000], num_particles=100, seed=0)
>>> idata.sample_stats.log_weight      # (chain, draw, image): log p(x, z) - log q(z | x)
>>> summarize(idata)["iwae"]
>>> idata.to_netcdf("evaluation.nc")
"""

import math
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import index
from typing import TYPE_CHECKING

import numpy as np
import torch
from pyro.poutine import Trace
from torch import Tensor

from capsule_zoo.data.progress import track
from capsule_zoo.guides.per_image.base import PerImageGuide
from capsule_zoo.inference.check import name_of
from capsule_zoo.inference.evaluation.bound import not_a_bound, point_sites
from capsule_zoo.inference.evaluation.inference_data import Variables, inference_data
from capsule_zoo.inference.evaluation.prepare import (
    Images,
    Labels,
    Prepared,
    is_per_image,
    prepare,
    split_batches,
)
from capsule_zoo.inference.isolation import isolated_parameters
from capsule_zoo.inference.log_weight import log_weights, not_a_number, site_not_finite
from capsule_zoo.inference.not_finite import NAMING_NO_IMAGE, NonFiniteGuide, non_finite
from capsule_zoo.inference.objectives.base import repeat_batch
from capsule_zoo.models.checks import check_seed, check_whole
from capsule_zoo.models.common.modes import eval_mode, use_seed
from capsule_zoo.models.common.spaces import ObservationSpace, space_of
from capsule_zoo.models.common.trace_density import IMAGES_PLATE, latent_sites

if TYPE_CHECKING:
    from arviz import InferenceData

_RESERVED = {"chain", "draw", "image"}
Names = tuple[str | None, ...]
# index of the first image; index of the first particle and number of particles; images and labels,
# repeated per particle
Pass = tuple[int, tuple[int, int], Tensor, Tensor | None]


def evaluate(
    model: Callable,
    guide: Callable,
    images: Images,
    *,
    labels: Labels = None,
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
            A plain program next to a guide of `auto_encoder` or `fit_guide` that was made for it is
            taken as `guide.model`, and its data, a tensor or values by name, as rows.
        images: (N, C, H, W), or all that `fit` takes: a `Split`, a `Dataset` (its test split), a
            list of batches, or a torch `Dataset` or `DataLoader`, which is read batch by batch, so
            that its images need not fit in memory. The result equals a run on all images at once.
        labels: (N,) whole numbers, or True for the labels of the data; given to both unless None. A
            supervised model needs them.
        num_particles: draws for each image, K, in each chain.
        chains: repetitions with other seeds, for r_hat and for errors between runs. The draws of
            a chain depend on the seed and on the chain's number only.
        seed: seed of the draws; torch's random state is left as it was.
        discrete: evaluate `discretize()` where model and guide offer it. A relaxed pair has a log
            weight too, but it bounds the relaxed model only, and may exceed log p(image).
        draws: posterior draws to keep for each image and chain, at most `num_particles`. With 0 the
            result holds no images either, and is small.
        log_likelihood: keep log p(image | latents) at the kept draws as well.
        batch_size: rows in one pass: images times particles. A guide with parameters per image
            (AutoGuides, guides with `per_image = True`) gets all images in every pass, and guides
            of the zoo get them for several particles.

    Returns:
        An arviz InferenceData with the groups sample_stats (log_weight: chain, draw = K, image),
        posterior (by site, without auxiliary sites), posterior_predictive and, on request,
        log_likelihood (both absent when the model sums sites out) and, unless draws=0,
        observed_data. Images are the variable `pixels` there, because `image` is the dim; other
        dims have the names of the model's plates.

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
          model is not `normalized` (see `log_partition`); or labels enter as a factor only.

    Raises:
        ValueError: images or labels are not what the model takes, a supervised model is given no
            labels, or a number is not allowed.
        IncompatibleGuide: the guide does not fit the model.
        NonFiniteGuide: a log weight is not a number; the message names image and site.
    """
    check_whole(1, num_particles=num_particles, chains=chains, batch_size=batch_size)
    check_whole(0, draws=draws)
    seed = check_seed(seed)
    pair = prepare(model, guide, images, labels=labels, seed=seed, discrete=discrete, streamed=True)
    model, guide = pair.model, pair.guide
    space = space_of(model)
    chain_list: list[Chain] = []
    observed, count = Observed(keep=draws > 0), _count_passes(pair, num_particles, batch_size)
    began = time.perf_counter()
    with isolated_parameters(model, guide), eval_mode(model, guide), torch.no_grad():
        for number in range(chains):
            chain_list.append(Chain(draws, space, log_likelihood))
            passes = track(_passes(pair, num_particles, batch_size), "evaluating", "passes", count)
            with use_seed(chain_seed(seed, number)):
                for begin, particles, part, numbers in passes:
                    size = len(part) // particles[1]
                    if number == 0 and particles[0] == 0:
                        observed.add(part[:size])
                    places = begin, size, len(pair.images)
                    result = _score_pass(model, guide, part, numbers, places)
                    weight, model_trace, guide_trace = result
                    chain_list[-1].add(particles, weight, model_trace, guide_trace)
    seconds = time.perf_counter() - began
    points = point_sites(model_trace, guide_trace)
    reasons = not_a_bound(model, model_trace, guide_trace, points)
    attributes = {
        "estimator": "importance weighting",
        "num_particles": index(num_particles),
        "num_chains": index(chains),
        **pair.attributes(model_trace, seed),
        "is_bound": int(not reasons),
        "not_a_bound": "; ".join(reasons),
        "point_sites": ", ".join(sorted(points)),
        "seconds": seconds,
        "checksum": observed.checksum,
    }
    return inference_data(_groups(chain_list, observed, space), attributes)


def _score_pass(
    model: Callable,
    guide: Callable,
    images: Tensor,
    labels: Tensor | None,
    places: tuple[int, int, int],
) -> tuple[Tensor, Trace, Trace]:
    """Return `log_weights` of one pass; refuse log weights that are not finite.

    Args:
        places: index of the first image among all, number of images in the pass, and of all.

    Raises:
        NonFiniteGuide: a log weight is not; the message names the image, as the caller counts it.
    """
    subject = f"{name_of(guide)} of {name_of(model)}"
    site: str | None
    try:
        result = log_weights(model, guide, images, labels)
    except NonFiniteGuide as error:  # raised by a guide that refines the images of the pass
        rows, site, subject = error.first.images, error.first.site, error.first.subject
    except NAMING_NO_IMAGE:
        rows, site = non_finite(model, guide, images, labels)
        if not rows:
            raise
    else:
        bad = not_a_number(result[0])
        if not bad.any():
            return result
        rows, site = bad.nonzero().flatten().tolist(), site_not_finite(images, *result[1:], bad)
    first, size, number = places
    raise NonFiniteGuide.of(subject, (first + row % size for row in rows), number, site)


def chain_seed(seed: int, chain: int) -> int:
    """Return the seed of one chain, never shared by evaluations with neighboring seeds."""
    if chain == 0:
        return seed
    state = np.random.SeedSequence(seed, spawn_key=(chain,)).generate_state(1, np.uint64)
    return int(state[0]) >> 1


def _count_passes(pair: Prepared, particles: int, rows: int) -> int:
    """Return the number of passes of `_passes`."""
    number, whole = len(pair.images), is_per_image(pair.guide)
    size = number if whole else min(number, rows)
    at_once = 1 if _takes_one_particle(pair.guide) else max(1, rows // size)
    return math.ceil(number / size) * math.ceil(particles / at_once)


def _takes_one_particle(guide: Callable) -> bool:
    """Return whether a guide takes its images only once in a pass, as Pyro's AutoGuides do."""
    return is_per_image(guide) and not isinstance(guide, PerImageGuide)


def _passes(pair: Prepared, particles: int, rows: int) -> Iterator[Pass]:
    """Yield the passes of an evaluation, of at most `rows` rows each; see `Pass`."""
    whole = is_per_image(pair.guide)
    at_once, begin = (1 if _takes_one_particle(pair.guide) else 0), 0
    for part, labels in split_batches(
        pair.images, pair.labels, len(pair.images) if whole else rows
    ):
        at_once = at_once or max(1, rows // len(part))  # set by the first batch, for all batches
        for first in range(0, particles, at_once):
            count = min(at_once, particles - first)
            yield begin, (first, count), *repeat_batch(part, labels, count)
        begin += len(part)


class Observed:
    """The images of an evaluation: their pixels if they are kept, and a checksum.

    Args:
        keep: whether the images are kept.
    """

    def __init__(self, keep: bool) -> None:
        self.keep = keep
        self.parts: list[np.ndarray] = []
        self._checksum = 0

    def add(self, images: Tensor) -> None:
        """Add a batch of images (B, ...) to the checksum and, if they are kept, to the pixels."""
        array = images.cpu().numpy()
        self._checksum = zlib.crc32(array.tobytes(), self._checksum)
        if self.keep:
            self.parts.append(array)

    @property
    def checksum(self) -> str:
        """The CRC-32 of all images, which identifies the images of an evaluation."""
        return f"{self._checksum:08x}"


class Chain:
    """The results of one chain, collected pass by pass.

    A model's plates name the dims of its sites: a pose of every part in every image has the dims
    (chain, draw, image, parts, coordinate).

    Args:
        draws: number of posterior draws to keep for each image.
        space: the space of the observations, which names their site, variable and dims.
        log_likelihood: keep the log density of the observations at the kept draws.

    Attributes:
        names: names of the dims of each variable after the image dim, by group and variable.
    """

    def __init__(self, draws: int, space: ObservationSpace, log_likelihood: bool = False) -> None:
        self.draws = draws
        self.space = space
        self.log_likelihood = log_likelihood
        self.names: dict[str, dict[str, Names]] = defaultdict(dict)
        self._passes = 0
        self._num_values: dict[str, dict[str, list[list[np.ndarray]]]] = defaultdict(dict)

    def add(
        self, particles: tuple[int, int], log_weight: Tensor, model_trace: Trace, guide_trace: Trace
    ) -> None:
        """Add the results of a pass; `particles` is the index of its first one and their number."""
        first, _ = particles
        self._passes += 1
        self._append("sample_stats", "log_weight", particles, log_weight)
        if first >= self.draws:
            return
        drawn = latent_sites(guide_trace)
        for name, site in drawn.items():
            if name in model_trace.nodes:  # not an auxiliary site
                array = name_dims(model_trace.nodes[name], site["value"], self.space)
                self._append("posterior", name, particles, *array)
        observed = model_trace.nodes.get(self.space.site)
        if observed is not None and latent_sites(model_trace).keys() <= drawn.keys():
            self._keep_observed(observed, bool(drawn), particles)

    def _keep_observed(self, site: dict, is_observed: bool, particles: tuple[int, int]) -> None:
        # a separate random stream, so that weights do not depend on `draws`
        with use_seed(torch.initial_seed() + 1 + self._passes):
            redrawn = site["fn"].sample()
        name, array = self.space.variable, name_dims(site, redrawn, self.space)
        self._append("posterior_predictive", name, particles, *array)
        if is_observed and self.log_likelihood:
            log_prob = site["fn"].log_prob(site["value"])
            by_image, _ = images_first(log_prob, plate_names(site, log_prob.dim()))
            total = by_image.reshape(len(by_image), -1).sum(1)
            self._append("log_likelihood", name, particles, total)

    def _append(
        self, group: str, name: str, particles: tuple[int, int], values: Tensor, names: Names = ()
    ) -> None:
        """Append values (count images, ...): all log weights, or samples up to `draws`."""
        first, count = particles
        limit = count if group == "sample_stats" else self.draws - first
        self.names[group][name] = names
        parts = self._num_values[group].setdefault(name, [])
        if first == 0:
            parts.append([])  # begin the next batch of images
        draws = values.reshape(count, -1, *values.shape[1:])[:limit]
        draws = draws.float() if draws.dtype is torch.bfloat16 else draws  # NumPy has no bfloat16
        parts[-1].append(draws.cpu().numpy())

    def values(self, group: str, name: str) -> np.ndarray:
        """Return the collected values of one variable, (draws, images, ...)."""
        parts = self._num_values[group][name]
        return np.concatenate([np.concatenate(draws) for draws in parts], axis=1)


def _groups(
    chains: list[Chain], observed: Observed, space: ObservationSpace
) -> dict[str, Variables]:
    """Return dims and arrays of the InferenceData, by group and variable."""
    groups: dict[str, Variables] = {}
    for group, names in chains[0].names.items():
        arrays = {name: np.stack([chain.values(group, name) for chain in chains]) for name in names}
        dims = dims_of_group(arrays, names, space)
        groups[group] = {name: (dims[name], array) for name, array in arrays.items()}
    if not observed.parts:
        return groups
    pixels = ["image", *space.dims], np.concatenate(observed.parts)
    return {**groups, "observed_data": {space.variable: pixels}}


def name_dims(site: dict, value: Tensor, space: ObservationSpace) -> tuple[Tensor, Names]:
    """Move the image dim first, drop dims of size 1 without a plate, and name the others.

    Args:
        site: a node of the model's trace, which determines the plates and the event rank.
        value: a value of that site, (*batch, *event).
        space: the space of the observations.

    Returns:
        (images, ...) and the names of the dims after the images, None for a dim without a name.
    """
    distribution = site["fn"]
    rank = distribution.event_dim
    event: Names = (None,) * rank  # unknown
    if site["name"] == space.site and rank == len(space.dims):
        event = space.dims
    elif site["name"].endswith("_pose") and rank == 1:
        event = ("coordinate",)
    outer = value.dim() - rank
    inner = (
        len(distribution.batch_shape) + rank - len(distribution.shape())
    )  # batch dims that its values lack
    return images_first(value, (*plate_names(site, outer + inner)[:outer], *event))


def images_first(value: Tensor, names: Names) -> tuple[Tensor, Names]:
    """Move the image dim first; a value without one belongs to a single image."""
    stray = [dim for dim, name in enumerate(names) if name == "" and value.shape[dim] == 1]
    value = value.squeeze(tuple(stray))
    names = tuple(name or None for dim, name in enumerate(names) if dim not in stray)
    if IMAGES_PLATE not in names:
        return value[None], names
    dim = names.index(IMAGES_PLATE)
    return value.movedim(dim, 0), (*names[:dim], *names[dim + 1 :])


def plate_names(site: dict, rank: int) -> Names:
    """Return the plate name of each of a site's batch dims, "" for a dim without a plate."""
    frames = {frame.dim: frame.name for frame in site["cond_indep_stack"] if frame.vectorized}
    return tuple(frames.get(dim, "") for dim in range(-rank, 0))


def dims_of_group(
    values: Mapping[str, np.ndarray], names: Mapping[str, Names], space: ObservationSpace
) -> dict[str, list[str]]:
    """Return the dim names of each variable (chain, draw, image, ...), unique within a variable.

    A dim without a name is called `<variable>_dim_<number>`. So is a dim whose name has another
    size elsewhere in the group, or is reserved in every evaluation ("draw").
    """
    sizes: dict[str, set[int]] = {}
    for variable, array in values.items():
        for name, size in zip(names[variable], array.shape[3:], strict=True):
            sizes.setdefault(name or "", set()).add(size)
    good = {name for name, lengths in sizes.items() if len(lengths) == 1} - {""}
    return {
        variable: ["chain", "draw", "image", *_unique(variable, names[variable], good, space.dims)]
        for variable in values
    }


def _unique(
    variable: str, names: Sequence[str | None], good: set[str], observed: tuple[str, ...]
) -> list[str]:
    allowed = good if tuple(names) == observed else good - _RESERVED - {*observed}
    numbers = iter(range(len(names)))
    return [
        name if name in allowed and names.count(name) == 1 else f"{variable}_dim_{next(numbers)}"
        for name in names
    ]
