"""Exact sums over all assignments of the points of a scene to objects.

Each object takes one point for each of its corners, or none, and no point is taken twice. What is
left over is clutter. Given which points an object takes, its evidence does not depend on the
others, so that the sum over all ways is a recursion over objects. Its states are the sets of points
that are taken so far:

    alpha_0(empty) = 1
    alpha_k(U) = absent_k alpha_{k-1}(U) + present_k sum_{A in U} evidence_k(A) alpha_{k-1}(U - A)
    Z = sum_U alpha_K(U) left(number of points - |U|)

Everything is in logs and in nats. With a maximum for the sum the recursion finds the best way, and
from its last state backwards it draws ways from their posterior.
"""

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

LARGEST = 20_000_000  # largest number of pairs of a state and a subset for one object


class TooManyCovers(ValueError):
    """The error for a scene that is too large for the sum over all covers."""


class Layer(NamedTuple):
    """The transitions into the states of one layer of the recursion.

    Attributes:
        source: the number of the state before, (states, ways).
        subset: the number of the subset that the object takes, (states, ways); the number of
            subsets where it is absent; -1 where there is no further way.
    """

    source: Tensor
    subset: Tensor


class Plan(NamedTuple):
    """The recursion for a number of points and objects of given sizes.

    Attributes:
        layers: one for each object.
        left: the number of points that each last state leaves over, (states,).
    """

    layers: tuple[Layer, ...]
    left: Tensor


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # the cached tensors are used in training too
def plan(number: int, sizes: tuple[int, ...], most_left: int) -> Plan:
    """Return the recursion over covers of `number` points; up to `most_left` may be left over.

    Raises:
        TooManyCovers: an object has more than `LARGEST` pairs of a state and a subset to try.
    """
    full = (1 << number) - 1
    later = [sums_of(sizes[k + 1 :]) for k in range(len(sizes))]
    masks = [
        [sum(1 << i for i in c) for c in itertools.combinations(range(number), size)]
        for size in sizes
    ]
    states, layers = {0: 0}, []
    for options, remaining in zip(masks, later, strict=True):
        if len(states) * len(options) > LARGEST:
            raise TooManyCovers(
                f"there are too many ways to share out {number} points among objects of "
                f"{', '.join(map(str, sizes))} corners; use the RANSAC guide, which looks at "
                "the likely ones only"
            )
        into: dict[int, list[tuple[int, int]]] = {}
        for used, source in states.items():
            for index, taken in enumerate([*options, 0]):
                union = used | taken
                if used & taken or not _completes(number - union.bit_count(), remaining, most_left):
                    continue
                into.setdefault(union, []).append((source, index))
        states = {union: index for index, union in enumerate(into)}
        ways = max(map(len, into.values()), default=0)
        filler = [(0, -1)]
        padded = [entries + filler * (ways - len(entries)) for entries in into.values()]
        table = torch.tensor(padded, dtype=torch.int64).reshape(len(into), ways, 2)
        layers.append(Layer(table[..., 0].contiguous(), table[..., 1].contiguous()))
    left = torch.tensor([(full & ~union).bit_count() for union in states], dtype=torch.int64)
    return Plan(tuple(layers), left)


def sums_of(sizes: tuple[int, ...]) -> set[int]:
    """Return the total sizes of all subsets of objects with these sizes."""
    return {sum(c) for r in range(len(sizes) + 1) for c in itertools.combinations(sizes, r)}


def _completes(left: int, sizes: set[int], most_left: int) -> bool:
    """Return True if later objects can take all but `most_left` of the remaining points."""
    return any(0 <= left - taken <= most_left for taken in sizes)


def forward(
    recursion: Plan,
    tables: Sequence[Tensor],
    log_present: Tensor,
    log_absent: Tensor,
    log_left: Tensor,
    best: bool = False,
) -> tuple[Tensor, list[Tensor]]:
    """Run the recursion forward, and return log Z and the values of each layer.

    Args:
        recursion: from `plan`.
        tables: for each object the log evidence of each of its subsets, (B, subsets).
        log_present, log_absent: log probabilities of each object, (objects,).
        log_left: log weight of each number of points left over, (numbers,).
        best: take maxima instead of sums, for the likeliest way.

    Returns:
        log Z, (B,), -inf where no way is possible; and for each layer the values before reduction.
    """
    batch = len(tables[0])
    reduce = torch.amax if best else torch.logsumexp
    alpha = tables[0].new_zeros(batch, 1)
    values = []
    for k, (layer, table) in enumerate(zip(recursion.layers, tables, strict=True)):
        absent = log_absent[k].expand(batch, 1)
        never = torch.full_like(absent, -torch.inf)
        weights = torch.cat([table + log_present[k], absent, never], 1)
        values.append(alpha[:, layer.source] + weights[:, layer.subset])
        alpha = reduce(values[-1], -1) if layer.source.numel() else alpha.new_zeros(batch, 0)
    values.append((alpha + log_left[recursion.left])[:, None])
    total = (
        reduce(values[-1], -1)[:, 0] if len(recursion.left) else alpha.new_full((batch,), -math.inf)
    )
    return total, values


def backward(recursion: Plan, values: Sequence[Tensor], best: bool) -> list[Tensor]:
    """Choose one assignment of each scene, backward from the last state to the first.

    Args:
        values: from `forward`, with the same `best`.
        best: choose the likeliest way; otherwise it is drawn.

    Returns:
        The number of the subset that each object takes, (B,), or the number of its subsets.
    """
    rows = torch.arange(len(values[0]))
    state = choose_index(values[-1][:, 0], best)
    taken = []
    for layer, value in zip(reversed(recursion.layers), reversed(values[:-1]), strict=True):
        way = choose_index(value[rows, state], best)
        taken.append(layer.subset[state, way])
        state = layer.source[state, way]
    return taken[::-1]


def choose_index(log_weights: Tensor, best: bool) -> Tensor:
    """Return the likeliest index, or a sampled one, of each row (B, n) of log weights, (B,)."""
    if best:
        return log_weights.argmax(-1)
    gumbel = -torch.empty_like(log_weights).exponential_().log()
    return (log_weights + gumbel).argmax(-1)


def all_covers(recursion: Plan) -> Tensor:
    """List every assignment, (ways, objects): the index of the subset that each object takes.

    The number of an object's subsets stands for its absence.
    """
    paths: list[list[tuple[int, ...]]] = [[()]]
    for layer in recursion.layers:
        rows = zip(layer.source.tolist(), layer.subset.tolist(), strict=True)
        paths = [
            [
                (*path, taken)
                for source, taken in zip(*row, strict=True)
                if taken >= 0
                for path in paths[source]
            ]
            for row in rows
        ]
    return torch.tensor([path for group in paths for path in group], dtype=torch.int64)
