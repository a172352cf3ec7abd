"""Counterfactual values: the noise of a sample carried to another distribution.

A site's value is taken as a function of its distribution and of noise that does not depend on
anything else in the model. If the distribution changes, the noise is kept, and the value changes as
follows.

    Normal            z' = m' + (z - m) s' / s; any other continuous distribution with a
                      distribution function F and its inverse: z' = F'^-1(F(z))
    discrete          the Gumbel-max rule: the value is argmax_k (log p_k + g_k). Noise g is drawn
                      from its distribution given the value, and gives argmax_k (log p'_k + g_k).
                      For two values this is one uniform number u with value = 1[u < p].
    mixture           the component is drawn from its posterior given the value. It changes by the
                      rule for discrete distributions, and the value by the rule for the component's
                      distribution.
    matching          the random order of all corners is kept, and of the clutter. Corners that
                      were absent get a random position in it.

If the distribution is the same, the value is the same. If the value was drawn from its
distribution, then the new value has the new distribution. A joint density alone does not determine
what is kept. These rules do, and `carry_value.register(Distribution)` adds a rule for another
distribution.

References:
    Pearl 2009, "Causality", section 7.1. Oberst & Sontag 2019, "Counterfactual Off-Policy
    Evaluation with Gumbel-Max Structural Causal Models" (arXiv 1905.05824), for discrete
    distributions.
"""

from functools import singledispatch
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor

from capsule_zoo.guides.per_image.site_distributions import base_distribution
from capsule_zoo.models.common.plates import ImageDistribution
from capsule_zoo.models.constellations.matching_distributions import (
    MatchedPoints,
    RandomMatching,
    corner_table,
)
from capsule_zoo.models.parts.parent_selection import ParentMixture
from capsule_zoo.models.parts.pixel_mixture import PixelMixture, TintedMixture


class NoRule(TypeError):
    """The error for a distribution without a rule that keeps its noise."""


def carry(value: Tensor, before: Any, after: Any) -> Tensor:
    """Return the value of distribution `after` with the noise that `value` has under `before`.

    Noise that the value does not determine is drawn from torch's random state.

    Args:
        value: (*batch, *event).
        before, after: two distributions of one site, with the same shapes.

    Raises:
        NoRule: there is no rule for distributions of this class.
    """
    if same_distribution(before, after):
        return value
    if isinstance(
        before, ImageDistribution
    ):  # the distributions inside have a dim more than the values
        return carry(value.unsqueeze(-4), before.distribution, after.distribution).squeeze(-4)
    before, after = base_distribution(before), base_distribution(after)
    return carry_value(after, before, value).to(value.dtype)


def same_distribution(first: Any, second: Any) -> bool:
    """Return True if two distributions have equal classes and parameters."""
    ours, theirs = _numbers(first, set()), _numbers(second, set())
    return len(ours) == len(theirs) and all(
        one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num())
        for one, other in zip(ours, theirs, strict=True)
    )


def _numbers(distribution: Any, ids: set[int]) -> list[Tensor]:
    """Return all tensors of a distribution, and of distributions and transforms inside it."""
    if isinstance(distribution, Tensor | int | float):
        return [torch.as_tensor(distribution)]
    if isinstance(distribution, torch.distributions.Distribution | torch.distributions.Transform):
        if id(distribution) in ids:
            return []
        ids.add(id(distribution))
        derived = set(dir(type(distribution)))  # cached properties, which not all instances have
        distribution = [
            item for name, item in sorted(vars(distribution).items()) if name not in derived
        ]
    several = distribution if isinstance(distribution, list | tuple) else []
    return [number for item in several for number in _numbers(item, ids)]


@singledispatch
def carry_value(after: Any, before: Any, value: Tensor) -> Tensor:
    """Return the value under `after` with the noise that `value` has under `before`.

    Rules are chosen by the class of `after`. This one serves distributions with a distribution
    function and its inverse.

    Raises:
        NoRule: the distributions have no such functions.
    """
    try:
        return after.icdf(before.cdf(value))
    except (NotImplementedError, AttributeError):
        raise NoRule(
            f"there is no rule by which the noise of {type(after).__name__} is kept"
        ) from None


