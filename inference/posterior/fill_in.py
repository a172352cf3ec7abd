"""Inpainting: predict missing pixels, and measure the log density of hidden ones.

>>> mask = half_mask((28, 28), "left")                     # True where a pixel is observed
>>> result = fill_in(model, guide, images, mask, steps=100)
>>> result.images, result.log_hidden                      # filled in; nats of each hidden half

The latents z are inferred from the observed pixels alone. The hidden pixels are predicted by a
mixture over K draws from the guide,

    z_k ~ q(z | observed),    p(hidden) = sum_k w_k p(hidden | z_k)

where the weights w_k are either all 1 / K or importance weights, proportional to p(observed, z_k) /
q(z_k). Sites that the model sums out are part of z, drawn from p(site | observed, all others).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from capsule_zoo.data.missing import check_mask, hide
from capsule_zoo.data.progress import track
from capsule_zoo.data.tensors import accept_arrays
from capsule_zoo.guides import Guide
from capsule_zoo.inference.check import check_pair, name_of
from capsule_zoo.inference.evaluation.prepare import Images, is_per_image, prepare_images
from capsule_zoo.inference.functions import require_model
from capsule_zoo.inference.isolation import isolated_parameters
from capsule_zoo.inference.log_weight import enumerated_sites, log_weights, with_summed_drawn
from capsule_zoo.inference.posterior.refine import refine
from capsule_zoo.models import Model
from capsule_zoo.models.checks import check_whole
from capsule_zoo.models.common.missing_pixels import log_prob_of_pixels
from capsule_zoo.models.common.modes import eval_mode, use_seed
from capsule_zoo.models.common.spaces import observed_node, tile_batch


@dataclass(frozen=True)
class FilledIn:
    """The result of `fill_in`.

    Attributes:
        images: (N, C, H, W). Hidden pixels have the mean of the mixture, which gives the least
            expected squared error under this mixture.
        drawn: the images with mean pixels of one z_k, chosen with probability w_k. It is a single
            sharp answer, whereas the mean of several is blurred.
        log_hidden: (N,), nats: log sum_k w_k p(hidden | z_k) at the hidden pixels whose values were
            given (NaN pixels are left out). Draws and weights do not depend on these pixels, so the
            mixture is a density over them and its logarithm is a proper score: on average only
            better prediction raises it. It is the score of this mixture of K distributions. As K
            grows it rises on average. With equal weights it tends to the score of the guide's own
            predictive distribution; with importance weights it tends to log p(hidden | observed) of
            the model, if the guide has a density. It is not a bound on log p(image).
        ess: (N,), the effective number of draws, 1 / sum_k w_k^2; K with equal weights.
    """

    images: Tensor
    drawn: Tensor
    log_hidden: Tensor
    ess: Tensor


@accept_arrays("observed", "fill")
@require_model
def fill_in(
    model: Model,
    guide: Guide,
    images: Images,
    observed: Tensor | None = None,
    *,
    num_particles: int = 100,
    weighted: bool = False,
    steps: int = 0,
    fill: Tensor | float = 0.0,
    seed: int = 0,
    batch_size: int = 512,
) -> FilledIn:
    """Infer the latents from the observed pixels alone, and predict the hidden pixels.

    The discrete model is used. Model and guide are not changed.

    Args:
        model: any model whose pixels are independent given its latents.
        guide: a guide to it.
        images: (N, C, H, W). The value of a hidden pixel is used for `log_hidden` alone.
        observed: bool, True where a pixel is observed: (H, W), (C, H, W), (N, 1, H, W) or
            (N, C, H, W); by default all pixels that are not NaN.
        num_particles: draws for each image, K.
        weighted: True gives draws importance weights. They correct a guide whose draws are near the
            posterior. If the effective number of draws is near 1, one draw dominates the mixture,
            and equal weights predict better.
        steps: steps of test-time inference on the observed pixels. Every image has its own
            parameters, which start at the guide's answer (`fit_guide("free_form", ...)`). With 0
            steps the guide's answer to the filled image is used unchanged, although the guide may
            never have been trained on such images.
        fill: the value that the guide sees at hidden pixels, a number or (C, H, W).
        seed: seed of all draws; torch's random state is left as it was.
        batch_size: rows in one pass: images times particles. A guide with parameters per image
            gets all images in every pass.

    Raises:
        ValueError: images or a mask that do not fit, a number out of range, a model that has no
            density of single pixels, or `steps` for a model with a site that no free-form
            distribution fits.
        IncompatibleGuide: the guide does not fit the model.
    """
    check_whole(1, num_particles=num_particles, batch_size=batch_size)
    check_whole(0, steps=steps)
    if not isinstance(guide, Guide):
        raise ValueError(f"guide must be a Guide, which fills pixels in, not {name_of(guide)}")
    model, guide = model.with_missing_pixels(), guide.with_missing_pixels(fill)
    images = prepare_images(model, images, guide)
    observed = ~images.isnan() if observed is None else check_mask(images, observed)
    if (images.isnan() & observed).any():
        raise ValueError("images holds NaN at observed pixels; mark these False in observed")
    with isolated_parameters(model, guide), eval_mode(model, guide), use_seed(seed):
        whole = is_per_image(guide)
        check_size, size = (len(images), len(images)) if whole else (2, batch_size)
        check_pair(model, guide, hide(images[:check_size], observed[:check_size]))
        parts = []
        batches = [*zip(images.split(size), observed.split(size), strict=True)]
        for batch, mask in track(batches, "filling in", "batches"):
            visible = hide(batch, mask)
            answer = guide
            if steps:
                noise = int(torch.randint(2**31, ()))
                answer = refine(
                    model, guide, visible, steps=steps, distribution="normal", seed=noise
                )
            most = max(1, batch_size // len(batch))  # particles in one pass
            passes = [min(most, num_particles - n) for n in range(0, num_particles, most)]
            parts.append(_predict_pixels(model, answer, batch, mask, passes, weighted))
    return FilledIn(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


@torch.no_grad()
def _predict_pixels(
    model: Model, guide: Guide, images: Tensor, observed: Tensor, passes: list[int], weighted: bool
) -> tuple[Tensor, ...]:
    """Return the fields of `FilledIn` for a batch; `passes` has the particles of each pass."""
    model, guide = model.discretize(), guide.discretize()
    draws = [_draws(model, guide, images, observed, count) for count in passes]
    log_weight, log_hidden, means = (torch.cat(parts) for parts in zip(*draws, strict=True))
    log_fraction = (log_weight if weighted else 0 * log_weight).log_softmax(0)  # (K, B)
    fraction = log_fraction.exp()
    particles = torch.multinomial(fraction.T, 1).squeeze(1)
    mean = torch.einsum("kb,kb...->b...", fraction, means)
    single = means[particles, torch.arange(len(images))]
    return (
        torch.where(observed, images, mean),
        torch.where(observed, images, single),
        (log_fraction + log_hidden).logsumexp(0),
        1 / fraction.square().sum(0),
    )


def _draws(
    model: Model, guide: Guide, images: Tensor, observed: Tensor, particles: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log weights (K, B), hidden-pixel log densities (K, B) and means (K, B, C, H, W)."""
    shape = particles, len(images)
    images, observed = (tile_batch(x, particles) for x in (images, observed))
    hidden = hide(images, observed)
    log_weight, trace, drawn = log_weights(model, guide, hidden)
    if enumerated_sites(trace):
        values = {name: drawn.nodes[name]["value"] for name in guide.covers}
        trace = with_summed_drawn(model, values, hidden)
    image = observed_node(trace, model)
    distribution, site_shape = image["fn"].distribution, image["value"].shape
    scored = (~observed & ~images.isnan()).reshape(site_shape)
    pixels = images.nan_to_num(nan=0.0).reshape(site_shape)
    log_hidden = log_prob_of_pixels(distribution, pixels, scored)
    mean = model.space.as_batch(distribution.mean).unflatten(0, shape)
    return log_weight.view(shape), log_hidden.reshape(shape), mean
