"""Five verbs for every model: encode, reconstruct, posterior_predictive, sample, classify.

>>> encode(model, guide, images)["object_presence"]             # means of the latents, (N, ...)
>>> reconstruct(model, guide, images)                           # (N, C, H, W)
>>> posterior_predictive(model, guide, images, num_samples=20)  # (20, N, C, H, W)
>>> sample(model, 36)                                           # (36, C, H, W)
>>> classify(model, guide, images)                              # (N,)

All run on the discrete model, in evaluation mode and without gradients. `seed` alone determines the
draws: torch's own random state, Pyro's parameter store and the modules are left as they were. A
model that does not support a verb raises an error that names an alternative.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from capsule_zoo.data.readable import ImageStream
from capsule_zoo.inference.check import refuse_non_finite_parameters
from capsule_zoo.inference.evaluation.ancestral import (
    distribution_means,
    draw_images,
    draw_summed,
    infer,
    mean_images,
)
from capsule_zoo.inference.evaluation.prepare import (
    Images,
    discrete_form,
    is_per_image,
    prepare_images,
    refuse_relaxed_draws,
    stream_images,
)
from capsule_zoo.inference.functions import check_module, require_model
from capsule_zoo.inference.isolation import isolated_parameters
from capsule_zoo.inference.other_model import warn_of_another_model
from capsule_zoo.models.base import Model
from capsule_zoo.models.checks import check_seed, check_whole
from capsule_zoo.models.common.spaces import tile_batch

_REMEDY = "use a guide of capsule_zoo.guides, or Predictive on the relaxed pair"


class _Pass(NamedTuple):
    """The images of one pass, (draws x N, ...), batch size, and seeds of guide and model."""

    images: Tensor | ImageStream
    draws: int
    rows: int
    guide_seed: int
    model_seed: int


@require_model
def encode(
    model: Model,
    guide: nn.Module,
    images: Images,
    *,
    num_samples: int = 1,
    seed: int = 0,
    batch_size: int = 500,
) -> dict[str, Tensor]:
    """Return the posterior mean of every latent site under the guide.

    Each draw gives the mean of a site's distribution, given the guide's draws of the earlier sites.
    These means are averaged over the draws. One draw is exact if the sites are independent under
    the guide, as in a VAE. It is also exact for sites that come first, such as parts, which depend
    on the image alone. It is an estimate for sites that depend on earlier ones, such as objects.

    Args:
        model, guide: the pair.
        images: (N, C, H, W), or all that `fit` takes: a `Split`, a `Dataset` (its test split), a
            list of batches, or a torch `Dataset` or `DataLoader` without shuffling, which is read
            batch by batch, so that its images need not fit in memory.
        num_samples: draws of the guide for each image.
        seed: seed of the draws.
        batch_size: images in one pass.

    Returns:
        (N, ...) by site: means, the probabilities of presences, and for a class the probabilities
        of its values. A distribution without a mean is represented by its draws.

    Raises:
        ValueError: images that the model does not take, a number below 1, or a guide with relaxed
            presences only.
    """
    totals: dict[str, Tensor] = {}
    sites = [site.name for site in model.latent_sites]
    with _ready(model, guide, images, num_samples, seed, batch_size) as passes:
        for chunk in passes:
            means = distribution_means(
                discrete_form(guide), chunk.images, sites, chunk.guide_seed, chunk.rows
            )
            for name, values in means.items():
                values = values.to(torch.promote_types(values.dtype, chunk.images.dtype))
                total = values.unflatten(0, (chunk.draws, -1)).sum(0)
                totals[name] = totals[name] + total if name in totals else total
    return {name: total / num_samples for name, total in totals.items()}


@require_model
def reconstruct(
    model: Model,
    guide: nn.Module,
    images: Images,
    *,
    num_samples: int = 1,
    seed: int = 0,
    batch_size: int = 500,
) -> Tensor:
    """Return the model's reconstructions of the images, (N, C, H, W), without pixel noise.

    A reconstruction is E[image | latents], averaged over `num_samples` draws of the latents from
    the guide. Sites that the model sums out come from their posterior given the image and the rest.

    Args: as for `encode`.

    Raises:
        ValueError: as for `encode`, or the model draws no images.
    """
    _check_paints(model)
    with _ready(model, guide, images, num_samples, seed, batch_size) as passes:
        totals = [_paint_images(model, guide, chunk, mean_images).sum(0) for chunk in passes]
    return torch.stack(totals).sum(0) / num_samples


@require_model
def posterior_predictive(
    model: Model,
    guide: nn.Module,
    images: Images,
    num_samples: int = 100,
    *,
    seed: int = 0,
    batch_size: int = 500,
) -> Tensor:
    """Return new images that the model draws given the inferred latents, with pixel noise.

    In Pyro's terms it is `Predictive(poutine.uncondition(model), guide=guide,
    num_samples=num_samples)(images)["image"]` on the discrete pair.
    Sites that the model sums out are drawn as for `reconstruct`, where Pyro takes their prior.

    Args:
        num_samples: draws of latents and pixels for each image.
        model, guide, images, seed, batch_size: as for `encode`.

    Returns:
        (num_samples, N, C, H, W).

    Raises:
        ValueError: as for `encode`, or the model draws no images.
    """
    _check_paints(model)
    with _ready(model, guide, images, num_samples, seed, batch_size) as passes:
        return torch.cat([_paint_images(model, guide, chunk, draw_images) for chunk in passes])


@require_model
def sample(model: Model, number: int = 1, *, seed: int = 0, batch_size: int = 500) -> Tensor:
    """Return images drawn from the model, (number, C, H, W), pixel noise included.

    `capsule_zoo.inference.evaluation.ancestral.mean_images` gives the same draws without the noise.

    Args:
        number: number of images; for an energy model, number of Gibbs chains.
        seed, batch_size: as for `encode`.

    Raises:
        ValueError: a number below 1, or the model draws no images.
    """
    check_seed(seed)
    _check_paints(model)
    refuse_non_finite_parameters(model)
    with isolated_parameters(model):
        return draw_images(model, number, seed=seed, batch_size=batch_size)


def _paint_images(
    model: Model, guide: nn.Module, chunk: _Pass, paint: Callable[..., Tensor]
) -> Tensor:
    """Apply `paint` to the guide's samples, and return its images, (draws, N, C, H, W)."""
    sites = [site.name for site in model.latent_sites]
    latents = infer(guide, chunk.images, sites, chunk.guide_seed, chunk.rows)
    number, seed = len(chunk.images), chunk.model_seed
    if any(site.enumerated for site in model.sites):
        latents = draw_summed(model, chunk.images, latents, seed, chunk.rows)
    painted = paint(model, number, latents, seed, chunk.rows, images=chunk.images)
    return painted.unflatten(0, (chunk.draws, -1))


@contextmanager
def _ready(
    model: Model, guide: nn.Module, images: Images, num_samples: int, seed: int, batch_size: int
) -> Iterator[Iterator[_Pass]]:
    """Open a context without foreign parameters in Pyro's store, and yield the passes."""
    check_whole(1, num_samples=num_samples, batch_size=batch_size)
    check_seed(seed)
    check_module(guide)
    wanted: Tensor | ImageStream
    if is_per_image(guide):
        wanted = example = prepare_images(model, images, guide)
    else:
        wanted = stream_images(model, images, guide, rows=batch_size)
        example = wanted[:2]
    with isolated_parameters(model, guide):
        warn_of_another_model(model, guide, example)
        refuse_relaxed_draws(model, guide, example, remedy=_REMEDY)
        yield _passes(guide, wanted, num_samples, seed, batch_size)


def _passes(
    guide: nn.Module, images: Tensor | ImageStream, num_samples: int, seed: int, batch_size: int
) -> Iterator[_Pass]:
    """Yield passes over all draws, with as many draws at once as `batch_size` allows.

    The parameters of a guide that is `per_image` belong to these images in this order, so all
    images are processed at once. Images that are read from a stream are read for each draw. The
    guide's first seed is `seed`; all other seeds follow from it.
    """
    alone = is_per_image(guide)
    several = isinstance(images, Tensor) and not alone
    at_once = max(1, batch_size // len(images)) if several else 1
    rows = len(images) if alone else batch_size
    generator = torch.Generator().manual_seed(seed)
    for first in range(0, num_samples, at_once):
        further, model_seed = torch.randint(2**62, (2,), generator=generator).tolist()
        draws = min(at_once, num_samples - first)
        guide_seed = seed if first == 0 else further
        copies = tile_batch(images, draws) if isinstance(images, Tensor) else images
        yield _Pass(copies, draws, rows, guide_seed, model_seed)


def _check_paints(model: Model) -> None:
    if model.supervised:
        raise ValueError(
            f"{type(model).__name__} explains labels and says nothing of images; use "
            "classify(model, guide, images)"
        )
