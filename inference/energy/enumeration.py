"""The exact log Z of capsule RBMs, by a sum over every state of one side that is small enough."""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from capsule_zoo.data.progress import track
from capsule_zoo.models.capsule_rbm import CapsuleRBM
from capsule_zoo.models.checks import check_at_least
from capsule_zoo.models.units.exponential_family import BernoulliUnits, GaussianUnits
from capsule_zoo.models.units.switched_units import CapsuleState

MOST_STATES = 2**25
CHUNK = 2**12
NUMBERS_AT_ONCE = 2**17  # entries of quadratic forms computed at once, which stay in a cache


def exact_log_partition(model: CapsuleRBM) -> Tensor:
    """Compute log sum exp(-E) in nats, over the side with the fewest states.

    The sum runs over images, over capsules or over switches; the other variables are summed out in
    closed form. Images can be listed if they are binary. The states of a capsule (off, or on with
    each value of its units) can be listed if the units are binary. Given the switches, two Gaussian
    sides are one Gaussian.

    Raises:
        ValueError: no side has `MOST_STATES` states or fewer.
    """
    if not is_countable(model):
        raise ValueError(
            'method "exact" sums over at most 2^25 states, and this machine has more on each side '
            'that can be summed; use "ais" and "raise"'
        )
    _, total = min(_sides(model), key=lambda side: side[0])
    return total(model)


def check_normalizable(model: CapsuleRBM) -> None:
    """Raise ValueError if the machine has no partition function."""
    if model.coupling_norm() >= 1:
        raise ValueError(
            "the model has no partition function, for its Gaussian couplings are too strong; "
            "call model.keep_normalizable()"
        )


def is_countable(model: CapsuleRBM) -> bool:
    """Return True if a side of the machine has few enough states for `exact_log_partition`."""
    return any(states <= MOST_STATES for states, _ in _sides(model))


def _sides(model: CapsuleRBM) -> list[tuple[int, Callable[[CapsuleRBM], Tensor]]]:
    """Return the sides that can be summed: number of states, and function that computes log Z."""
    sides: list[tuple[int, Callable[[CapsuleRBM], Tensor]]] = []
    if isinstance(model.visible, BernoulliUnits):
        images = 2 ** math.prod(model.image_shape)
        sides.append((images, partial(_sum_over_states, _log_mass_of_images, images)))
    if isinstance(model.hidden, BernoulliUnits):
        capsules = _capsule_states(model) ** model.num_capsules
        sides.append((capsules, partial(_sum_over_states, _log_mass_of_capsules, capsules)))
    if isinstance(model.visible, GaussianUnits) and isinstance(model.hidden, GaussianUnits):
        sides.append((2**model.num_capsules if model.switched else 1, _sum_over_switches))
    return sides


def _sum_over_states(
    log_mass: Callable[[CapsuleRBM, Tensor], Tensor], states: int, model: CapsuleRBM
) -> Tensor:
    """Compute the log of the sum of masses over all states, which are numbered from 0."""
    total = model.weight.new_full((), -math.inf)
    for begin in track(range(0, states, CHUNK), "summing over states", "chunks"):
        indices = torch.arange(begin, min(begin + CHUNK, states), device=model.weight.device)
        total = torch.logaddexp(total, log_mass(model, indices).logsumexp(0))
    return total


def _digits(numbers: Tensor, base: int, count: int) -> Tensor:
    """Return the last `count` digits of each number in a base, lowest first, (numbers, count)."""
    return numbers[:, None] // base ** torch.arange(count, device=numbers.device) % base


def _log_mass_of_images(model: CapsuleRBM, states: Tensor) -> Tensor:
    """Compute the log mass -F(x) of the binary images with these numbers."""
    pixels = _digits(states, 2, math.prod(model.image_shape)).to(model.weight)
    return -model.free_energy(pixels.unflatten(1, model.image_shape))


def _capsule_states(model: CapsuleRBM) -> int:
    return 2**model.num_units + model.switched


