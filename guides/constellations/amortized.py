"""The constellation autoencoder as a guide: object capsules of a set transformer claim the points.

    m_i      = features of point i, which has seen the other points                 # (N, width)
    o_k      = capsule of object k, which has seen all points                       # (K, width)
    assign   ~ exp(sum_i o_k(i) m_i) / Z,  k(i) the object that takes point i       # -1: clutter
    corners  ~ p(corners | assign, points)                                          # exact
    object_presence = whether the assignment gives points to the object
    object_pose     ~ p(pose | points, matching)                                    # closed form

Each object takes a whole set of corners or none, so that Z is a sum over all such assignments. It
is exact, by the recursion of `models.constellations.exact_cover`: points do not choose among
objects independently, as they do in the paper. Objects with nearly the same template may be
exchanged. The network may call them as it likes, and draws exchange them at random.

The network learns from scenes that the model draws (`inference.SleepPhase`).

References:
    Kosiorek, Sabour, Teh & Hinton 2019, "Stacked capsule autoencoders" (arXiv 1906.06818),
    section 3.1; Lee et al. 2019, "Set Transformer" (arXiv 1810.00825).
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from pyro import poutine
from torch import Tensor

from capsule_zoo.data.points import rescale_points
from capsule_zoo.guides.constellations.exact import (
    Assignments,
    Matchings,
    assign_points,
    corners_of,
    orders_of,
)
from capsule_zoo.guides.constellations.matching import MatchingGuide
from capsule_zoo.models.checks import check_at_least
from capsule_zoo.models.constellations import Constellations
from capsule_zoo.models.constellations.matching_distributions import (
    FunctionMatchings,
    codes_of,
    from_codes,
)
from capsule_zoo.models.constellations.point_space import FEWEST
from capsule_zoo.models.constellations.scene_distribution import (
    SceneDistribution,
    group_by_number,
    log_equivalent,
    log_joint,
    object_fit,
)
from capsule_zoo.models.constellations.similarities import (
    MANY_STEPS,
    Template,
    as_complex,
    first_alike,
    log_evidence,
    subsets,
)
from capsule_zoo.models.networks.layers import SetTransformer

ALIKE = 0.98  # smallest correlation of two templates that count as equal
MOST_EXCHANGES = 1000


@dataclass(frozen=True, eq=False)
class Claims(Assignments):
    """The distribution of assignments of points to objects, weighted by the objects' claims.

    Attributes:
        logits: log weight of each object for each point, (b, n, objects); 0 for clutter.
    """

    logits: Tensor

    def weights(self) -> tuple[Tensor, Tensor, Tensor]:
        even = self.logits.new_zeros(len(self.tables))
        return even, even, self.logits.new_zeros(self.number + 1)

    def log_prob(self, objects: Tensor, exchanges: Tensor) -> Tensor:
        """Compute log q(assignment), (*batch, b), for assignments (*batch, b, n).

        Args:
            exchanges: equally likely permutations of objects, (exchanges, objects).
        """
        named = torch.cat([exchanges, exchanges.new_full((len(exchanges), 1), -1)], 1)
        named = named[:, objects].movedim(0, -1)  # (*batch, b, n, exchanges), -1 for clutter
        logits = self.logits.expand(*objects.shape, -1)
        picked = logits.gather(-1, named.clamp(min=0)).masked_fill(named < 0, 0.0)
        return picked.sum(-2).logsumexp(-1) - math.log(len(exchanges)) - self.log_total()


class AmortizedMatching(MatchingGuide):
    """The guide in which a set transformer assigns the points to objects.

    Args:
        model: the model.
        width, heads, blocks, inducing: see `SetTransformer`.

    Attributes:
        proposals: number of assignments that `parse` compares by their evidence under the model:
            the network's likeliest one, and draws; see `with_proposals`.

    Raises:
        ValueError: a size below 1.
    """

    proposals = 1

    fit_settings = {"lr": 1e-3, "schedule": "cosine", "warmup": 100, "clip": 10.0}

    def __init__(
        self,
        model: Constellations,
        *,
        width: int = 96,
        heads: int = 4,
        blocks: int = 2,
        inducing: int = 16,
    ) -> None:
        super().__init__(model)
        inputs, sizes = 3 * model.distribution().most, (width, heads, blocks, inducing)
        self.transformer = SetTransformer(inputs, len(model.sizes), width, *sizes)

    def with_proposals(self, proposals: int) -> "AmortizedMatching":
        """Return a guide with a shared network whose `parse` compares `proposals` assignments.

        Raises:
            ValueError: a number below 1.
        """
        check_at_least(1, proposals=proposals)
        return self.sharing_parameters(proposals=proposals)

    def claims(self, points: Tensor) -> Iterator[Claims]:
        """Yield the distributions of assignments of scenes (B, N, 2), for each number of points."""
        model, like = self.model, next(self.parameters())
        distribution = model.distribution()
        for rows, slots, _ in group_by_number(points):
            present_points = points[rows[:, None], slots].to(like)
            members = self.transformer.members(views(present_points, distribution.most))
            capsules = self.transformer.read(members)  # (b, objects, width)
            logits = members @ capsules.mT / members.shape[-1] ** 0.5
            number = present_points.shape[1]
            recursion = distribution.plan(number)
            tables = [
                logits[..., k] @ _memberships(number, size).to(logits)
                for k, size in enumerate(model.sizes)
            ]
            yield Claims(distribution, rows, slots, recursion, tables, logits)

    def log_assignment(self, points: Tensor, objects: Tensor) -> Tensor:
        """Compute log q(assignment | points), (*batch, B), with gradients; objects (*batch, B, N).

        Args:
            points: (B, N, 2), NaN where a point is absent.
            objects: the number of each point's object, -1 for clutter.
        """
        allowed = exchanges(self.model.distribution()).to(points.device)
        total = next(self.parameters()).new_zeros(objects.shape[:-1])
        for claim in self.claims(points):
            assignments = objects[..., claim.rows[:, None], claim.slots]
            log_density = claim.log_prob(assignments, allowed)
            total = total.index_copy(-1, claim.rows, log_density)
        return total

    def matchings(
        self, distribution: SceneDistribution, points: Tensor, dtype: torch.dtype
    ) -> FunctionMatchings:
        present = ~points[..., 0].isnan()

        def draw_codes(number: int) -> Tensor:
            drawn = []
            claims = list(self.claims(points))
            for _ in range(number):
                objects = _exchange_objects(
                    assign_points(points, claims, best=False), exchanges(distribution)
                )
                corners = corners_of(distribution, points, objects, best=False)
                drawn.append(codes_of(distribution, present, objects, corners))
            return torch.stack(drawn)

        def log_probability(code: Tensor) -> Tensor:
            objects, corners = from_codes(distribution, code)
            log_corners = _log_corners(distribution, points, objects, corners)
            return self.log_assignment(points, objects).to(dtype) + log_corners.to(dtype)

        return FunctionMatchings(points, draw_codes, log_probability)

    @torch.no_grad()
    def explain(self, distribution: SceneDistribution, points: Tensor) -> Matchings:
        """Return the best proposed matching of every scene, and a lower bound on log p(points)."""
        claims, result = list(self.claims(points)), Matchings.empty(points)
        for number in range(self.proposals):
            objects = assign_points(points, claims, best=number == 0)
            corners = corners_of(distribution, points, objects, best=True)
            evidence = log_joint(distribution, points, objects, corners) + log_equivalent(
                distribution, objects
            )
            better = evidence > result.log_evidence
            for target, new in zip(
                vars(result).values(), (objects, corners, evidence), strict=True
            ):
                target[better] = new[better]
        return result


@torch.no_grad()
def dreams(model: Constellations, number: int) -> tuple[Tensor, Tensor]:
    """Sample scenes of two or more points from a model, scaled to [-1, 1], and the points' objects.

    Returns:
        Points (number, N, 2), NaN where absent; objects (number, N), -1 for clutter.
    """
    points: list[Tensor] = []
    objects: list[Tensor] = []
    while sum(len(scenes) for scenes in points) < number:
        with poutine.block():
            nodes = poutine.trace(model).get_trace(batch_size=2 * number).nodes
        scene = nodes["points"]["value"]
        mask = (~scene[..., 0].isnan()).sum(1) >= FEWEST
        points.append(scene[mask])
        objects.append(from_codes(model.distribution(), nodes["point_corner"]["value"])[0][mask])
    sample = torch.cat(points)[:number]
    return rescale_points(sample), torch.cat(objects)[:number]


def exchanges(distribution: SceneDistribution) -> Tensor:
    """Return all permutations of objects that have nearly equal templates, (exchanges, objects).

    The corners of the templates may be in different orders. Only the identity is returned where
    there are more than 1,000 exchanges.
    """
    kinds = first_alike(distribution.templates, _alike)
    number = math.prod(math.factorial(kinds.count(kind)) for kind in set(kinds))
    identity = torch.arange(len(kinds))[None]
    if number > MOST_EXCHANGES:
        return identity
    orders = itertools.permutations(range(len(kinds)))
    return torch.tensor([o for o in orders if all(kinds[i] == kinds[k] for k, i in enumerate(o))])


def _alike(one: Template, other: Template) -> bool:
    """Return whether the corners of two templates correlate above `ALIKE` in their best order."""
    if len(one) != len(other):
        return False
    orders = torch.tensor(list(itertools.permutations(range(len(one)))))
    return bool(((one.corners[orders] @ other.corners.conj()).abs() / len(one)).max() > ALIKE)


def _exchange_objects(objects: Tensor, allowed: Tensor) -> Tensor:
    """Apply a random allowed permutation of objects to the assignment of every scene, (B, N)."""
    permutation = allowed[torch.randint(len(allowed), (len(objects),))].to(objects.device)
    return torch.where(objects < 0, objects, permutation.gather(1, objects.clamp(min=0)))


def _log_corners(
    distribution: SceneDistribution, points: Tensor, objects: Tensor, corners: Tensor
) -> Tensor:
    """Compute log p(corners | assignment, points), (*batch, B)."""
    total = points.new_zeros(objects.shape[:-1])
    everywhere = points.expand(*objects.shape, 2).flatten(0, -3)
    for k, template in enumerate(distribution.templates):
        fit, is_present, _ = object_fit(distribution, points, objects, corners, k)
        object_evidence = log_evidence(
            fit, distribution.noise_of(k), distribution.tau, steps=MANY_STEPS
        )
        rows, _, weights = orders_of(distribution, everywhere, objects.flatten(0, -2), k)
        every = points.new_zeros(total.numel())
        every[rows] = weights.logsumexp(-1) + math.log(template.symmetry_order)
        total = total + torch.where(is_present, object_evidence - every.view_as(total), 0.0)
    return total


def views(points: Tensor, most: int) -> Tensor:
    """Return the features of every point: the other points, nearest first, in the point's frame.

    The frame has the point as its origin and its nearest neighbor on the x axis. For every other
    point there are x, y and the log distance. The point's position and the number of points
    follow.

    Args:
        points: (b, n, 2).
        most: the largest number of points of a scene.

    Returns:
        (b, n, 3 most); zero where there are fewer points.
    """
    places = as_complex(points)
    away = places[:, None] - places[:, :, None]  # (b, n, n), from the row's point to the column's
    order = away.abs().argsort(-1)[..., 1:]  # without the point itself
    away = away.gather(-1, order)
    first = away[..., :1]
    rotated = away * first.conj() / first.abs().clamp(min=1e-6)
    near = (rotated.abs() + 1e-2).log()
    neighbors = torch.stack([rotated.real, rotated.imag, near], -1).flatten(-2)
    assignment = points.new_full((*points.shape[:-1], 1), points.shape[1] / most)
    features = torch.cat([neighbors, points, assignment], -1)
    return torch.nn.functional.pad(features, (0, 3 * (most - points.shape[1])))


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # the cached tensor is used in training too
def _memberships(number: int, size: int) -> Tensor:
    """Return the 0/1 matrix of which subset contains which point, (number, subsets)."""
    members = subsets(number, size)
    matrix = torch.zeros(number, len(members))
    return matrix.scatter_(0, members.T, 1.0) if len(members) else matrix
