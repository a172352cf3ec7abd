"""Exact inference of scenes of points: sums over all presences, matchings and clutter.

The evidence of an object given its points has the pose integrated out; see `similarities`. Objects
are independent given which points each of them takes, so that all matchings are summed by a
recursion over objects; see `exact_cover`. Both are in `models.blocks`.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from capsule_zoo.models.constellations.exact_cover import (
    Plan,
    all_covers,
    backward,
    best_of,
    draw,
    forward,
)
from capsule_zoo.models.constellations.scene_law import SceneLaw, by_number
from capsule_zoo.models.constellations.similarities import subsets, tuple_evidence

CHUNK = 200_000  # numbers at a time, which stay in the cache of a core


@dataclass(frozen=True, eq=False)
class Matchings:
    """One matching for each scene.

    Attributes:
        objects: the number of each point's object, (S, N); -1 for clutter and absent points.
        corners: the number of its corner, (S, N), or -1.
        log_evidence: in nats, (S,): log p(points), or a lower bound on it.
    """

    objects: Tensor
    corners: Tensor
    log_evidence: Tensor

    @classmethod
    def empty(cls, points: Tensor) -> "Matchings":
        """Return matchings of all points to clutter, with evidence zero."""
        nothing = torch.full(points.shape[:2], -1, device=points.device)
        return cls(nothing, nothing.clone(), points.new_full(points.shape[:1], -torch.inf))


@dataclass(frozen=True, eq=False)
class Group:
    """Scenes of equally many points, with all their tables.

    Attributes:
        rows: the numbers of the scenes, (b,).
        slots: where their points lie, (b, n).
        plan: the recursion over covers.
        tuples: for each object, the log evidence of every subset and order, (b, subsets, orders).
        tables: the same, summed over orders, (b, subsets).
    """

    law: SceneLaw
    rows: Tensor
    slots: Tensor
    plan: Plan
    tuples: list[Tensor]
    tables: list[Tensor]

    @property
    def number(self) -> int:
        """The number of points of each scene."""
        return self.slots.shape[1]

    def weights(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return log weights of presence and absence, (objects,), and of clutter, (numbers,)."""
        on, off = self.law.log_present(self.tables[0])
        return on, off, self.law.log_left(self.number, self.tables[0])

    def log_evidence(self) -> Tensor:
        """Compute log p(points), (b,); -inf where no matching is possible."""
        return forward(self.plan, self.tables, *self.weights())[0]

    def best(self) -> list[Tensor]:
        """Return the likeliest share of points, summed over corners: a subset for each object."""
        values = forward(self.plan, self.tables, *self.weights(), reduce=best_of)[1]
        return backward(self.plan, values, lambda weights: weights.argmax(-1))

    def drawn(self) -> list[Tensor]:
        """Draw a share of the points from its posterior: a subset for each object."""
        values = forward(self.plan, self.tables, *self.weights())[1]
        return backward(self.plan, values, draw)

    def posterior(self) -> tuple[Tensor, Tensor]:
        """List all shares of the points with their posterior probabilities.

        Returns:
            The object of each point, (ways, n), -1 for clutter; probabilities, (b, ways).
        """
        ways = all_covers(self.plan)
        on, off, left = self.weights()
        total = self.tables[0].new_zeros(len(self.rows), len(ways))
        objects = torch.full((len(ways), self.number), -1)
        for k, table in enumerate(self.tables):
            total += torch.cat([table + on[k], off[k].expand(len(table), 1)], 1)[:, ways[:, k]]
            rows = (ways[:, k] < table.shape[1]).nonzero()[:, 0]
            members = subsets(self.number, self.law.sizes[k])
            objects[rows[:, None], members[ways[rows, k]]] = k
        total += left[(objects < 0).sum(1)]
        return objects, total.softmax(-1)

    def write(self, found: Matchings, taken: list[Tensor], sample: bool = False) -> None:
        """Write shares of the points into matchings, with the likeliest corners or drawn ones."""
        for k, template in enumerate(self.law.templates):
            members = subsets(self.number, len(template)).to(self.rows.device)
            there = (taken[k] < len(members)).nonzero()[:, 0]
            if not len(there):
                continue
            weights = self.tuples[k][there, taken[k][there]]
            order = template.orders.to(weights.device)[(draw if sample else _likeliest)(weights)]
            if sample:  # among orders that a rotation of the template makes equal
                turn = torch.randint(template.turns, (len(order), 1), device=order.device)
                order = template.rotations.to(order.device)[turn, order]
            slots = self.slots[there[:, None], members[taken[k][there]]]
            found.objects[self.rows[there, None], slots] = k
            found.corners[self.rows[there, None], slots] = order


def _likeliest(weights: Tensor) -> Tensor:
    return weights.argmax(-1)


def groups(law: SceneLaw, points: Tensor) -> Iterator[Group]:
    """Yield scenes (S, N, 2), NaN where a point is absent, with tables of all their subsets.

    Raises:
        TooManyCovers: a scene is too large for sums over all its matchings.
    """
    for rows, slots, places in by_number(points):
        recursion = law.plan(places.shape[1])
        tuples: list[Tensor] = []
        for k, first in enumerate(law.kinds):
            tuples.append(tuples[first] if first < k else _tuples(law, k, places))
        tables = [
            each.logsumexp(-1) + math.log(template.turns)
            for each, template in zip(tuples, law.templates, strict=True)
        ]
        yield Group(law, rows, slots, recursion, tuples, tables)


def _tuples(law: SceneLaw, index: int, places: Tensor) -> Tensor:
    """Compute the evidence of all subsets for one object, in chunks of scenes."""
    template, number = law.templates[index], places.shape[1]
    each = math.comb(number, len(template)) * len(template.orders)
    chunks = places.split(max(1, CHUNK // max(1, 17 * each)))
    return torch.cat([tuple_evidence(c, template, law.noise, law.tau) for c in chunks])


@torch.no_grad()
def explain_exactly(law: SceneLaw, points: Tensor) -> Matchings:
    """Return the likeliest share of every scene's points, and the exact log evidence.

    The share has the highest posterior probability, with the corners summed out. The corners are
    then the likeliest ones given the share.

    Args:
        points: (S, N, 2), NaN where a point is absent.
    """
    found = Matchings.empty(points)
    for group in groups(law, points):
        found.log_evidence[group.rows] = group.log_evidence().to(points)
        group.write(found, group.best())
    return found
