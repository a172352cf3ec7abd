"""A trained model run downwards: some sites are given, the model draws the rest.

>>> mean_images(model, 36)                                 # what the prior dreams of
>>> top = infer(guide, images, ["object_presence", "object_pose"])
>>> mean_images(model, len(images), top)                   # the same objects, new parts
>>> image_log_likelihood(model, images, top)               # log p(image | objects, new parts)

Everything is on the discrete model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from pyro import poutine
from pyro.poutine import Trace
from torch import Tensor

from capsule_zoo.guides.base import Guide, in_eval_mode
from capsule_zoo.models.base import Model

Sites = Mapping[str, Tensor]


def infer(
    guide: Guide,
    images: Tensor,
    sites: Sequence[str] | None = None,
    seed: int = 0,
    batch_size: int = 500,
) -> dict[str, Tensor]:
    """One draw of the guide at some of its sites (all that it covers), (N, ...) each."""
    guide = guide.with_discrete_presences()
    drawn: dict[str, list[Tensor]] = {name: [] for name in sites or guide.covers}
    with _drawing(seed), in_eval_mode(guide):
        for batch in images.split(batch_size):
            trace = poutine.trace(guide).get_trace(batch)
            for name, values in drawn.items():
                values.append(trace.nodes[name]["value"])
    return {name: torch.cat(values) for name, values in drawn.items()}


def mean_images(
    model: Model,
    number: int,
    given: Sites | None = None,
    seed: int = 0,
    batch_size: int = 500,
    images: Tensor | None = None,
) -> Tensor:
    """Images without pixel noise, (number, C, H, W): E[image | latents], the latents drawn.

    Args:
        given: values (number, ...) of the sites that are not to be drawn.
        images: (number, C, H, W) to run the model on, where all latents are given: an energy model
            then need not run a chain for its draws.
    """

    def read(trace: Trace) -> Tensor:
        return trace.nodes["image"]["fn"].mean.reshape(-1, *model.image_shape)

    return _run(model, read, number, given or {}, seed, batch_size, images)


def image_log_likelihood(
    model: Model, images: Tensor, given: Sites, seed: int = 0, batch_size: int = 500
) -> Tensor:
    """log p(image | latents) of every image, (N,), in nats; latents that are not given are drawn.

    Args:
        images: (N, C, H, W).
        given: values (N, ...) by site.
    """

    def read(trace: Trace) -> Tensor:
        return _log_prob(trace, ["image"])

    return _run(model, read, len(images), given, seed, batch_size, images)


def log_prior(model: Model, given: Sites, batch_size: int = 500) -> Tensor:
    """log p of values at the top of the model, (N,), in nats.

    Args:
        given: values (N, ...) of sites that depend on no site but on each other.
    """

    def read(trace: Trace) -> Tensor:
        return _log_prob(trace, list(given))

    return _run(model, read, len(next(iter(given.values()))), given, 0, batch_size)


def _log_prob(trace: Trace, sites: list[str]) -> Tensor:
    """Sum of the sites' log densities, (B,); the plate of the images is the outermost."""
    trace.compute_log_prob(site_filter=lambda name, site: name in sites)
    terms = [trace.nodes[name]["log_prob"] for name in sites]
    return torch.stack([term.reshape(len(term), -1).sum(1) for term in terms]).sum(0)


def _run(
    model: Model,
    read: Callable[[Trace], Tensor],
    number: int,
    given: Sites,
    seed: int,
    batch_size: int,
    images: Tensor | None = None,
) -> Tensor:
    """What `read` finds in traces of the discrete model, batch by batch, with these sites given."""
    model, found = model.with_discrete_presences(), []
    with _drawing(seed), in_eval_mode(model):
        for begin in range(0, number, batch_size):
            end = min(begin + batch_size, number)
            conditioned = poutine.condition(model, {k: v[begin:end] for k, v in given.items()})
            arguments: dict[str, Any] = (
                {"batch_size": end - begin} if images is None else {"images": images[begin:end]}
            )
            found.append(read(poutine.trace(conditioned).get_trace(**arguments)))
    return torch.cat(found)


@contextmanager
def _drawing(seed: int) -> Iterator[None]:
    """No gradients and a seeded stream of draws, put back afterwards."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
