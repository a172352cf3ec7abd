"""Ancestral sampling from a trained model, given the values of some sites.

The values of given sites come from the guide: a draw of every site, or the mean of its
distribution.

>>> mean_images(model, 36)                                 # samples of the prior
>>> top = infer(guide, images, ["object_presence", "object_pose"])
>>> mean_images(model, len(images), top)                   # the same objects, new parts
>>> image_log_likelihood(model, images, top)               # log p(image | objects, new parts)

All functions use the discrete model.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import repeat

import torch
from pyro import poutine
from pyro.distributions import Categorical
from pyro.poutine import Trace
from torch import Tensor, nn

from capsule_zoo.data.progress import track
from capsule_zoo.data.readable import ImageStream
from capsule_zoo.data.tensors import accept_arrays
from capsule_zoo.guides.base import Guide
from capsule_zoo.guides.per_image.site_distributions import base_distribution
from capsule_zoo.inference.evaluation.prepare import (
    Images,
    discrete_form,
    is_per_image,
    prepare_images,
    stream_images,
)
from capsule_zoo.inference.examination.pairs import rows_of_guide
from capsule_zoo.inference.functions import require_model
from capsule_zoo.inference.log_weight import with_summed_drawn
from capsule_zoo.models.base import Model
from capsule_zoo.models.checks import check_known, check_whole
from capsule_zoo.models.common.modes import eval_mode, use_seed
from capsule_zoo.models.common.trace_density import scored_sites

Sites = Mapping[str, Tensor]


def infer(
    guide: nn.Module,
    images: Images,
    sites: Sequence[str] | None = None,
    seed: int = 0,
    batch_size: int = 500,
) -> dict[str, Tensor]:
    """Sample the guide once and return the values of some sites, by default all, (N, ...) each.

    Args:
        guide, images: a guide, and images (N, C, H, W) or all that `encode` takes. Next to a guide
            that was made for a plain program rows, or data by the names of arguments and sites.

    Raises:
        ValueError: no sites are given, and the guide does not name the sites that it covers; or it
            draws no site of that name.
    """
    images = rows_of_guide(guide, images)
    batches = _images_for_guide(guide, images, batch_size, check=False)
    sites, discrete = sites or getattr(guide, "covers", None), discrete_form(guide)
    if sites is None:
        raise ValueError(f"{type(guide).__name__} does not say what it covers; give sites")
    return _collect_values(discrete, batches, sites, lambda site: site["value"], seed, batch_size)


def draw_summed(
    model: Model, images: Tensor | ImageStream, latents: Sites, seed: int = 0, batch_size: int = 500
) -> dict[str, Tensor]:
    """Return all latents, (N, ...) by site; summed-out sites are sampled from their posterior.

    Args:
        images: (N, C, H, W).
        latents: values (N, ...) of the other sites.
    """
    discrete = model.discretize()
    draws: dict[str, list[Tensor]] = {site.name: [] for site in discrete.sites}
    with torch.no_grad(), use_seed(seed), eval_mode(discrete):
        begin = 0
        for batch in images.split(batch_size):
            some = {name: value[begin : begin + len(batch)] for name, value in latents.items()}
            begin += len(batch)
            nodes = with_summed_drawn(discrete, some, batch).nodes
            for name, values in draws.items():
                values.append(nodes[name]["value"])
    return {name: torch.cat(values) for name, values in draws.items()}


def distribution_means(
    guide: Callable, images: Images, sites: Sequence[str], seed: int = 0, batch_size: int = 500
) -> dict[str, Tensor]:
    """Return the means (N, ...) of the guide's distributions at some sites, given one sample.

    A presence (a site with `logits`) is represented by its probability. A class is represented by
    the probabilities of its values, (N, ..., values). A distribution without a mean is represented
    by its draw.

    Raises:
        ValueError: the guide draws no site of that name.
    """
    batches = _images_for_guide(guide, images, batch_size)
    return _collect_values(guide, batches, sites, _mean, seed, batch_size)


def _images_for_guide(
    guide: Callable, images: Images, rows: int, check: bool = True
) -> Tensor | ImageStream:
    """Return images in the form the guide takes: all in memory if the guide is `per_image`."""
    if is_per_image(guide):
        return prepare_images(guide, images, check=check)
    check_whole(1, batch_size=rows)
    return stream_images(guide, images, rows=rows, check=check)


def _collect_values(
    guide: Callable,
    images: Tensor | ImageStream,
    sites: Sequence[str],
    read: Callable[[dict], Tensor],
    seed: int,
    batch_size: int,
) -> dict[str, Tensor]:
    """Apply `read` to these sites of the guide's traces; return the values, (N, ...) by site."""
    values_by_site: dict[str, list[Tensor]] = {name: [] for name in sites}
    read_by = (guide, guide.model) if isinstance(guide, Guide) else (guide,)
    with torch.no_grad(), use_seed(seed), eval_mode(*read_by):
        batches = images.split(len(images) if is_per_image(guide) else batch_size)
        for batch in track(batches, "encoding", "batches"):
            nodes = poutine.trace(guide).get_trace(batch).nodes
            missing = [name for name in sites if name not in nodes]
            if missing:
                drawn = [n for n in nodes if nodes[n]["type"] == "sample"]
                raise ValueError(f"sites holds {missing}, but the guide draws only {drawn}")
            for name, values in values_by_site.items():
                values.append(read(nodes[name]).detach())  # a value may be a parameter itself
    return {name: torch.cat(values) for name, values in values_by_site.items()}


