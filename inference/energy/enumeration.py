"""The exact log Z of small capsule RBMs, by a sum over every state of one side."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from capsule_zoo.models.blocks.exponential_family import BernoulliUnits, GaussianUnits
from capsule_zoo.models.blocks.switched_units import CapsuleState
from capsule_zoo.models.capsule_rbm import CapsuleRBM

MOST_STATES = 2**25
CHUNK = 2**12


def exact_log_partition(model: CapsuleRBM) -> Tensor:
    """Compute log sum exp(-E) in nats, over the side with the fewest states.

    The sum runs over images, over capsules or over switches; the other variables are summed out in
    closed form. Images can be listed if they are binary. The states of a capsule (off, or on with
    each value of its units) can be listed if the units are binary. Given the switches, two Gaussian
    sides are one Gaussian.

    Raises:
        ValueError: no side has `MOST_STATES` states or fewer.
    """
    sides: list[tuple[int, Callable[[CapsuleRBM, Tensor], Tensor]]] = []
    if isinstance(model.visible, BernoulliUnits):
        sides.append((2 ** math.prod(model.image_shape), _of_images))
    if isinstance(model.hidden, BernoulliUnits):
        sides.append((_capsule_states(model) ** model.num_capsules, _of_capsules))
    if isinstance(model.visible, GaussianUnits) and isinstance(model.hidden, GaussianUnits):
        sides.append((2**model.num_capsules if model.switched else 1, _of_switches))
    states, log_mass = min(sides, key=lambda side: side[0], default=(MOST_STATES + 1, _of_images))
    if states > MOST_STATES:
        raise ValueError(
            'method "exact" sums over at most 2^25 states, and this machine has more on each side '
            'that can be summed; use "ais" and "raise"'
        )
    total = model.weight.new_full((), -math.inf)
    for begin in range(0, states, CHUNK):
        chosen = torch.arange(begin, min(begin + CHUNK, states), device=model.weight.device)
        total = torch.logaddexp(total, log_mass(model, chosen).logsumexp(0))
    return total


def _digits(numbers: Tensor, base: int, count: int) -> Tensor:
    """Return the last `count` digits of each number, lowest first, (numbers, count)."""
    return numbers[:, None] // base ** torch.arange(count, device=numbers.device) % base


def _of_images(model: CapsuleRBM, states: Tensor) -> Tensor:
    """Compute -F(x) of the images with these numbers."""
    pixels = _digits(states, 2, math.prod(model.image_shape)).to(model.weight)
    return -model.free_energy(pixels.unflatten(1, model.image_shape))


def _capsule_states(model: CapsuleRBM) -> int:
    return 2**model.num_units + model.switched


def _of_capsules(model: CapsuleRBM, states: Tensor) -> Tensor:
    """Compute log sum_x exp(-E) with given hidden units; the last state is a capsule off."""
    state = _digits(states, _capsule_states(model), model.num_capsules)  # (states, K)
    switch = (state < 2**model.num_units).to(model.weight)
    hidden = torch.stack([_digits(of_one, 2, model.num_units) for of_one in state.T], dim=1)
    activity = switch[..., None] * hidden
    off = model.hidden.log_partition().sum(-1)  # hidden units that do not affect the image
    on = model.hidden.log_base(activity).sum(-1)
    if model.switched:
        on = on + model.switch_bias
    field = model.visible_field(CapsuleState(switch, activity))
    visible = model.visible.log_partition(field).flatten(1).sum(1)
    return visible + torch.where(switch > 0, on, off).sum(1)


def _of_switches(model: CapsuleRBM, states: Tensor) -> Tensor:
    """Compute the log of the Gaussian integral over x and h with these switches."""
    switch = torch.ones(len(states), 1).to(model.weight)
    if model.switched:
        switch = _digits(states, 2, model.num_capsules).to(model.weight)
    coupling = (model.weight * switch[:, None, :, None]).flatten(2)  # (states, pixels, K J)
    bias = torch.cat([model.visible.bias.flatten(), model.hidden.bias.flatten()])
    bias = bias.expand(len(states), -1)
    scales = [model.visible.precision.flatten(), model.hidden.precision.flatten()]
    precision = torch.diag(torch.cat(scales)).repeat(len(states), 1, 1)
    split = len(scales[0])
    precision[:, :split, split:] = -coupling
    precision[:, split:, :split] = -coupling.mT
    if model.switched:
        bias = bias.clone()
        bias[:, :split] += switch @ model.switch_weight.T
    factor = torch.linalg.cholesky(precision)
    white = torch.linalg.solve_triangular(factor, bias[..., None], upper=False)[..., 0]
    log_det = factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    integral = 0.5 * (white.square().sum(-1) + bias.shape[1] * math.log(2 * math.pi)) - log_det
    return integral + switch @ model.switch_bias if model.switched else integral
