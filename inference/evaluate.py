"""Evaluation on held-out images: bounds in nats, importance weights, and what the draws look like.

>>> idata = evaluate(model, guide, dataset.test[:1000], num_particles=100, seed=0)
>>> idata.sample_stats.log_weight      # (chain, draw, image): log p(x, z) - log q(z | x)
>>> summarize(idata)["iwae"]
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pyro
import torch
from pyro.infer.autoguide import AutoGuide
from pyro.poutine import Trace
from scipy.special import logsumexp
from torch import Tensor, nn

import capsule_zoo
from capsule_zoo.data import Split
from capsule_zoo.guides.base import in_eval_mode
from capsule_zoo.inference.check import check_pair, is_delta, is_discrete, latent_sites
from capsule_zoo.inference.inference_data import inference_data, pareto_shape
from capsule_zoo.inference.isolation import isolated_parameters, seeded
from capsule_zoo.inference.log_weight import log_weights
from capsule_zoo.inference.objective import repeated
from capsule_zoo.models.base import check_at_least, check_images_of

if TYPE_CHECKING:
    from arviz import InferenceData


def evaluate(
    model: nn.Module,
    guide: nn.Module,
    images: Tensor | Split,
    *,
    labels: Tensor | None = None,
    num_particles: int = 50,
    seed: int = 0,
    discrete: bool = True,
    draws: int = 4,
    batch_size: int = 512,
) -> InferenceData:
    """Importance-weigh a guide's draws against the model, image by image.

    Args:
        model, guide: the pair, on the device and in the precision they have.
        images: (N, C, H, W), or a `Split`, whose labels are not used.
        labels: (N,), handed on to both unless None.
        num_particles: draws for each image, K.
        seed: of the draws; torch's random state is left as it was.
        discrete: evaluate `with_discrete_presences()` where model and guide offer it. A relaxed
            pair has a log weight too, but it is no bound on the discrete model.
        draws: posterior draws to keep for each image, at most `num_particles`.
        batch_size: rows in one pass: images times particles. A guide with parameters per image
            (AutoGuides, guides with `per_image = True`) gets all images in every pass.

    Returns:
        An arviz InferenceData with the groups sample_stats (log_weight: chain, draw = K, image),
        posterior (by site), posterior_predictive (absent when the model sums sites out) and
        observed_data; images are the variable `pixels` there, for `image` is the dim.
        Its attributes hold estimator, K, seed, names, versions, seconds, and is_bound: 0 when the
        guide has a Delta over a continuous site, for which the log weight is a MAP objective and
        no bound on log p(image), or when the model is not `normalised` (see `log_partition`).

    Raises:
        ValueError: images are not what the model takes, or a number is below 1.
        IncompatibleGuide: the guide does not fit the model.
    """
    check_at_least(1, num_particles=num_particles, batch_size=batch_size)
    check_at_least(0, draws=draws)
    name = images.name if isinstance(images, Split) else "images"
    images = images.images if isinstance(images, Split) else images
    check_images_of(model, images)
    if discrete:
        model, guide = _discrete(model), _discrete(guide)
    images, labels = _as_wanted(model, guide, images, labels)
    store, mode = isolated_parameters(model, guide), in_eval_mode(model, guide)
    with store, mode, seeded(seed), torch.no_grad():
        few = slice(None) if is_per_image(guide) else slice(2)
        check_pair(model, guide, images[few], None if labels is None else labels[few])
        began = time.perf_counter()
        collected = _Collected(draws)
        for particles, part, part_labels in _passes(
            guide, images, labels, num_particles, batch_size
        ):
            collected.add(particles, *log_weights(model, guide, part, part_labels))
        seconds = time.perf_counter() - began
    attributes = {
        "estimator": "importance weighting",
        "num_particles": num_particles,
        "seed": seed,
        "model": type(model).__name__,
        "guide": type(guide).__name__,
        "data": name,
        "units": "nats per image",
        "is_bound": int(not collected.point_sites and getattr(model, "normalised", True)),
        "point_sites": ", ".join(sorted(collected.point_sites)),
        "seconds": seconds,
        "capsule_zoo": capsule_zoo.__version__,
        "pyro": pyro.__version__,
        "torch": torch.__version__,
    }
    return collected.inference_data(images, attributes)


def summarize(idata: InferenceData) -> dict[str, float | int | bool]:
    """Headline numbers of an evaluation, in nats per image.

    Returns:
        elbo, iwae (log-mean-exp of K weights; Burda, Grosse and Salakhutdinov 2016) and their
        standard errors over images, both NaN where the guide is a point and gives no bound;
        map_objective, NaN where it is one; ess, the mean over images of the effective number of
        draws; pareto_k, the median over images of the Pareto shape; seconds_per_image, for all K
        draws; is_bound; num_particles; num_images.
    """
    log_weight = idata.sample_stats["log_weight"].values[0]  # (draws, images)
    draws, images = log_weight.shape
    bound = bool(idata.attrs["is_bound"])
    elbo = per_image_elbo(idata)
    iwae = logsumexp(log_weight, axis=0) - np.log(draws)
    ess = np.exp(2 * logsumexp(log_weight, axis=0) - logsumexp(2 * log_weight, axis=0))
    nan = float("nan")
    return {
        "elbo": float(elbo.mean()) if bound else nan,
        "elbo_se": standard_error(elbo) if bound else nan,
        "iwae": float(iwae.mean()) if bound else nan,
        "iwae_se": standard_error(iwae) if bound else nan,
        "map_objective": nan if bound else float(elbo.mean()),
        "ess": float(ess.mean()),
        "pareto_k": float(np.median(pareto_shape(log_weight.T))),
        "seconds_per_image": float(idata.attrs["seconds"]) / images,
        "is_bound": bound,
        "num_particles": draws,
        "num_images": images,
    }


def per_image_elbo(idata: InferenceData) -> np.ndarray:
    """Mean log weight of each image, (images,), in nats."""
    return idata.sample_stats["log_weight"].values[0].mean(0)


def standard_error(values: np.ndarray) -> float:
    """Of the mean over images; NaN for a single image."""
    return float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else float("nan")


def is_per_image(guide: nn.Module) -> bool:
    """Whether the guide's parameters belong to one batch of images, in its order."""
    return isinstance(guide, AutoGuide) or getattr(guide, "per_image", False)


