"""RANSAC for scenes of points: two points fix a similarity, and the best fits divide the points.

Every ordered pair of points is laid on pairs of corners of every template. The similarity that this
fixes puts the other corners somewhere, and each of them takes the nearest free point. Every set of
points that is found so is scored by its evidence, with the pose integrated out. Objects then choose
among their best sets, one after the other, and the best joint choices survive.

References:
    Fischler & Bolles 1981; Nazabal, Tsagkas & Williams 2023 (arXiv 2209.03115).
"""

import itertools
import math

import torch
from torch import Tensor

from capsule_zoo.guides.constellations.exact import Matchings
from capsule_zoo.models.constellations.exact_cover import sums_of
from capsule_zoo.models.constellations.scene_distribution import SceneDistribution, group_by_number
from capsule_zoo.models.constellations.similarities import Template, fit_of, log_evidence

SETS = 40  # sets of points among which an object chooses
CHOICES = 60  # joint choices that survive each object
MULTIPLES = (1, 5, 25)  # factors of SETS and CHOICES; larger ones for scenes that no choice covers
MOST_POINTS = 62  # points of a scene, because a set of points is stored as the bits of an int64


@torch.no_grad()
def explain_by_ransac(
    distribution: SceneDistribution, points: Tensor, sets: int = SETS, choices: int = CHOICES
) -> Matchings:
    """Return the best matching that RANSAC finds for every scene, and a bound on log evidence.

    Args:
        points: (S, N, 2), NaN where a point is absent.
        sets: number of sets of points that an object chooses among.
        choices: number of joint choices that survive each object.

    Returns:
        Matchings; where no choice covers the points, all of them are clutter, with evidence zero.

    Raises:
        ValueError: a scene of more than 62 points.
    """
    best_matchings = Matchings.empty(points)
    for rows, slots, places in group_by_number(points):
        if places.shape[1] > MOST_POINTS:
            raise ValueError(
                f"a scene has {places.shape[1]} points, more than {MOST_POINTS}; split it"
            )
        for more in MULTIPLES:  # try more sets where no joint choice covers the points
            _explain(
                distribution, best_matchings, rows, slots, places, (more * sets, more * choices)
            )
            again = best_matchings.log_evidence[rows].isinf()
            rows, slots, places = rows[again], slots[again], places[again]
            if not len(rows):
                break
    return best_matchings


def _explain(
    distribution: SceneDistribution,
    best_matchings: Matchings,
    rows: Tensor,
    slots: Tensor,
    places: Tensor,
    limits: tuple[int, int],
) -> None:
    """Write the best matching of scenes of equally many points into `best_matchings`."""
    fits: list[tuple[Tensor, Tensor, Tensor]] = []
    for k, first in enumerate(distribution.kinds):
        fits.append(fits[first] if first < k else _fits(distribution, k, places, limits[0]))
    weight, choice = _choose(distribution, fits, places, limits[1])
    best_matchings.log_evidence[rows] = weight
    choice = choice.masked_fill(weight.isinf()[:, None], torch.iinfo(choice.dtype).max)
    for k, (members, _, _) in enumerate(fits):
        present_rows = (choice[:, k] < members.shape[1]).nonzero()[:, 0]
        held = slots[present_rows[:, None], members[present_rows, choice[present_rows, k]]]
        best_matchings.objects[rows[present_rows, None], held] = k
        numbers = torch.arange(members.shape[2], device=places.device)
        best_matchings.corners[rows[present_rows, None], held] = numbers