@carry_value.register
def _normal(after: dist.Normal, before: dist.Normal, value: Tensor) -> Tensor:
    return after.loc + (value - before.loc) * (after.scale / before.scale)


@carry_value.register
def _delta(after: dist.Delta, before: dist.Delta, value: Tensor) -> Tensor:
    return after.v


@carry_value.register
def _bernoulli(after: dist.Bernoulli, before: dist.Bernoulli, value: Tensor) -> Tensor:
    pairs = (
        torch.stack([torch.zeros_like(distribution.logits), distribution.logits], -1)
        for distribution in (before, after)
    )
    return same_gumbels(value.long(), *pairs)


@carry_value.register
def _categorical(after: dist.Categorical, before: dist.Categorical, value: Tensor) -> Tensor:
    return same_gumbels(value.long(), before.logits, after.logits)


@carry_value.register
def _one_hot(
    after: dist.OneHotCategorical, before: dist.OneHotCategorical, value: Tensor
) -> Tensor:
    index = same_gumbels(value.argmax(-1), before.logits, after.logits)
    return torch.nn.functional.one_hot(index, value.shape[-1])


def same_gumbels(index: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """Return argmax_k (after_k + g_k), with g drawn given that argmax_k (before_k + g_k) = index.

    Args:
        index: (*batch,), whole numbers.
        before, after: logits up to a constant, (*batch, values); -inf for an impossible value.
    """
    index, before, after = torch.broadcast_tensors(
        index[..., None], before.log_softmax(-1), after.log_softmax(-1)
    )
    index = index[..., :1]
    # The largest of all before_k + g_k is a standard Gumbel; the others are Gumbel below it
    largest = _gumbel(before[..., :1])
    others = -torch.logaddexp(-largest, -(before + _gumbel(before)))
    reached = others.scatter(-1, index, largest)
    noise = torch.where(before.isneginf(), _gumbel(before), reached - before)
    return (after + noise).argmax(-1)


def _gumbel(like: Tensor) -> Tensor:
    return -torch.empty_like(like).exponential_().log()


@carry_value.register
def _mixture(after: ParentMixture, before: ParentMixture, value: Tensor) -> Tensor:
    old, new = before.component_distribution, after.component_distribution
    weights = before.mixture_distribution.logits
    posterior = old.log_prob(before._pad(value)) + weights
    first = dist.Categorical(logits=posterior).sample()
    second = same_gumbels(first, weights, after.mixture_distribution.logits)
    return carry_value(_select_component(new, second), _select_component(old, first), value)


def _select_component(components: Any, index: Tensor) -> Any:
    """Return the distribution of the components with these indices, (*batch, *event)."""
    distribution, event = base_distribution(components), components.event_shape
    place = index[(..., None, *[None] * len(event))].expand(*index.shape, 1, *event)
    parameters = {}
    for name in ("loc", "scale") if isinstance(distribution, dist.Normal) else ("logits",):
        numbers = getattr(distribution, name).expand(
            *index.shape, components.batch_shape[-1], *event
        )
        parameters[name] = numbers.gather(index.dim(), place).squeeze(index.dim())
    return type(distribution)(**parameters)


@carry_value.register(PixelMixture)
@carry_value.register(TintedMixture)
def _pixels(
    after: PixelMixture | TintedMixture, before: PixelMixture | TintedMixture, value: Tensor
) -> Tensor:
    old_distribution, new_distribution = (
        distribution.as_stacks if isinstance(distribution, TintedMixture) else distribution
        for distribution in (before, after)
    )
    pixels = value.squeeze(-4).movedim(-3, 0)  # (C, *batch, H, W)
    weights = [
        distribution.mixing.squeeze(1).log().movedim(0, -1)
        for distribution in (old_distribution, new_distribution)
    ]
    fit = (
        dist.Normal(old_distribution.color, old_distribution.scale)
        .log_prob(pixels)
        .sum(1)
        .movedim(0, -1)
    )
    first = dist.Categorical(logits=fit + weights[0]).sample()  # (*batch, H, W)
    second = same_gumbels(first, *weights)
    old, new = (
        distribution.color.gather(0, index.expand(1, *distribution.color.shape[1:]))[0]
        for distribution, index in ((old_distribution, first), (new_distribution, second))
    )
    moved = new + (pixels - old) * (new_distribution.scale / old_distribution.scale)
    return moved.movedim(0, -3).unsqueeze(-4)


@carry_value.register
def _matching(after: RandomMatching, before: RandomMatching, value: Tensor) -> Tensor:
    owner = corner_table(after.distribution, value.device)[0][1:]
    slots, corners = value.shape[-1], len(owner)
    code = torch.arange(1, corners + 1, device=value.device)
    number = (value >= 0).sum(-1, keepdim=True)
    # Ranks in the order are uniform; present points hold the smallest ranks in their order
    uniform = torch.rand(*value.shape, device=value.device).masked_fill(
        torch.arange(slots, device=value.device) >= number, torch.inf
    )
    rank = (value >= 0).cumsum(-1) - 1
    place = uniform.sort(-1).values.gather(-1, rank.clamp(min=0))
    held = value[..., None] == code  # (*batch, slots, corners)
    object_positions = torch.where(held, place[..., None], 0.0).sum(-2)
    object_positions = torch.where(
        held.any(-2), object_positions, torch.rand_like(object_positions)
    )
    object_positions = object_positions.masked_fill(after.presence[..., owner] < 0.5, torch.inf)
    stray = place.masked_fill(value != 0, torch.inf)  # clutter keeps its order
    places = torch.cat([object_positions, stray], -1)
    if (places.isfinite().sum(-1) > slots).any():
        raise ValueError(
            f"the intervention needs more points than the {slots} slots of a scene; add slots of "
            "NaN to the scenes"
        )
    codes = torch.cat([code.expand(object_positions.shape), torch.zeros_like(value).long()], -1)
    codes = codes.masked_fill(places.isinf(), -1)
    ordered = codes.gather(-1, places.argsort(-1))[..., :slots]
    same = (after.presence == before.presence).all(-1, keepdim=True)
    return torch.where(same, value.long(), ordered)


@carry_value.register
def _points(after: MatchedPoints, before: MatchedPoints, value: Tensor) -> Tensor:
    corners = before.places.shape[-2]
    code = torch.arange(1, corners + 1, device=value.device)
    held = before.code[..., None] == code  # (*batch, slots, corners)
    slot = held.to(torch.int8).argmax(-2)
    slot_points = value.gather(-2, slot[..., None].expand(*slot.shape, 2))
    noise = (slot_points - before.places) / before.scale[..., None]
    noise = torch.where(held.any(-2)[..., None], noise, torch.randn_like(noise))
    moved = after.places + noise * after.scale[..., None]  # (*batch, corners, 2)
    index = (after.code.long() - 1).clamp(min=0)
    points = moved.gather(-2, index[..., None].expand(*index.shape, 2))
    points = torch.where((after.code == 0)[..., None], _clutter(after, before, value), points)
    return points.masked_fill((after.code < 0)[..., None], torch.nan)


def _clutter(after: MatchedPoints, before: MatchedPoints, value: Tensor) -> Tensor:
    """Move the clutter points of `value`, in their order, to the clutter's slots of `after`."""
    first = (before.code != 0).to(torch.int8).argsort(dim=-1, stable=True)  # slots of clutter first
    strays = value.gather(-2, first[..., None].expand(*first.shape, 2))
    rank = ((after.code == 0).cumsum(-1) - 1).clamp(min=0)
    return strays.gather(-2, rank[..., None].expand(*rank.shape, 2))