def _mean(site: dict) -> Tensor:
    distribution, value = base_distribution(site["fn"]), site["value"]
    if isinstance(distribution, Categorical):
        return distribution.logits.softmax(-1).expand(*value.shape, -1)
    if getattr(distribution, "logits", None) is not None:  # a one-hot class or a presence
        fractions = (
            distribution.logits.softmax(-1)
            if distribution.event_shape
            else distribution.logits.sigmoid()
        )
        return fractions.expand_as(value)
    try:
        return distribution.mean.expand_as(value)
    except NotImplementedError:
        return value


@require_model
def mean_images(
    model: Model,
    number: int,
    latents: Sites | None = None,
    seed: int = 0,
    batch_size: int = 500,
    images: Tensor | ImageStream | None = None,
) -> Tensor:
    """Return images without pixel noise, E[image | drawn latents], (number, C, H, W).

    Args:
        latents: values (number, ...) of the sites that are not to be drawn.
        images: (number, C, H, W) to run the model on when all latents are given; an energy model
            then does not have to run a chain for its draws.
    """

    def read(trace: Trace) -> Tensor:
        return model.space.read(trace, lambda site: site["fn"].mean)

    return _run(model, read, number, latents or {}, seed, batch_size, images)


def draw_images(
    model: Model,
    number: int,
    latents: Sites | None = None,
    seed: int = 0,
    batch_size: int = 500,
    images: Tensor | ImageStream | None = None,
) -> Tensor:
    """Draw images with pixel noise, from p(image | drawn latents), (number, C, H, W).

    Args: as for `mean_images`.
    """

    def drawn(site: dict) -> Tensor:
        return site["value"] if images is None else site["fn"].sample()

    def read(trace: Trace) -> Tensor:
        return model.space.read(trace, drawn)

    return _run(model, read, number, latents or {}, seed, batch_size, images)


@require_model
def image_log_likelihood(
    model: Model, images: Tensor, latents: Sites, seed: int = 0, batch_size: int = 500
) -> Tensor:
    """Compute log p(image | latents), (N,), in nats; latents that are not given are sampled.

    Args:
        images: (N, C, H, W).
        latents: values (N, ...) by site.
    """
    return _run(
        model, _log_prob([*model.space.sites]), len(images), latents, seed, batch_size, images
    )


def _log_prob(sites: list[str]) -> Callable[[Trace], Tensor]:
    """Return a function from a trace to the summed log densities of these sites, (B,).

    The plate of the images is outermost.
    """

    def read(trace: Trace) -> Tensor:
        trace.compute_log_prob(site_filter=lambda name, site: name in sites)
        terms = [trace.nodes[name]["log_prob"] for name in sites]
        return torch.stack([term.reshape(len(term), -1).sum(1) for term in terms]).sum(0)

    return read


@accept_arrays("latents", "images", like="model")
def _run(
    model: Model,
    read: Callable[[Trace], Tensor],
    number: int,
    latents: Sites,
    seed: int,
    batch_size: int,
    images: Tensor | ImageStream | None = None,
) -> Tensor:
    """Apply `read` to traces of the discrete model, batch by batch, and join the results.

    Raises:
        ValueError: a given name that is no site of the model.
    """
    check_whole(1, number=number, batch_size=batch_size)
    model, results = model.discretize(), []
    with torch.no_grad(), use_seed(seed), eval_mode(model):
        batches = repeat(None) if images is None else images.split(batch_size)
        firsts = track(range(0, number, batch_size), "drawing images", "batches")
        for begin, batch in zip(firsts, batches, strict=False):
            end = min(begin + batch_size, number)
            conditioned = poutine.condition(model, {k: v[begin:end] for k, v in latents.items()})
            traced = poutine.trace(conditioned)
            if batch is None:
                trace = traced.get_trace(batch_size=end - begin)
            else:
                trace = traced.get_trace(batch)
            for name in latents:  # Pyro ignores a name that the model does not have
                check_known("site", name, list(scored_sites(trace)))
            results.append(read(trace))
    return torch.cat(results)
