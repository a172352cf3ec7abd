"""Exact inference of scenes of points: sums over all presences, matchings and clutter.

The evidence of an object given its points has the pose integrated out; see `similarities`. Objects
are independent given which points each of them takes, so that all matchings are summed by a
recursion over objects; see `exact_cover`. Both are in `models.constellations`.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from capsule_zoo.models.constellations import exact_cover
from capsule_zoo.models.constellations.exact_cover import Plan
from capsule_zoo.models.constellations.scene_distribution import SceneDistribution, group_by_number
from capsule_zoo.models.constellations.similarities import as_complex, subsets, tuple_evidence

CHUNK = 200_000  # entries of a table computed at once; so many stay in the cache of a core


@dataclass(frozen=True, eq=False)
class Matchings:
    """One matching of points to corners for each scene.

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
        """Return matchings of all points to clutter, with log evidence -inf."""
        nothing = torch.full(points.shape[:2], -1, device=points.device)
        return cls(nothing, nothing.clone(), points.new_full(points.shape[:1], -torch.inf))


@dataclass(frozen=True, eq=False)
class Assignments:
    """The distribution of the assignment of points to objects, for scenes of equally many points.

    Attributes:
        distribution: the distribution of the scenes.
        rows: the numbers of the scenes, (b,).
        slots: where their points lie, (b, n).
        plan: the recursion over all assignments.
        tables: the log weight of every subset of the points, (b, subsets), for each object.
    """

    distribution: SceneDistribution
    rows: Tensor
    slots: Tensor
    plan: Plan
    tables: list[Tensor]

    @property
    def number(self) -> int:
        """The number of points of each scene."""
        return self.slots.shape[1]

    def weights(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return log weights of presences and absences, (objects,), and of clutter, (numbers,)."""
        on, off = self.distribution.log_present(self.tables[0])
        return on, off, self.distribution.log_left(self.number, self.tables[0])

    def log_total(self) -> Tensor:
        """Compute the log of the summed weights of all assignments, (b,); -inf where there is none.

        With evidence as the weight of a subset it is log p(points).
        """
        return exact_cover.forward(self.plan, self.tables, *self.weights())[0]

    def choose(self, best: bool) -> Tensor:
        """Return the likeliest assignment or a sampled one, (b, n); -1 for clutter."""
        values = exact_cover.forward(self.plan, self.tables, *self.weights(), best)[1]
        return self.objects_of(exact_cover.backward(self.plan, values, best))

    def objects_of(self, taken: Sequence[Tensor] | Tensor) -> Tensor:
        """Convert the subset that each object takes to the object of each point, (ways, n)."""
        objects = taken[0].new_full((len(taken[0]), self.number), -1)
        for k, subset in enumerate(taken):
            members = subsets(self.number, self.distribution.sizes[k]).to(objects.device)
            rows = (subset < len(members)).nonzero()[:, 0]
            objects[rows[:, None], members[subset[rows]]] = k
        return objects


@dataclass(frozen=True, eq=False)
class Group(Assignments):
    """The exact posterior of assignments: the weight of a subset is its evidence.

    Attributes:
        tuples: for each object, the log evidence of every subset and order, (b, subsets, orders).
    """

    tuples: list[Tensor]

    def posterior(self) -> tuple[Tensor, Tensor]:
        """List all assignments of points to objects with their posterior probabilities.

        Returns:
            The object of each point, (ways, n), -1 for clutter; probabilities, (b, ways).
        """
        ways = exact_cover.all_covers(self.plan)
        on, off, left = self.weights()
        total = self.tables[0].new_zeros(len(self.rows), len(ways))
        objects = self.objects_of(ways.T)
        for k, table in enumerate(self.tables):
            total += torch.cat([table + on[k], off[k].expand(len(table), 1)], 1)[:, ways[:, k]]
        total += left[(objects < 0).sum(1)]
        return objects, total.softmax(-1)


def assign_points(points: Tensor, assignments: Iterable[Assignments], best: bool) -> Tensor:
    """Return the object of each point, (B, N), in scenes (B, N, 2); -1 for clutter."""
    objects = torch.full(points.shape[:2], -1, device=points.device)
    for group in assignments:
        objects[group.rows[:, None], group.slots] = group.choose(best)
    return objects


def groups(distribution: SceneDistribution, points: Tensor) -> Iterator[Group]:
    """Group scenes (S, N, 2) by their number of points, and compute the evidence of all subsets.

    Raises:
        TooManyCovers: a scene is too large for sums over all its matchings.
    """
    for rows, slots, places in group_by_number(points):
        recursion = distribution.plan(places.shape[1])
        tuples: list[Tensor] = []
        for k, first in enumerate(distribution.kinds):
            tuples.append(tuples[first] if first < k else _tuples(distribution, k, places))
        yield Group(
            distribution, rows, slots, recursion, sum_over_orders(distribution, tuples), tuples
        )


def _tuples(distribution: SceneDistribution, index: int, places: Tensor) -> Tensor:
    """Compute the log evidence of every subset and order for one object, in chunks of scenes."""
    template, number = distribution.templates[index], places.shape[1]
    count = math.comb(number, len(template)) * len(template.orders)
    chunks = places.split(max(1, CHUNK // max(1, 17 * count)))
    return torch.cat(
        [tuple_evidence(c, template, distribution.noise, distribution.tau) for c in chunks]
    )


def sum_over_orders(distribution: SceneDistribution, tuples: Sequence[Tensor]) -> list[Tensor]:
    """Sum the evidence of each subset over the orders of its points, (b, subsets) by object."""
    return [
        evidence.logsumexp(-1) + math.log(template.symmetry_order)
        for evidence, template in zip(tuples, distribution.templates, strict=True)
    ]


def orders_of(
    distribution: SceneDistribution, points: Tensor, objects: Tensor, index: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log evidence of every order of one object's points, given assignments (B, N).

    Returns:
        The scenes in which the object is present, (m,); the slots of its points, (m, size); the
        evidence, (m, orders).
    """
    template, member_mask = distribution.templates[index], objects == index
    rows = member_mask.any(1).nonzero()[:, 0]
    slots = (~member_mask[rows]).to(torch.int8).argsort(dim=1, stable=True)[:, : len(template)]
    places = as_complex(points[rows[:, None], slots])
    return (
        rows,
        slots,
        tuple_evidence(places, template, distribution.noise, distribution.tau).flatten(1),
    )


def corners_of(
    distribution: SceneDistribution, points: Tensor, objects: Tensor, best: bool
) -> Tensor:
    """Return the likeliest corners given an assignment of the points, or sampled ones, (B, N)."""
    corners = torch.full_like(objects, -1)
    for k, template in enumerate(distribution.templates):
        rows, slots, weights = orders_of(distribution, points, objects, k)
        if not len(rows):
            continue
        order = template.orders.to(weights.device)[exact_cover.choose_index(weights, best)]
        if not best:  # choose among the orders that a rotation of the template makes equal
            rotation = torch.randint(template.symmetry_order, (len(order), 1), device=order.device)
            order = template.rotations.to(order.device)[rotation, order]
        corners[rows[:, None], slots] = order
    return corners


@torch.no_grad()
def explain_exactly(distribution: SceneDistribution, points: Tensor) -> Matchings:
    """Return the likeliest matching of every scene, and the exact log evidence.

    The assignment has the highest posterior probability, with the corners summed out. The corners
    are then the likeliest ones given the assignment.

    Args:
        points: (S, N, 2), NaN where a point is absent.
    """
    scene_groups = list(groups(distribution, points))
    evidence = log_evidence_of(points, scene_groups)
    objects = assign_points(points, scene_groups, best=True)
    return Matchings(objects, corners_of(distribution, points, objects, best=True), evidence)


def log_evidence_of(points: Tensor, scene_groups: Iterable[Group]) -> Tensor:
    """Return the exact log p(points) of each scene, (S,), from the groups of `groups`."""
    evidence = points.new_empty(len(points))
    for group in scene_groups:
        evidence[group.rows] = group.log_total().to(points)
    return evidence
