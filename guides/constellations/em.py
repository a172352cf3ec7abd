"""Variational EM for scenes of points: free assignments, or permutations by Sinkhorn's algorithm.

Poses have normal posteriors, and responsibilities r_ij say that point i is corner j:

    free:         log r_ij = E log Normal(z_i; corner j moved, s^2) + const,   sum_j r_ij = 1
    permutation:  the same with sum_i r_ij = 1 as well, by Sinkhorn's steps
    pose:         y_k ~ Normal(ridge regression of the points on the corners, weighted by r)

A free assignment may put two points at one corner. With permutations the noise is annealed: it is
larger at first, and falls to its own value. At the end the responsibilities are rounded to the best
permutation, to which poses are fitted, twice. For each set of objects whose corners are as many as
the points, EM runs from several poses drawn from their prior, and the best result is kept.

References:
    Nazabal, Tsagkas & Williams 2021 (arXiv 2103.06676); Sinkhorn & Knopp 1967.
"""

import itertools
import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from capsule_zoo.guides.constellations.exact import Matchings
from capsule_zoo.models.constellations.scene_distribution import (
    LOG_AREA,
    SceneDistribution,
    group_by_number,
    log_equivalent,
    log_joint,
)
from capsule_zoo.models.constellations.similarities import Noise

SINKHORN = 8  # normalizations of rows and of columns in each step
HEAT = 0.5  # standard deviation added to the noise in the first step, for permutations
ROUNDS = 2  # roundings of permutations at the end, each with a fit of the poses


class Poses(NamedTuple):
    """Normal posteriors of the similarities (poses) of each run's objects.

    Attributes:
        place, rotation: means of t and u, complex, (R, objects).
        var_place, var_rotation, cov: variances of each coordinate of t and of u, real, and the
            complex covariance of t and u.
    """

    place: Tensor
    rotation: Tensor
    var_place: Tensor
    var_rotation: Tensor
    cov: Tensor


class Corners(NamedTuple):
    """The corners of the objects of one hypothesis, and its clutter.

    Attributes:
        objects: the numbers of the objects.
        owner: position in `objects` of each corner's object, (J,).
        number: number of each corner in its object, (J,).
        place: complex, (J,).
        noises: the noise of each object.
        clutter: number of points that are clutter.
    """

    objects: tuple[int, ...]
    owner: Tensor
    number: Tensor
    place: Tensor
    noises: list[Noise]
    clutter: int

    @classmethod
    def of(
        cls, distribution: SceneDistribution, objects: tuple[int, ...], clutter: int, like: Tensor
    ) -> "Corners":
        """Return the corners of these objects, in the dtype of `like`."""
        templates = [distribution.templates[k] for k in objects]
        owner = [i for i, template in enumerate(templates) for _ in range(len(template))]
        number = [c for template in templates for c in range(len(template))]
        return cls(
            objects,
            torch.tensor(owner, device=like.device),
            torch.tensor(number, device=like.device),
            torch.cat([template.corners for template in templates]).to(like),
            [distribution.noise_of(k) for k in objects],
            clutter,
        )


def patterns(distribution: SceneDistribution, number: int) -> list[tuple[tuple[int, ...], int]]:
    """List the sets of objects for `number` points, up to equal templates, with their clutter."""
    count, choices, signatures = len(distribution.templates), [], set()
    for size in range(1, count + 1):
        for objects in itertools.combinations(range(count), size):
            clutter = number - sum(distribution.sizes[k] for k in objects)
            kinds = tuple(sorted(distribution.kinds[k] for k in objects))
            if 0 <= clutter <= distribution.clutter and kinds not in signatures:
                signatures.add(kinds)
                choices.append((objects, clutter))
    return choices