def point_sites(model_trace: Trace, guide_trace: Trace) -> set[str]:
    """Continuous sites at which the guide is a Delta, and so has no density.

    The Deltas of Pyro's AutoContinuous guides carry the density of an auxiliary site, and count
    as none.
    """
    wanted, drawn = latent_sites(model_trace), latent_sites(guide_trace)
    if any(site["infer"].get("is_auxiliary") for site in drawn.values()):
        return set()
    return {
        name
        for name, site in drawn.items()
        if name in wanted and is_delta(site["fn"]) and not is_discrete(wanted[name]["fn"])
    }


class _Collected:
    """What the passes of one evaluation leave behind."""

    def __init__(self, draws: int) -> None:
        self.draws = draws
        self.point_sites: set[str] = set()
        self._passes = 0
        self._log_weight: list[list[np.ndarray]] = []  # by images, then by particles
        self._kept: dict[tuple[str, str], list[list[np.ndarray]]] = {}

    def add(
        self, particles: tuple[int, int], log_weight: Tensor, model_trace: Trace, guide_trace: Trace
    ) -> None:
        """One pass: `particles` are the first particle's number and how many there are."""
        first, count = particles
        self._passes += 1
        self.point_sites |= point_sites(model_trace, guide_trace)
        _append(self._log_weight, first, log_weight.reshape(count, -1))
        keep = min(count, self.draws - first)
        if keep <= 0:
            return
        drawn = {("posterior", n): site["value"] for n, site in latent_sites(guide_trace).items()}
        if latent_sites(model_trace).keys() <= guide_trace.nodes.keys():
            image = model_trace.nodes["image"]
            # a stream of its own: weights do not depend on `draws`
            with seeded(torch.initial_seed() + 1 + self._passes):
                redrawn = image["fn"].sample().reshape(image["value"].shape)
            drawn["posterior_predictive", "pixels"] = redrawn
        for key, value in drawn.items():
            split = value.reshape(count, -1, *value.shape[1:])
            _append(self._kept.setdefault(key, []), first, split[:keep])

    def inference_data(self, images: Tensor, attributes: dict[str, Any]) -> InferenceData:
        dims = {"log_weight": ["image"]}
        groups: dict[str, dict[str, np.ndarray]] = {}
        for (group, site), values in self._kept.items():
            groups.setdefault(group, {})[site] = _joined(values)
            dims[site] = ["image"]
        groups["sample_stats"] = {"log_weight": _joined(self._log_weight)}
        groups["observed_data"] = {"pixels": images.cpu().numpy()}
        dims["pixels"] = ["image", "channel", "row", "column"]
        return inference_data(groups, dims, attributes)


def _append(parts: list[list[np.ndarray]], first: int, values: Tensor) -> None:
    if first == 0:
        parts.append([])
    parts[-1].append(values.cpu().numpy())


def _joined(parts: list[list[np.ndarray]]) -> np.ndarray:
    """(chain = 1, draws, images, ...)."""
    return np.concatenate([np.concatenate(draws) for draws in parts], axis=1)[None]


def _passes(
    guide: nn.Module, images: Tensor, labels: Tensor | None, particles: int, rows: int
) -> Iterator[tuple[tuple[int, int], Tensor, Tensor | None]]:
    """Batches of at most `rows` rows: (first particle, how many), images repeated, labels."""
    size = len(images) if is_per_image(guide) else min(len(images), rows)
    at_once = 1 if is_per_image(guide) else max(1, rows // size)
    for begin in range(0, len(images), size):
        part = images[begin : begin + size]
        part_labels = None if labels is None else labels[begin : begin + size]
        for first in range(0, particles, at_once):
            count = min(at_once, particles - first)
            yield (first, count), *repeated(part, part_labels, count)


def _discrete(module: nn.Module) -> nn.Module:
    offered: Callable[[], nn.Module] | None = getattr(module, "with_discrete_presences", None)
    return module if offered is None else offered()


def _as_wanted(
    model: nn.Module, guide: nn.Module, images: Tensor, labels: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Images and labels on the device of the parameters, images in their precision."""
    parameter = next((p for module in (model, guide) for p in module.parameters()), images)
    images = images.to(parameter.device, parameter.dtype)
    return images, None if labels is None else labels.to(parameter.device)