def _fits(
    distribution: SceneDistribution, index: int, places: Tensor, sets: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sets of points that best fit an object, their evidence and their bit masks.

    Returns:
        The point at each corner, (b, sets, n); log evidence, (b, sets); bits, (b, sets).
    """
    template = distribution.templates[index]
    if places.shape[1] < len(template):
        empty = places.new_zeros(len(places), 0, dtype=torch.int64)
        return empty[..., None].expand(-1, -1, len(template)), empty.to(places.real.dtype), empty
    members = hypotheses(places, template)
    at_corners = places[torch.arange(len(places))[:, None, None], members]
    fit = fit_of(at_corners, template.corners.to(places))
    evidence = log_evidence(fit, distribution.noise_of(index), distribution.tau) + math.log(
        template.symmetry_order
    )
    bits = (1 << members).sum(-1)
    order = evidence.argsort(dim=1, descending=True, stable=True)
    order = order.gather(1, bits.gather(1, order).argsort(dim=1, stable=True))
    sorted_bits = bits.gather(1, order)
    again = torch.zeros_like(sorted_bits, dtype=torch.bool)
    again[:, 1:] = sorted_bits[:, 1:] == sorted_bits[:, :-1]  # keep the best order of each set
    score = evidence.gather(1, order).masked_fill(again, -torch.inf)
    best = score.topk(min(sets, score.shape[1]), dim=1)
    order = order.gather(1, best.indices)
    members = members.gather(1, order[..., None].expand(-1, -1, len(template)))
    return members, best.values, bits.gather(1, order)


def hypotheses(places: Tensor, template: Template) -> Tensor:
    """Return the point nearest to each corner, with two points laid on two corners in every way.

    Args:
        places: complex, (b, points).

    Returns:
        (b, pairs of points times pairs of corners, corners).
    """
    corners, number = template.corners.to(places), places.shape[1]
    pairs = torch.tensor(list(itertools.permutations(range(number), 2)), device=places.device)
    candidates = []
    for a, b in corner_pairs(template):
        start, end = places[:, pairs[:, 0]], places[:, pairs[:, 1]]
        rotation = (end - start) / (corners[b] - corners[a])
        moved = start - rotation * corners[a]
        held = torch.full((len(places), len(pairs), len(template)), -1, device=places.device)
        held[..., a], held[..., b] = pairs[:, 0], pairs[:, 1]
        free = torch.ones(len(pairs), number, dtype=torch.bool, device=places.device)
        free.scatter_(1, pairs, False)
        free = free.repeat(len(places), 1, 1)
        for c in range(len(template)):
            if c in (a, b):
                continue
            away = (places[:, None] - (moved + rotation * corners[c])[..., None]).abs()
            nearest = away.masked_fill(~free, torch.inf).argmin(-1)
            held[..., c] = nearest
            free.scatter_(2, nearest[..., None], False)
        candidates.append(held)
    return torch.cat(candidates, 1)


def corner_pairs(template: Template) -> list[tuple[int, int]]:
    """List the ordered pairs of corners, one pair for each class that rotations make equal."""
    pairs: list[tuple[int, int]] = []
    rotations = template.rotations.tolist()
    for pair in itertools.permutations(range(len(template)), 2):
        if not any((rotation[pair[0]], rotation[pair[1]]) in pairs for rotation in rotations):
            pairs.append(pair)
    return pairs


def _choose(
    distribution: SceneDistribution,
    fits: list[tuple[Tensor, Tensor, Tensor]],
    places: Tensor,
    choices: int,
) -> tuple[Tensor, Tensor]:
    """Return the log weight of all surviving choices, (b,), and the best choice, (b, objects)."""
    batch, number = places.shape
    on, off = distribution.log_present(places.real)
    used = torch.zeros(batch, 1, dtype=torch.int64, device=places.device)
    weight = places.real.new_zeros(batch, 1)
    choice = torch.zeros(batch, 1, 0, dtype=torch.int64, device=places.device)
    for k, (members, evidence, bits) in enumerate(fits):
        option = torch.cat([evidence + on[k], off[k].expand(batch, 1)], 1)
        taken = torch.cat([bits, bits.new_zeros(batch, 1)], 1)
        total = weight[..., None] + option[:, None]
        total = total.masked_fill(used[..., None] & taken[:, None] != 0, -torch.inf)
        total = total.masked_fill(~_completes(distribution, k, members, used, number), -torch.inf)
        best = total.flatten(1).topk(min(choices, total[0].numel()), dim=1)
        before, now = best.indices // option.shape[1], best.indices % option.shape[1]
        weight = best.values
        used = used.gather(1, before) | taken.gather(1, now)
        history = choice.gather(1, before[..., None].expand(-1, -1, k))
        choice = torch.cat([history, now[..., None]], -1)
    left = number - sum((used >> i) & 1 for i in range(number))
    table = places.real.new_full((number + 1,), -torch.inf)
    allowed = distribution.log_left(number, places.real)[: number + 1]
    table[: len(allowed)] = allowed
    weight = weight + table[left]
    best_one = weight.argmax(1)
    return weight.logsumexp(1), choice[torch.arange(batch), best_one]


def _completes(
    distribution: SceneDistribution, index: int, members: Tensor, used: Tensor, number: int
) -> Tensor:
    """Return whether later objects and clutter can take all the points that are left."""
    bits = torch.stack([(used >> i) & 1 for i in range(number)])
    left = number - bits.sum(0)  # (b, choices)
    sizes = used.new_tensor([len(distribution.templates[index])] * members.shape[1] + [0])
    left = left[..., None] - sizes
    sums = sums_of(distribution.sizes[index + 1 :])
    possible = [(left >= s) & (left - s <= distribution.clutter) for s in sums]
    return torch.stack(possible).any(0)