@torch.no_grad()
def explain_by_em(
    distribution: SceneDistribution,
    points: Tensor,
    *,
    permutations: bool,
    starts: int,
    steps: int,
    seed: int,
    rounded: bool = False,
) -> Matchings:
    """Return the best matching that EM finds for every scene, and a lower bound on log evidence.

    The bound is minus infinity where a free assignment puts two points at one corner, or leaves a
    corner without a point: such a scene cannot come from the model.

    Args:
        points: (S, N, 2), NaN where a point is absent.
        permutations: True to normalize over points as well, by Sinkhorn's algorithm.
        starts: number of runs for each set of objects.
        steps: number of steps of EM.
        seed: seed of the poses that EM starts from.
        rounded: round free assignments to the nearest permutation at the end.
    """
    best_matchings = Matchings.empty(points)
    generator = torch.Generator().manual_seed(seed)
    for rows, slots, places in group_by_number(points):
        best = places.real.new_full((len(rows),), -torch.inf)
        for objects, clutter in patterns(distribution, places.shape[1]):
            corners = Corners.of(distribution, objects, clutter, places)
            runs, whole = (permutations, starts, steps), permutations or rounded
            score, weights = _best_run(distribution, corners, places, runs, generator, whole)
            assignment = round_off(weights) if whole else weights.argmax(-1)
            better = score > best
            best = torch.where(better, score, best)
            _write(best_matchings, corners, assignment, rows[better], slots[better], better)
    best_matchings.log_evidence.copy_(
        log_joint(distribution, points, best_matchings.objects, best_matchings.corners)
        + log_equivalent(distribution, best_matchings.objects)
    )
    return best_matchings


def _write(
    matchings: Matchings,
    corners: Corners,
    assignment: Tensor,
    rows: Tensor,
    slots: Tensor,
    which: Tensor,
) -> None:
    none = torch.full((corners.clutter + 1,), -1, device=rows.device)
    objects = torch.tensor(corners.objects, device=rows.device)[corners.owner]
    matchings.objects[rows[:, None], slots] = torch.cat([objects, none])[assignment[which]]
    matchings.corners[rows[:, None], slots] = torch.cat([corners.number, none])[assignment[which]]


def _best_run(
    distribution: SceneDistribution,
    corners: Corners,
    places: Tensor,
    runs: tuple[bool, int, int],
    generator: torch.Generator,
    whole: bool,
) -> tuple[Tensor, Tensor]:
    """Return the score of the best EM run of each scene, (b,), and the run's log weights.

    The log weights (b, points, corners and clutter) say how well each corner explains a point.
    """
    batch, number = places.shape
    permutations, starts, steps = runs
    copies = places.repeat_interleave(starts, 0)
    start = torch.randn(2, len(copies), len(corners.objects), 2, generator=generator)
    start = torch.view_as_complex(distribution.tau * start).to(places)
    zero = start[0].real.new_zeros(start[0].shape)
    poses = Poses(start[0], start[1], zero, zero, start[0] * 0)
    for step in range(steps):  # the heat falls to 0 in 3/4 of them
        heat = HEAT * max(0.0, 1 - 4 * step / (3 * steps)) ** 2
        extra = heat**2 if permutations else 0.0
        log_density = expected_log_density(copies, corners, poses, extra)
        responsibility = _normalize_weights(log_density, corners, permutations).exp()
        poses = fit_poses(copies, corners, responsibility, poses, distribution.tau, extra)
    weights = _with_clutter(expected_log_density(copies, corners, poses), corners)
    score = weights.logsumexp(-1).sum(-1)
    if whole:  # round off to permutations
        for _ in range(ROUNDS):
            assignment = one_hot(round_off(weights), number)
            poses = fit_poses(copies, corners, assignment, poses, distribution.tau)
            weights = _with_clutter(expected_log_density(copies, corners, poses), corners)
        score = (weights * assignment).sum((-1, -2))
    score = (score + _log_prior(poses, distribution.tau)).reshape(batch, starts)
    best = torch.arange(batch) * starts + score.argmax(1)
    return score.amax(1), weights[best]


