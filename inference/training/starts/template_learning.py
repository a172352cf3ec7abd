"""Templates of constellations learned from scenes without labels, by exact EM.

The E step is exact. It sums over all fractions of the points among objects, over all orders of the
corners, and over poses, whose scale is left to a quadrature; see
`models.constellations.similarities`. With w the responsibility of a set of points z in one order,
and u the part of the pose that rotates and scales, the M step is

    p_c  = m_c - mean(m), scaled to mean square 1,   m_c = sum w E[conj(u) / s^2] (z_c - mean(z))
    v^2  : raises sum w E[-D / (2 s^2) - n log s^2],   s^2 = floor^2 + v^2 |u|^2

where D is the expected squared distance of the points from their corners. The noise v falls from
step to step, which anneals the templates. All templates have the same size, because their sizes and
the sizes of the objects could not be known separately, and the noise on the scene stays as it is.

Each start takes a set of points of some scene, of those with as few points as possible, for each
template. A few steps on a few scenes choose among the starts.

References:
    Dempster, Laird & Rubin 1977; Meng & Rubin 1993, "Maximum likelihood estimation via the ECM
    algorithm". The steps for v follow Becker, Yang & Lange 1997, "EM algorithms without
    missing data".
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from capsule_zoo.data.points import mask_points
from capsule_zoo.data.seeds import seeded_generator
from capsule_zoo.data.tensors import accept_arrays
from capsule_zoo.guides.constellations.exact import Group, groups, sum_over_orders
from capsule_zoo.models.checks import check_at_least
from capsule_zoo.models.constellations import Constellations
from capsule_zoo.models.constellations.scene_distribution import SceneDistribution
from capsule_zoo.models.constellations.similarities import (
    MANY_STEPS,
    Noise,
    Template,
    as_complex,
    center_points,
    fit_of,
    log_scale_density,
    scale_nodes,
    subsets,
)

SIZE = math.sqrt(2.0)  # the radius of every learned template, as of a square that is 2 wide
FIRST_NOISE = 0.4  # first noise on templates, in units of the template
LEAST_NOISE = 1e-3
ALIKE = 0.98  # correlation of templates that count as nearly equal
_NEGLIGIBLE = 1e-5  # responsibility below which a set of points does not count
_NOISE_STEPS = 10  # updates of the noise in each M step


class Moments(NamedTuple):
    """Sufficient statistics of one object's sets of points, for the M step.

    Attributes:
        weight: weight of each set and quadrature node, (sets, nodes); it sums to the expected
            number of times that the object is present.
        scale: |u|, (sets, nodes).
        swing: the mean cosine of the angle of u about its mode, (sets, nodes).
        aligned: the centered points in the order of the corners, rotated back by the mode of the
            angle, complex, (sets, corners).
        rest: the part of D that does not depend on the template, (sets, nodes).
    """

    weight: Tensor
    scale: Tensor
    swing: Tensor
    aligned: Tensor
    rest: Tensor

    def shape(self, noise: Noise) -> Tensor:
        """Return the best template for this noise, centered and scaled, complex (corners,)."""
        pull = (self.weight * self.scale * self.swing / noise.variance(self.scale)).sum(1)
        corners = pull.to(self.aligned) @ self.aligned
        corners = corners - corners.mean()
        return corners / corners.abs().square().mean().sqrt()

    def misfit(self, corners: Tensor) -> Tensor:
        """Compute the misfit D of a template to the points, (sets, nodes)."""
        cross = (self.aligned @ corners.conj()).real[:, None]
        return self.rest - 2 * self.scale * self.swing * cross


@accept_arrays("points", "present", like="model")
def learn_templates(
    model: Constellations,
    points: Tensor,
    present: Tensor | None = None,
    *,
    starts: int = 3,
    steps: int = 20,
    trial_scenes: int = 64,
    trial_steps: int = 8,
    largest: int | None = None,
    seed: int = 0,
) -> list[float]:
    """Learn the templates of a model, and the noise on them, from scenes without labels.

    The model determines the numbers of corners. The model's present templates are not used.

    Args:
        model: trained in place.
        points: (S, N, 2); a few hundred scenes in [-1, 1] suffice.
        present: (S, N), 1 where there is a point; None if NaN marks absent points.
        starts: number of initializations that are tried.
        steps: steps of EM on all scenes, from the best initialization.
        trial_scenes, trial_steps: scenes and steps that choose among the initializations.
        largest: the most points of a scene that is used; None for all scenes. Scenes of many
            points have many matchings, and the smaller ones may say as much of the templates.
        seed: seed of the initializations.

    Returns:
        The mean log evidence in nats before each step and after the last one.

    Raises:
        ValueError: scenes that the model does not take, a model without noise on its templates, a
            number out of range, or no scene with as many points as a template.
    """
    check_at_least(1, starts=starts, trial_scenes=trial_scenes)
    check_at_least(0, steps=steps, trial_steps=trial_steps)
    points = mask_points(points, present)
    model.space.check(points)
    if model.log_sigma is None:
        raise ValueError(
            "sigma of the model is 0, but the noise on templates is learned with them; build the "
            "model with sigma above 0"
        )
    places = _select_scenes(points.double(), model.sizes, largest)
    distribution, generator = model.distribution(), seeded_generator(seed)
    trial_points, best, height = places[:trial_scenes], distribution, -math.inf
    for _ in range(starts):
        trial = random_distribution(distribution, places, generator)
        trial, history = _run(trial, trial_points, trial_steps if starts > 1 else 0)
        if history[-1] > height:
            best, height = trial, history[-1]
    best, history = _run(best, places, steps)
    _store(model, best)
    return history


def _select_scenes(points: Tensor, sizes: Sequence[int], largest: int | None) -> Tensor:
    """Select the scenes of at most `largest` points."""
    number = (~points[..., 0].isnan()).sum(1)
    scenes = points if largest is None else points[number <= largest]
    if not len(scenes) or int((~scenes[..., 0].isnan()).sum(1).max()) < max(sizes):
        limit = "" if largest is None else f" that has at most largest={largest} points"
        raise ValueError(
            f"points holds no scene of {max(sizes)} points or more{limit}, but a template has "
            f"{max(sizes)} corners; give larger scenes, or a model of smaller templates"
        )
    return scenes


def _run(
    distribution: SceneDistribution, points: Tensor, steps: int
) -> tuple[SceneDistribution, list[float]]:
    history = []
    for _ in range(steps):
        evidence, moments = expectation(distribution, points)
        history.append(evidence)
        distribution = maximization(distribution, moments)
    history.append(mean_evidence(distribution, points))
    return distribution, history


def random_distribution(
    distribution: SceneDistribution, points: Tensor, generator: torch.Generator
) -> SceneDistribution:
    """Return a distribution with random templates: sets of points of random small scenes."""
    present = ~points[..., 0].isnan()
    number = present.sum(1)
    templates = []
    for size in distribution.sizes:
        enough = number[number >= size].min()
        rows = (number == enough).nonzero()[:, 0]
        row = rows[torch.randint(len(rows), (), generator=generator)]
        scene = points[row][present[row]]
        subset = scene[torch.randperm(len(scene), generator=generator)[:size]]
        templates.append(Template(center_points(subset)[0], SIZE))
    noise = Noise(distribution.noise.floor, FIRST_NOISE)
    return SceneDistribution(
        tuple(templates), noise, distribution.tau, distribution.presence, distribution.clutter
    )


@torch.no_grad()
def mean_evidence(distribution: SceneDistribution, points: Tensor) -> float:
    """Compute the mean of log p(points) over scenes, in nats."""
    return sum(group.log_total().sum().item() for group in groups(distribution, points)) / len(
        points
    )


def expectation(distribution: SceneDistribution, points: Tensor) -> tuple[float, list[Moments]]:
    """Compute the E step: the mean log evidence, and the moments of every object.

    Args:
        points: (S, N, 2), NaN where a point is absent.
    """
    total = 0.0
    parts: list[list[Moments]] = [[] for _ in distribution.templates]
    for group in groups(distribution, points):
        evidence, fractions = responsibilities(group)
        total += float(evidence.sum())
        places = as_complex(points[group.rows[:, None], group.slots])
        for k, fraction in enumerate(fractions):
            parts[k].append(_moments(distribution, k, places, fraction))
    return total / len(points), [
        Moments(*map(torch.cat, zip(*chunks, strict=True))) for chunks in parts
    ]


@torch.inference_mode(False)
def responsibilities(group: Group) -> tuple[Tensor, list[Tensor]]:
    """Compute the log evidence, (b,), and the posterior probability of every subset and order.

    The probability that an object takes a subset in an order is the derivative of the log evidence
    of the scene with respect to the log evidence of that subset and order.

    Returns:
        For each object, (b, subsets, orders).
    """
    tuples = [tensor.detach().clone().requires_grad_() for tensor in group.tuples]
    evidence = replace(group, tables=sum_over_orders(group.distribution, tuples)).log_total()
    fractions = torch.autograd.grad(evidence.sum(), tuples, materialize_grads=True)
    return evidence.detach(), list(fractions)


def _moments(
    distribution: SceneDistribution, index: int, places: Tensor, fraction: Tensor
) -> Moments:
    """Compute the moments of one object from points (b, n) and responsibilities."""
    template, noise = distribution.templates[index], distribution.noise_of(index)
    row, subset, order = (fraction > _NEGLIGIBLE).nonzero(as_tuple=True)
    members = subsets(places.shape[1], len(template))[subset]  # (sets, corners)
    object_points = places[row[:, None], members]
    corners = torch.zeros_like(object_points).scatter(1, template.orders[order], object_points)
    fit = fit_of(corners, template.corners.to(corners))
    nodes, log_step = scale_nodes(fit, noise, distribution.tau, steps=MANY_STEPS)
    weight = (log_scale_density(fit, nodes, noise, distribution.tau) + log_step).softmax(-1)
    weight = weight * fraction[row, subset, order][:, None]
    scale, number = nodes.exp(), len(template)
    variance = noise.variance(scale)
    swing = scale * fit.cross.abs()[:, None] / variance  # concentration of an angle, mean cosine
    swing = torch.special.i1e(swing) / torch.special.i0e(swing)
    noise_variance = variance / number
    shrinkage = distribution.tau**2 / (distribution.tau**2 + noise_variance)
    missed = (1 - shrinkage) * fit.center.abs()[:, None]
    rest = fit.spread[:, None] + number * (
        scale.square() + missed.square() + 2 * noise_variance * shrinkage
    )
    back = torch.exp(-1j * fit.cross.angle())[:, None]
    aligned = _symmetrize(back * (corners - fit.center[:, None]), template)
    return Moments(weight, scale, swing, aligned, rest)


def _symmetrize(aligned: Tensor, template: Template) -> Tensor:
    """Average points (sets, corners) over the rotations of a template, all equally likely."""
    total = torch.zeros_like(aligned)
    for order in template.rotations:
        rotation = (template.corners[order] * template.corners.conj()).sum() / len(template)
        total[:, order] += rotation.to(aligned) * aligned / template.symmetry_order
    return total


def maximization(distribution: SceneDistribution, moments: Sequence[Moments]) -> SceneDistribution:
    """Compute the M step: the distribution with new templates, and then with new noise."""
    templates = tuple(
        Template(object_moments.shape(distribution.noise_of(k)), template.radius)
        if len(object_moments.weight)
        else template
        for k, (template, object_moments) in enumerate(
            zip(distribution.templates, moments, strict=True)
        )
    )
    distribution = replace(distribution, templates=templates)
    noise = distribution.noise
    misfits = [
        object_moments.misfit(t.corners)
        for object_moments, t in zip(moments, templates, strict=True)
    ]
    for _ in range(_NOISE_STEPS):
        noise = _next_noise(distribution, noise, moments, misfits)
    return replace(distribution, noise=noise)


def _next_noise(
    distribution: SceneDistribution,
    noise: Noise,
    moments: Sequence[Moments],
    misfits: Sequence[Tensor],
) -> Noise:
    """Compute an update of the noise on templates, given the misfits."""
    above, below = 0.0, 0.0
    for template, object_moments, misfit in zip(
        distribution.templates, moments, misfits, strict=True
    ):
        size = (object_moments.scale / template.radius).square()
        variance = noise.floor**2 + noise.proportional**2 * size
        above += float((object_moments.weight * size * misfit / variance.square()).sum())
        below += float((object_moments.weight * size / variance).sum()) * 2 * len(template)
    ratio = above / below if below > 0 else 1.0
    return Noise(noise.floor, max(LEAST_NOISE, noise.proportional * ratio**0.25))


def align_templates(templates: Sequence[Template]) -> list[Template]:
    """Rotate nearly equal templates to one angle, with their corners in one order."""
    rotated: list[Template] = []
    for template in templates:
        for other in rotated:
            if len(other) == len(template):
                orders = torch.tensor(list(itertools.permutations(range(len(template)))))
                cross = template.corners[orders].conj() @ other.corners / len(template)
                best = cross.abs().argmax()
                if cross[best].abs() > ALIKE:
                    rotation = cross[best] / cross[best].abs()
                    template = Template(rotation * template.corners[orders[best]], template.radius)
                    break
        rotated.append(template)
    return rotated


def _store(model: Constellations, distribution: SceneDistribution) -> None:
    shapes = [
        torch.view_as_real(t.corners * t.radius) for t in align_templates(distribution.templates)
    ]
    with torch.no_grad():
        model.corners.copy_(torch.cat(shapes))
        if model.log_sigma is not None:
            model.log_sigma.fill_(math.log(distribution.noise.proportional))