def _log_mass_of_capsules(model: CapsuleRBM, states: Tensor) -> Tensor:
    """Compute log sum_x exp(-E) for numbered states of the capsules; the last state is off."""
    state = _digits(states, _capsule_states(model), model.num_capsules)  # (states, K)
    switch = (state < 2**model.num_units).to(model.weight)
    hidden = torch.stack([_digits(of_one, 2, model.num_units) for of_one in state.T], dim=1)
    activity = switch[..., None] * hidden
    off = model.hidden.log_partition().sum(-1)  # the units of absent capsules
    on = model.hidden.log_base(activity).sum(-1)
    if model.switched:
        on = on + model.switch_bias
    field = model.visible_field(CapsuleState(switch, activity))
    visible = model.visible.log_partition(field).flatten(1).sum(1)
    return visible + torch.where(switch > 0, on, off).sum(1)


def _sum_over_switches(model: CapsuleRBM) -> Tensor:
    """Compute log Z of two Gaussian sides, in float64, by branching on one switch at a time.

    Once images are integrated out, -E is a quadratic form y'Qy / 2 of hidden units, switches and
    the number 1. A capsule that is off is left out of the form, and one that is on is integrated
    out of it. So the form gets smaller with each decision, and the many last decisions are cheap:
    2^20 states of 20 x 16 units take half a minute, where as many determinants take days.
    """
    return _masses_of_switches(model)[0].logsumexp(0)


def _masses_of_switches(model: CapsuleRBM) -> tuple[Tensor, Tensor]:
    """Return the log masses of all states of the switches, and the states as binary numbers.

    The lowest digit of a state is the switch of the last capsule.
    """
    form, constant = _form_of_capsules(model)
    off = model.hidden.log_partition().double().sum(-1)  # the units of absent capsules
    state = torch.zeros(1, dtype=torch.long, device=form.device)
    return _decide(form[None], constant[None], state, off, model.num_units, int(model.switched))


@torch.no_grad()
def exact_samples(model: CapsuleRBM, number: int) -> CapsuleState:
    """Sample capsules exactly from a machine whose pixels and hidden units are all Gaussian.

    No chain is run: the states of the switches are drawn by their probabilities, and the hidden
    units of the capsules that are on from their Gaussian. The images then follow from
    `CapsuleRBM.draw_images` or `mean_image`.

    Returns:
        Switches (number, K) and activities (number, K, J).

    Raises:
        ValueError: units that are not Gaussian, more than `MOST_STATES` states, a number below 1,
            or a machine without a partition function.
    """
    check_at_least(1, number=number)
    gaussian = isinstance(model.visible, GaussianUnits) and isinstance(model.hidden, GaussianUnits)
    if not gaussian or 2**model.num_capsules > MOST_STATES:
        raise ValueError(
            "model must have Gaussian pixels, Gaussian hidden units and at most 25 capsules; "
            "run a chain instead: model.gibbs(model.base_images(number), steps)"
        )
    check_normalizable(model)
    log_mass, states = _masses_of_switches(model)
    cumulative = (log_mass - log_mass.logsumexp(0)).exp().cumsum(0)
    drawn = torch.searchsorted(cumulative, torch.rand(number).to(cumulative) * cumulative[-1])
    drawn = states[drawn.clamp(max=len(states) - 1)]
    switch = _digits(drawn, 2, model.num_capsules).flip(1)
    form, _ = _form_of_capsules(model)
    width, units = model.num_units + model.switched, model.num_units
    is_unit = torch.arange(len(form) - 1, device=form.device) % width < units
    is_unit = torch.cat([is_unit, is_unit.new_zeros(1)])
    activity = form.new_zeros(number, model.num_capsules * units)
    for pattern in switch.unique(dim=0):
        rows = (switch == pattern).all(1).nonzero()[:, 0]
        present = torch.cat([pattern.repeat_interleave(width) > 0, is_unit.new_ones(1)])
        on, fixed = present & is_unit, present & ~is_unit  # drawn; switches that are on, and 1
        factor = torch.linalg.cholesky(-form[on][:, on])
        mean = torch.cholesky_solve(form[on][:, fixed].sum(1, keepdim=True), factor)
        noise = torch.randn(int(on.sum()), len(rows)).to(form)
        values = mean + torch.linalg.solve_triangular(factor.mT, noise, upper=True)
        activity[rows[:, None], on[is_unit].nonzero()[:, 0]] = values.mT
    activity = activity.unflatten(1, (model.num_capsules, units))
    return CapsuleState(switch.to(model.weight), activity.to(model.weight))