def expected_log_density(
    places: Tensor, corners: Corners, poses: Poses, extra: float = 0.0
) -> Tensor:
    """Compute E log p(point | corner), averaged over pose posteriors, (R, points, corners).

    `extra` is added to the variance of the noise.
    """
    at = corners.place
    place, rotation = poses.place[:, corners.owner], poses.rotation[:, corners.owner]
    spread = (
        poses.var_place[:, corners.owner]
        + poses.var_rotation[:, corners.owner] * at.abs().square()
        + 2 * (poses.cov[:, corners.owner] * at.conj()).real
    )
    variance = extra + _variances(corners, poses)[:, corners.owner]
    away = (places[..., None] - (place + rotation * at)[:, None]).abs().square()
    constant = -(2 * math.pi * variance).log() - spread / variance
    return constant[:, None] - away / (2 * variance[:, None])


def _variances(corners: Corners, poses: Poses) -> Tensor:
    """Compute the noise variance s^2 of each object at its mean pose, (R, objects)."""
    scale = poses.rotation.abs()
    return torch.stack([noise.variance(scale[:, k]) for k, noise in enumerate(corners.noises)], 1)


def fit_poses(
    places: Tensor,
    corners: Corners,
    responsibility: Tensor,
    before: Poses,
    tau: float,
    extra: float = 0.0,
) -> Poses:
    """Fit the normal posteriors of poses to responsibilities (R, points, corners)."""
    variance = extra + _variances(corners, before)
    member = one_hot(corners.owner, len(corners.objects))
    member = member.to(places)
    weight = responsibility[..., : len(corners.place)].to(places)
    total = weight.sum(1)  # (R, J)
    moment = torch.einsum("rnj,rn->rj", weight, places)
    at = corners.place
    gram = torch.stack([total, total * at, total * at.abs().square()]) @ member / variance
    right = torch.stack([moment, moment * at.conj()]) @ member / variance
    first, cross, second = gram[0].real + tau**-2, gram[1], gram[2].real + tau**-2
    determinant = first * second - cross.abs().square()
    return Poses(
        (second * right[0] - cross * right[1]) / determinant,
        (first * right[1] - cross.conj() * right[0]) / determinant,
        second / determinant,
        first / determinant,
        -cross / determinant,
    )


def _with_clutter(log_density: Tensor, corners: Corners) -> Tensor:
    """Append one column of log density for each clutter point to the columns of the corners."""
    clutter = log_density.new_full((*log_density.shape[:-1], corners.clutter), -LOG_AREA)
    return torch.cat([log_density, clutter], -1)


def _normalize_weights(log_density: Tensor, corners: Corners, permutations: bool) -> Tensor:
    """Return log responsibilities, normalized over corners and, for permutations, over points."""
    weights = _with_clutter(log_density, corners)
    if permutations:
        for _ in range(SINKHORN):
            weights = weights.log_softmax(-2).log_softmax(-1)
    return weights.log_softmax(-1)


def round_off(weights: Tensor) -> Tensor:
    """Return the best permutation, (R, points), by log weights (R, points, corners and clutter)."""
    from scipy.optimize import linear_sum_assignment  # takes a second, and few need it

    tables = weights.clamp(min=-1e6).cpu().numpy()
    columns = [linear_sum_assignment(table, maximize=True)[1] for table in tables]
    return torch.from_numpy(np.stack(columns)).to(weights.device)


def _log_prior(poses: Poses, tau: float) -> Tensor:
    """Compute -KL(q(pose) | p(pose)), summed over objects, (R,)."""
    mean = poses.place.abs().square() + poses.rotation.abs().square()
    variance = 2 * (poses.var_place + poses.var_rotation)
    determinant = (poses.var_place * poses.var_rotation - poses.cov.abs().square()).clamp(min=1e-30)
    divergence = (mean + variance) / tau**2 / 2 - 2 - determinant.log() + 4 * math.log(tau)
    return -divergence.sum(-1)
