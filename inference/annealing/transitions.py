"""Transitions of annealed chains, each of which leaves one distribution of the path invariant.

    Hamiltonian   `leapfrogs` steps of length epsilon, along momenta scaled by each coordinate's
                  standard deviation, or by a factor S of a covariance S S', so that the mass
                  matrix is (S S')^-1; the end is accepted with probability min(1,
                  ratio of densities).
    redraws       if chains start at a guide and the prior, all values are drawn again from this
                  start, and accepted with probability min(1, exp(beta (gain' - gain))). So chains
                  cross between the guide and the prior, which smaller steps cannot do.
    flips         one coordinate of a discrete site, chosen at random for each row, gets another
                  value, chosen at random, and is accepted with probability min(1, ratio). What
                  follows the coordinate, such as the pose of a part its presence, is drawn again
                  from the prior with it or alone; the ratio of Hastings is then
                  f(z') p(A | t) / (f(z) p(A' | t')).
    bits          if there is no continuous site, many bits are proposed to change at once,
                  `leapfrogs` times. Bit i changes with probability sigmoid(d_i / 2 + log epsilon),
                  where d_i is the change of log f by its gradient, and the proposal is accepted as
                  Hastings has it: discrete Langevin steps, with epsilon = exp(-1 / 2 alpha).

All are reversible. A transition redraws, flips and then takes steps, Hamiltonian steps or steps of
bits; its reversal does so in the opposite order. Step lengths are arguments: a chain that adapted
its own would no longer leave the distribution unchanged, and its estimate would be biased. `pilot`
finds them with other chains.

References:
    Neal 2001, "Annealed Importance Sampling"; Neal 2011, "MCMC using Hamiltonian dynamics".
    Zhang, Liu & Liu 2022, "A Langevin-like Sampler for Discrete Distributions" (arXiv 2206.09914),
    whose sampler with a Metropolis step changes the bits.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributions import Bernoulli
from torch.nn.functional import one_hot

from capsule_zoo.data.progress import track
from capsule_zoo.inference.annealing.path import AnnealedPath, Beta, Choice, State, Terms

TARGET = 0.75  # acceptance rate that the pilot aims at
_STEEPNESS = 4.0  # steepness of the sigmoid along which temperatures lie, as in Wu et al. 2017
_QUICK = 0.5  # pilot: change of log epsilon for each unit of acceptance above the target
_SLOW = 0.05  # _QUICK in a long run, once the first temperature is left
_CHANGE = 10.0  # change of log epsilon that a run of any length must allow
_WARM_UP = 20  # transitions of the pilot at the first temperature, or fewer in shorter runs
_JITTER = 0.2  # epsilon varies by this fraction, so that no orbit closes


@dataclass(frozen=True)
class Moves:
    """The settings of one transition.

    Attributes:
        leapfrogs: leapfrog steps of a trajectory, or steps of bits.
        flips: proposals to change a discrete coordinate.
        scale: standard deviation of every coordinate of the position, (rows, D), or the factor S of
            a covariance of all, (B, D, D), where rows are B images several times over.
    """

    leapfrogs: int
    flips: int
    scale: Tensor

    def scale_vectors(self, vector: Tensor, back: bool = False) -> Tensor:
        """Multiply vectors (rows, D) by the scale S, or by its transpose if `back`."""
        if self.scale.dim() == 2:
            return self.scale * vector
        factor = self.scale.mT if back else self.scale
        rows = vector.view(-1, len(factor), vector.shape[1])
        return (factor @ rows.movedim(0, -1)).movedim(-1, 0).reshape(vector.shape)


def anneal(
    path: AnnealedPath,
    state: State,
    betas: Sequence[float] | Tensor,
    epsilons: Tensor,
    moves: Moves,
    reverse: bool = False,
    progress: bool = False,
) -> tuple[Tensor, Tensor]:
    """Anneal every row along the path, or back from its end to its start.

    Args:
        state: draws of the first distribution that is passed: of the start, or of the posterior if
            `reverse`.
        betas: rising from 0 to 1, T + 1 of them, or (T + 1, rows).
        epsilons: step lengths, (T + 1, rows).
        progress: show a progress bar.

    Returns:
        The log weights, (rows,) in float64, and the mean acceptance of steps, (rows,). The mean of
        the weights is p(image). If `reverse`, the mean of their inverses is 1 / p(image).
    """
    order = range(1, len(betas) - 1)
    log_weight = torch.zeros(len(path.images), dtype=torch.float64, device=path.images.device)
    accepted = torch.zeros_like(log_weight)
    terms = path.terms(state)
    task = "annealing back" if reverse else "annealing"
    along = order[::-1] if reverse else order
    for t in track(along, task, "temperatures", enabled=progress or None):
        step = betas[t + 1] - betas[t] if reverse else betas[t] - betas[t - 1]
        log_weight += step * terms.gain.double()
        beta = betas[t].to(terms.gain) if isinstance(betas, Tensor) else betas[t]
        state, terms, rate = transition(path, state, terms, beta, epsilons[t], moves, reverse)
        accepted += rate / max(len(order), 1)
    last = betas[1] - betas[0] if reverse else betas[-1] - betas[-2]
    return log_weight + last * terms.gain.double(), accepted


def transition(
    path: AnnealedPath,
    state: State,
    terms: Terms,
    beta: Beta,
    epsilon: Tensor,
    moves: Moves,
    reverse: bool = False,
) -> tuple[State, Terms, Tensor]:
    """Move every row by a transition that leaves f_beta invariant; see the top of this file.

    Returns:
        The new state, its terms, and the probability with which its steps were accepted, (rows,).
    """
    rate = torch.ones_like(terms.gain)
    for kind in ("steps", "flips", "redraws") if reverse else ("redraws", "flips", "steps"):
        if kind == "redraws" and path.prior_fraction:
            state, terms = redraw(path, state, terms, beta)
        elif kind == "flips" and path.flipped:
            state, terms = flip(path, state, terms, beta, moves.flips)
        elif kind == "steps" and (path.columns or path.bits):
            step = trajectory if path.columns else flip_bits
            state, terms, rate = step(path, state, terms, beta, epsilon, moves)
    return state, terms, rate


def redraw(path: AnnealedPath, state: State, terms: Terms, beta: Beta) -> tuple[State, Terms]:
    """Propose an independent draw from the start of the path for every row.

    Where sites may be permuted, the draw has the order of the guide; see `path`.
    """
    proposed = path.draw()
    end = path.terms(proposed, slopes=terms.slope_of_gain is not None)
    rate = (beta * (end.gain - terms.gain)).exp().clamp(max=1).nan_to_num(0.0)
    accepted = torch.rand_like(rate) < rate
    return proposed.where(accepted, state), end.where(accepted, terms)


def trajectory(
    path: AnnealedPath, state: State, terms: Terms, beta: Beta, epsilon: Tensor, moves: Moves
) -> tuple[State, Terms, Tensor]:
    """Propose the end of a Hamiltonian trajectory for every row; see `transition`."""
    if terms.slope_of_gain is None:
        terms = path.terms(state, slopes=True)
    jitter = 1 + _JITTER * (2 * torch.rand_like(epsilon) - 1)
    length = (epsilon * jitter)[:, None]
    momentum = torch.randn_like(state.position)
    energy = terms.at(beta) - momentum.square().sum(1) / 2
    position, end = state.position, terms
    for _ in range(moves.leapfrogs):
        momentum = momentum + length * moves.scale_vectors(end.slope(beta), back=True) / 2
        position = position + length * moves.scale_vectors(momentum)
        end = path.terms(state._replace(position=position), slopes=True)
        momentum = momentum + length * moves.scale_vectors(end.slope(beta), back=True) / 2
    gained = end.at(beta) - momentum.square().sum(1) / 2 - energy
    rate = gained.exp().clamp(max=1).nan_to_num(0.0)  # a trajectory that overflowed is rejected
    accepted = torch.rand_like(rate) < rate
    moved = state._replace(position=position)
    return moved.where(accepted, state), end.where(accepted, terms), rate


def flip_bits(
    path: AnnealedPath, state: State, terms: Terms, beta: Beta, epsilon: Tensor, moves: Moves
) -> tuple[State, Terms, Tensor]:
    """Propose flips of many bits of every row at once, `leapfrogs` times; see `transition`."""
    if terms.slope_of_gain is None:
        terms = path.terms(state, slopes=True)
    shift, rate = epsilon.clamp(max=1).log()[:, None], torch.zeros_like(terms.gain)
    for _ in range(moves.leapfrogs):
        bits = path.moving_values(state)
        distribution = _flip_distribution(bits, terms.slope(beta), shift)
        flips = distribution.sample()
        new = (bits - flips).abs()
        proposed = path.with_moving_values(state, new)
        end = path.terms(proposed, slopes=True)
        back = _flip_distribution(new, end.slope(beta), shift)
        ratio = end.at(beta) - terms.at(beta)
        ratio = ratio + (back.log_prob(flips) - distribution.log_prob(flips)).sum(1)
        acceptance = ratio.exp().clamp(max=1).nan_to_num(0.0)
        accepted = torch.rand_like(acceptance) < acceptance
        state, terms = proposed.where(accepted, state), end.where(accepted, terms)
        rate += acceptance / moves.leapfrogs
    return state, terms, rate


def _flip_distribution(bits: Tensor, slope: Tensor, shift: Tensor) -> Bernoulli:
    """Return the distribution of which bits (rows, D) flip, given the gradient of log f."""
    return Bernoulli(logits=((0.5 - bits) * slope).nan_to_num(0.0) + shift)


def flip(
    path: AnnealedPath, state: State, terms: Terms, beta: Beta, flips: int
) -> tuple[State, Terms]:
    """Propose `flips` changes of one discrete coordinate, in sequence, for every row.

    Where another site follows it (`path.beside`), a third of the proposals change the coordinate
    alone, a third draw what follows again with it, and a third draw that alone.
    """
    sizes = torch.tensor([float(path.choices[name].size) for name in path.flipped])
    for site in torch.multinomial(sizes, flips, replacement=True).tolist():
        name = path.flipped[site]
        other, at = change_coordinate(state.choices[name], path.choices[name])
        proposed = state._replace(choices={**state.choices, name: other})
        density = terms.at(beta)
        if path.beside[name] and (kind := torch.randint(3, ())):
            moved = path.beside[name][torch.randint(len(path.beside[name]), ())]
            held = proposed if kind == 1 else state
            proposed, back = path.redraw_element(state, held, moved, at)
            density = density - back
        proposed_terms = path.terms(proposed)
        ratio = (proposed_terms.at(beta) - density).nan_to_num(-math.inf)
        accepted = torch.rand_like(ratio).log() < ratio
        state, terms = proposed.where(accepted, state), proposed_terms.where(accepted, terms)
    return state, terms


def change_coordinate(value: Tensor, choice: Choice) -> tuple[Tensor, Tensor]:
    """Change one random coordinate of a site in each row; return the values and the coordinate."""
    rows = torch.arange(len(value), device=value.device)
    at = torch.randint(choice.size, (len(value),), device=value.device)
    by = torch.randint(1, choice.values, (len(value),), device=value.device)
    flat = value.reshape(len(value), choice.size, *[choice.values] * choice.one_hot).clone()
    old = flat[rows, at].argmax(-1) if choice.one_hot else flat[rows, at]
    new = (old + by).remainder(choice.values)
    flat[rows, at] = one_hot(new, choice.values).to(flat) if choice.one_hot else new
    return flat.view_as(value), at


def pilot(
    path: AnnealedPath, images: int, betas: list[float], moves: Moves
) -> tuple[Tensor, Tensor]:
    """Estimate step lengths, and the spread of log weights, with chains that are discarded.

    Every image has its own length at each temperature. It follows the acceptance of the image's
    pilot chains along one annealing run.

    Args:
        path: the path of the pilot's rows, `images` for each of its chains.

    Returns:
        The lengths, and the standard deviation of the gain over the image's chains, (T + 1, images)
        each.
    """
    state = path.draw()
    terms = path.terms(state)
    log_epsilon = state.position.new_full((images,), math.log(0.5))
    log_epsilons = [log_epsilon]
    spread = [_spread(terms.gain, images)]
    along = min(_QUICK, max(_SLOW, _CHANGE / len(betas)))
    warm_up = min(_WARM_UP, len(betas))
    first = [betas[1]] * warm_up
    pilot_betas = [*first, *betas[1:]]
    for number, beta in enumerate(track(pilot_betas, "finding step lengths", "temperatures")):
        change = _QUICK if number < warm_up else along
        epsilon = log_epsilon.exp().repeat(len(path.images) // images)
        state, terms, rate = transition(path, state, terms, beta, epsilon, moves)
        of_image = rate.view(-1, images).mean(0)  # mean over an image's chains
        log_epsilon = log_epsilon + change * (of_image - TARGET)
        log_epsilons.append(log_epsilon)
        spread.append(_spread(terms.gain, images))
    return torch.stack(log_epsilons[warm_up:]).exp(), torch.stack(spread[warm_up:])


def temperatures_along_sigmoid(number: int) -> list[float]:
    """Return `number` + 1 inverse temperatures from 0 to 1, denser towards both ends."""
    at = torch.linspace(-1, 1, number + 1, dtype=torch.float64)
    bent = (_STEEPNESS * at).sigmoid()
    return ((bent - bent[0]) / (bent[-1] - bent[0])).tolist()


def space_temperatures(
    betas: list[float], epsilons: Tensor, spread: Tensor, number: int
) -> tuple[Tensor, Tensor]:
    """Return `number` + 1 temperatures: half spaced by changes of log weights, half as before.

    A step changes the log weights of an image's chains by about its length times their spread. The
    error is least where all steps change them equally.

    Args:
        betas: temperatures of a pilot, T + 1 of them.
        epsilons, spread: step lengths and spreads of the pilot, (T + 1, images).

    Returns:
        Temperatures, in float64, and lengths of steps there, (number + 1, images).
    """
    old = torch.tensor(betas, dtype=torch.float64, device=spread.device)
    change = old.diff()[:, None] * (spread[1:] + spread[:-1]).double() / 2
    fraction = change / change.sum(0).clamp(min=torch.finfo(torch.float64).tiny) + 1 / len(change)
    reached = torch.cat([torch.zeros_like(fraction[:1]), fraction.cumsum(0)]) / fraction.sum(0)
    at = torch.linspace(0, 1, number + 1, dtype=torch.float64, device=old.device)
    columns = reached.T.contiguous()
    after = torch.searchsorted(columns, at.expand(len(columns), -1).contiguous()).T
    after = after.clamp(1, len(change))
    low, high = reached.gather(0, after - 1), reached.gather(0, after)
    part = ((at[:, None] - low) / (high - low)).clamp(0, 1)
    new = torch.lerp(old[after - 1], old[after], part)
    new[0], new[-1] = 0.0, 1.0
    lengths = epsilons.log()
    along = torch.lerp(lengths.gather(0, after - 1), lengths.gather(0, after), part.to(lengths))
    return new, along.exp()


def _spread(gain: Tensor, images: int) -> Tensor:
    """Return the standard deviation of gains (rows,) over each image's chains, (images,)."""
    return gain.view(-1, images).std(0, correction=0).nan_to_num(0.0, 0.0)