def _form_of_capsules(model: CapsuleRBM) -> tuple[Tensor, Tensor]:
    """Return Q and a constant, with -E integrated over images equal to y'Qy / 2 + constant.

    y = [h_1, z_1, ..., h_K, z_K, 1], without the switches z if there are none.
    """
    precision = model.visible.precision.flatten().double()
    units = model.num_units
    blocks = [model.weight.double()]  # (pixels, K, J)
    linear = [model.hidden.bias.double()]  # linear terms of h and z, (K, J) and (K, 1)
    if model.switched:
        blocks.append(model.switch_weight.double()[..., None])
        linear.append(model.switch_bias.double()[:, None])
    bias = model.visible.bias.flatten().double()[:, None]
    fields = torch.cat([torch.cat(blocks, 2).flatten(1), bias], 1)  # the pixels' fields: fields @ y
    form = fields.mT @ (fields / precision[:, None])
    hidden_precision = torch.zeros_like(torch.cat(linear, 1))
    hidden_precision[:, :units] = model.hidden.precision.double()
    form.diagonal()[:-1].sub_(hidden_precision.flatten())
    form[:-1, -1] += torch.cat(linear, 1).flatten()
    form[-1, :-1] += torch.cat(linear, 1).flatten()
    return form, 0.5 * (len(precision) * math.log(2 * math.pi) - precision.log().sum())


def _decide(
    form: Tensor, mass: Tensor, state: Tensor, off: Tensor, units: int, switch: int
) -> tuple[Tensor, Tensor]:
    """Compute the log masses of all switches of the capsules that are left in quadratic forms.

    Args:
        form: (states, n, n), with the next capsule's hidden units and switch first.
        mass: log masses of the variables that were integrated out already, (states,).
        state: the switches that were decided already, as binary numbers, (states,).
        off: log masses of the capsules that are left if they are off, (capsules,).
        units: hidden units of a capsule.
        switch: 1 if capsules have switches, 0 if all of them are on.

    Returns:
        The log masses and the states, both (all states,), in the same order.
    """
    if not len(off):
        return mass + 0.5 * form[:, 0, 0], state
    if len(form) > 1 and form.numel() > NUMBERS_AT_ONCE:
        halves = zip(form.chunk(2), mass.chunk(2), state.chunk(2), strict=True)
        decided = [_decide(*half, off, units, switch) for half in halves]
        return torch.cat([half[0] for half in decided]), torch.cat([half[1] for half in decided])
    on = form
    if switch:  # z = 1: add its row and column to the row and column of the number 1
        on = form.clone()
        on[:, :, -1] += on[:, :, units]
        on[:, -1] += on[:, units]
    rest = units + switch
    factor = torch.linalg.cholesky(-on[:, :units, :units])
    white = torch.linalg.solve_triangular(factor, on[:, :units, rest:], upper=False)
    forms = [on[:, rest:, rest:] + white.mT @ white]
    log_det = factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    masses = [mass + 0.5 * units * math.log(2 * math.pi) - log_det]
    states = [2 * state + 1]
    if switch:
        forms.append(form[:, rest:, rest:])
        masses.append(mass + off[0])
        states.append(2 * state)
    left = torch.cat(forms), torch.cat(masses), torch.cat(states)
    return _decide(*left, off[1:], units, switch)
