"""Test-time inference: a guide's posterior of each image is improved, with the model frozen.

>>> better = fit_guide("free_form", model, guide, images, steps=100)  # to these images
>>> evaluate(model, better, images)
>>> better.refinement.path                                # mean objective at each step, nats

It serves every model with a density; the guide that it returns uses the sites that the model
declares. The paper optimizes for hundreds to thousands of steps and calls that a defect. Two
changes remove most of that cost. (1) All images are optimized in one batch. (2) Adam uses betas of
0.8, a five-step warm-up and a linear decay to zero, and a three times larger rate for presences (in
general: for all logits) than for poses. Every step draws new noise for the presences. Under fixed
noise the presences would fit that noise and seem to gain dozens of nats, which fresh draws do not
confirm.

Draws of a discrete site have no gradient. Where there is such a site, every step draws each image
eight times and adds the score-function estimate

    mean_k (log w_k - mean_{l != k} log w_l) grad log q(discrete sites of draw k)

to the gradient that passes through the draws of the other sites.

Reference: Smith, Schut, Gal & van der Wilk 2020 (arXiv 2004.03553).
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from pyro import poutine, validation_enabled
from torch import Tensor
from torch.optim import Adam
from torch.optim.lr_scheduler import LambdaLR

from capsule_zoo.data import transforms
from capsule_zoo.data.progress import track
from capsule_zoo.guides import Corrected, FreeForm, Guide
from capsule_zoo.guides.per_image.base import PerImageGuide, Refinement
from capsule_zoo.inference.evaluation.prepare import Images, prepare_images
from capsule_zoo.inference.functions import require_model
from capsule_zoo.inference.isolation import isolated_parameters
from capsule_zoo.inference.log_weight import log_density, log_weights
from capsule_zoo.inference.not_finite import (
    NAMING_NO_IMAGE,
    NonFiniteGuide,
    non_finite,
    refuse_non_finite,
)
from capsule_zoo.inference.other_model import warn_of_another_model
from capsule_zoo.models.base import Model
from capsule_zoo.models.checks import check_one_of, check_positive, check_whole
from capsule_zoo.models.common.modes import eval_mode, frozen, use_seed
from capsule_zoo.models.common.spaces import tile_batch
from capsule_zoo.models.common.trace_density import log_score
from capsule_zoo.models.part_whole import PartWholeCapsules
from capsule_zoo.models.parts import poses

_BETAS, _WARMUP = (0.8, 0.8), 5
_LOGITS = 3.0  # learning rate of logits, relative to the rate of poses and other continuous values
_NOISY_LOGITS = 0.3  # _LOGITS for corrections, where discrete samples have no gradient
_JUDGED, _DRAWS = 2, 4  # judgments of an image in a run, and draws of each judgment
_DRAWS_CORRECTED = 16  # _DRAWS for corrections: a corrected guide is often good by luck in four
_SCORED = 8  # draws of each image in a step, where discrete samples have no gradient


@require_model
@torch.inference_mode(False)
def refine(
    model: Model,
    guide: Guide | None,
    images: Images,
    *,
    steps: int = 100,
    method: str = "scheduled",
    lr: float | None = None,
    starts: int = 1,
    distribution: str = "delta",
    seed: int = 0,
    check: bool = True,
) -> PerImageGuide:
    """Return a guide with optimized free-form parameters of every image.

    Halfway and at the end the objective of every image is computed under noise that no step has
    used. Parameters that lowered it are discarded, so no image ends below its start.

    Args:
        model: the model; it is not changed.
        guide: the guide to start from; None starts at a draw from the prior.
        images: (B, C, H, W).
        steps: optimizer steps; each renders every image once, forward and backward.
        method: "scheduled" (Adam with betas of .8; the rate grows over five steps, then falls to
            zero along a line, and is three times as large for logits) or "adam" (plain Adam at
            a constant rate, the paper's way).
        lr: largest rate of continuous values. The default is .03 for "scheduled" and .003 for
            "adam" for the poses of part-whole capsules, whose prior is narrow, and three times as
            much for other models, whose codes have a standard deviation of about 1.
        starts: number of rotations of the image, spread over the circle, on which the guide is
            tried first; each image continues from its best rotation. More than 1 is for part-whole
            capsules alone, whose poses can be rotated back.
        distribution: the distribution of continuous sites, "delta", "normal" or "low_rank" (see
            `FreeForm`), or "corrected" for the distributions of `guide` itself with corrections
            (see `Corrected`).
        seed: seed of the noise.
        check: whether images outside of the pixels' range are refused. A model may draw such ones.

    Raises:
        ValueError: an unknown method, a number out of range, images the model does not take, a
            site that no free-form distribution fits, several starts for another model, or
            corrections of no guide.
        NonFiniteGuide: the guide, or the objective under it, is not finite for some image; the
            message names image and site.
    """
    images = prepare_images(model, images, guide, check=check)
    check_one_of("method", method, ("scheduled", "adam"))
    check_whole(0, steps=steps)
    check_whole(1, starts=starts)
    if starts > 1 and not isinstance(model, PartWholeCapsules):
        raise ValueError(
            f"starts must be 1 for {type(model).__name__}, not {starts}: other starts rotate the "
            "image and turn the poses of part-whole capsules back"
        )
    if distribution == "corrected" and (guide is None or starts > 1):
        raise ValueError(
            "distribution 'corrected' corrects the distributions of one guide at one start; give a "
            "guide, and leave starts at 1"
        )
    if lr is not None:
        check_positive(lr=lr)
    try:
        free = run_refinement(model, guide, images, steps, method, lr, starts, distribution, seed)
    except NAMING_NO_IMAGE:
        with isolated_parameters(model), eval_mode(model), use_seed(seed):
            bad, site = ([], None) if guide is None else non_finite(model, guide, images)
        if not bad:
            raise
        subject = f"{type(guide).__name__} of {type(model).__name__}"
        raise NonFiniteGuide.of(subject, bad, len(images), site) from None
    with isolated_parameters(model), eval_mode(model), use_seed(seed), torch.no_grad():
        assert free.refinement is not None
        refuse_non_finite(free, images, free.refinement.end)
    return free


def run_refinement(
    model: Model,
    guide: Guide | None,
    images: Tensor,
    steps: int,
    method: str = "scheduled",
    lr: float | None = None,
    starts: int = 1,
    distribution: str = "delta",
    seed: int = 0,
) -> PerImageGuide:
    """Run `refine` on checked arguments, and return its guide also if it is not finite."""
    scheduled = method == "scheduled"
    usual = (0.03 if scheduled else 0.003) * (1 if isinstance(model, PartWholeCapsules) else 3)
    rate = usual if lr is None else lr
    if guide is not None:
        warn_of_another_model(model, guide, images)
    with isolated_parameters(model), frozen(model), eval_mode(model), use_seed(seed):
        draws = _DRAWS_CORRECTED if distribution == "corrected" else _DRAWS
        judge = partial(_evaluate_objective, model, images, torch.randint(2**31, (draws,)).tolist())
        free = _best_start(model, images, guide, starts, distribution, judge)
        best = _Best(free, judge(free))
        with validation_enabled(False):  # a step may lead to NaN, which is then discarded
            optimizer, schedule = _optimizer(free, rate, steps if scheduled else None)
            path = []
            for step in track(range(steps), "refining", "steps"):
                objective, surrogate = _objective(model, free, images)
                optimizer.zero_grad()
                (-surrogate.sum()).backward()
                optimizer.step()
                schedule.step()
                path.append(objective.detach().mean())
                if step + 1 in {math.ceil(steps * i / _JUDGED) for i in range(1, _JUDGED + 1)}:
                    best.keep(judge(free))
            best.restore()
            with torch.no_grad():
                path.append(log_weights(model, free, images)[0].mean())
        free.refinement = Refinement(torch.stack(path), best.start, best.values)
        return free


def _objective(model: Model, free: PerImageGuide, images: Tensor) -> tuple[Tensor, Tensor]:
    """Return each image's objective, (B,), and a surrogate with its gradient.

    They are equal if gradients pass through all draws. For a corrected guide, which begins near
    an optimum, the gradient leaves out the gradient of log q at given draws (Roeder, Wu & Duvenaud
    2017, arXiv 1703.09194): this term is zero on average, and most of the noise.
    """
    draws = 1 if free.differentiable else _SCORED
    rows = tile_batch(images, draws)
    log_weight, _, drawn = log_weights(model, free, rows)
    surrogate = log_weight
    if isinstance(free, Corrected):
        drawn.detach_()
        again = poutine.trace(poutine.replay(free, trace=drawn)).get_trace(rows)
        log_q = log_density(again, rows)
        surrogate = log_weight + log_q - log_q.detach()
    if free.differentiable:
        return log_weight, surrogate
    score = log_score(drawn, rows)
    log_weight = log_weight.view(draws, -1)
    others = (log_weight.sum(0) - log_weight) / (draws - 1)
    surrogate = surrogate + ((log_weight - others).detach() * score.view(draws, -1)).flatten()
    return log_weight.mean(0), surrogate.view(draws, -1).mean(0)


def _optimizer(free: PerImageGuide, rate: float, steps: int | None) -> tuple[Adam, LambdaLR]:
    """Return Adam with a constant rate or, given `steps`, with low betas and a schedule."""
    if steps is None:
        optimizer = Adam(free.parameters(), rate)
        return optimizer, LambdaLR(optimizer, lambda step: 1.0)
    continuous = free.locs, free.log_scales, free.factors
    noisy = isinstance(free, Corrected) and not free.differentiable
    fraction = _NOISY_LOGITS if noisy else _LOGITS
    groups: list[dict[str, Any]] = [
        {"params": [p for kind in continuous for p in kind.parameters()]},
        {"params": list(free.logits.parameters()), "lr": fraction * rate},
    ]
    optimizer = Adam(groups, rate, _BETAS)
    fractions = [min(1, (step + 1) / _WARMUP) * (1 - step / steps) for step in range(steps)]
    return optimizer, LambdaLR(optimizer, lambda step: [*fractions, 0.0][step])


@torch.no_grad()
def _evaluate_objective(
    model: Model, images: Tensor, seeds: list[int], free: PerImageGuide
) -> Tensor:
    """Compute the objective log p(image, z) - log q(z) of each image, (B,), in nats.

    It is a mean over draws, one for each seed.
    """
    total = images.new_zeros(len(images))
    for seed in seeds:
        with use_seed(seed):
            total += log_weights(model, free, images)[0]
    return total / len(seeds)


class _Best:
    """The best parameters found so far for each image."""

    def __init__(self, free: PerImageGuide, start: Tensor) -> None:
        self.free = free
        self.start = start
        self.values = start
        self.parameters = [p.detach().clone() for p in free.parameters()]

    def keep(self, values: Tensor) -> None:
        """Record the parameters of every image whose objective is the highest so far."""
        # False for NaN, so such an answer is not kept, unless the one before is NaN too
        better = values > self.values.nan_to_num(-math.inf, math.inf, -math.inf)
        self.values = torch.where(better, values, self.values)
        for best, now in zip(self.parameters, self.free.parameters(), strict=True):
            best[better] = now.detach()[better]

    @torch.no_grad()
    def restore(self) -> None:
        """Copy the best parameters back into the guide."""
        for best, now in zip(self.parameters, self.free.parameters(), strict=True):
            now.copy_(best)


def _best_start(
    model: Model,
    images: Tensor,
    guide: Guide | None,
    starts: int,
    distribution: str,
    judge: Callable[[PerImageGuide], Tensor],
) -> PerImageGuide:
    """Return a free-form guide initialized at the best of several rotations of each image."""
    if guide is not None and distribution == "corrected":
        return Corrected(guide, images)
    free = FreeForm(model, images, guide, distribution)
    if guide is None or starts == 1:
        return free
    best = _Best(free, judge(free))
    with torch.no_grad():
        for attempt in range(1, starts):
            degrees = 360 * attempt / starts
            motion = transforms.motion(degrees).to(images)
            rotated = transforms.warp_images(images, motion).clamp(0, 1)
            other = FreeForm(model, rotated, guide, distribution)
            back = poses.rotation(images.new_tensor(math.radians(degrees)))
            for name, parameter in free.named_parameters():
                value = other.get_parameter(name)
                posed = name.startswith("locs.")  # part-whole capsules have no other locations
                parameter.copy_(poses.compose(back, value) if posed else value)
            best.keep(judge(free))
    best.restore()
    return free
