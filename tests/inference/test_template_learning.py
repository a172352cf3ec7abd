"""Templates learned by exact EM, against the gradient of the evidence and on published scenes."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from capsule_zoo.data.points import SHAPES, draw_scenes
from capsule_zoo.data.seeds import seeded_generator
from capsule_zoo.guides import ExactMatching
from capsule_zoo.guides.constellations.exact import groups
from capsule_zoo.inference.segmentation import segmentation_accuracy
from capsule_zoo.inference.training.starts.template_learning import (
    expectation,
    learn_templates,
    maximization,
    mean_evidence,
    random_distribution,
    responsibilities,
)
from capsule_zoo.models import Constellations
from capsule_zoo.models.constellations.similarities import Noise, Template, as_complex

NAMES = ("square", "triangle")


def blank(sizes: tuple[int, ...] = (4, 3), **options: float) -> Constellations:
    """Return a model whose templates say nothing: all their corners lie on a line."""
    lines = [torch.arange(2.0 * n).reshape(n, 2) for n in sizes]
    return Constellations(lines, **options).double()


def scenes_of(number: int, sigma: float, names: tuple[str, ...] = NAMES, seed: int = 0):
    return draw_scenes(number, sigma, templates=[SHAPES[name] for name in names], seed=seed)


def triangle_distribution(sigma: float = 0.2):
    distribution = blank((3,), sigma_floor=0.05).distribution()
    corners = torch.tensor([1.0, 1j, -1.2 - 0.4j], dtype=torch.complex128)
    template = Template.of(torch.view_as_real(corners))
    return replace(distribution, templates=(template,), noise=Noise(0.05, sigma))


@pytest.mark.parametrize("clutter", [0, 1])
def test_responsibilities_are_the_posterior_of_shares_and_orders(clutter):
    model = Constellations(
        [torch.tensor(SHAPES[n]) for n in ("triangle", "triangle")], 0.2, clutter=clutter
    ).double()
    scenes = draw_scenes(8, 0.2, templates=[SHAPES["triangle"]] * 2, clutter=clutter, seed=1)
    for group in groups(model.distribution(), scenes.points):
        evidence, fractions = responsibilities(group)
        torch.testing.assert_close(evidence, group.log_total())
        objects, probability = group.posterior()
        for k, fraction in enumerate(fractions):
            membership = (objects == k).any(1).double()
            torch.testing.assert_close(fraction.sum((1, 2)), probability @ membership)
            within = group.tuples[k].softmax(-1) * fraction.sum(-1, keepdim=True)
            torch.testing.assert_close(fraction, within)


def test_em_never_lowers_the_evidence_and_moves_templates_that_are_not_the_best():
    points = scenes_of(24, 0.2, seed=2).points
    distribution = random_distribution(blank().distribution(), points, seeded_generator(3))
    evidences = []
    for _ in range(6):
        evidence, moments = expectation(distribution, points)
        assert evidence == pytest.approx(mean_evidence(distribution, points))
        evidences.append(evidence)
        distribution = maximization(distribution, moments)
    steps = torch.tensor(evidences).diff()
    assert (steps > -1e-5).all() and steps.sum() > 0.1


def test_the_step_for_templates_follows_the_gradient_of_the_evidence():
    """Fisher's identity: the pull on a template is the derivative of the mean evidence."""
    distribution, points = triangle_distribution(), scenes_of(20, 0.2, ("triangle",), seed=4).points
    _, (moments,) = expectation(distribution, points)
    corners, noise = distribution.templates[0].corners, distribution.noise_of(0)
    weight = moments.weight * moments.scale / noise.variance(moments.scale)
    pull = (weight * moments.swing).sum(1).to(corners) @ moments.aligned
    total_scale = (weight * moments.scale).sum()
    slope = (pull - total_scale * corners) / len(points)
    for direction in (corners.flip(0), 1j * corners[[1, 2, 0]]):
        away = direction - direction.mean()
        away = away - (away * corners.conj()).real.mean() * corners  # the size stays
        ends = []
        for step in (-1e-4, 1e-4):
            moved = Template(corners + step * away, distribution.templates[0].radius)
            ends.append(mean_evidence(replace(distribution, templates=(moved,)), points))
        expected = (slope * away.conj()).real.sum().item()
        assert (ends[1] - ends[0]) / 2e-4 == pytest.approx(expected, rel=1e-3, abs=1e-3)


def test_the_step_for_noise_stands_still_where_the_evidence_does():
    points = scenes_of(40, 0.2, ("triangle",), seed=5).points
    distribution = triangle_distribution(0.3)
    for _ in range(60):
        distribution = maximization(distribution, expectation(distribution, points)[1])
    ends = [
        mean_evidence(
            replace(distribution, noise=Noise(0.05, distribution.noise.proportional * math.exp(d))),
            points,
        )
        for d in (-0.2, 0.0, 0.2)
    ]
    assert ends[1] > max(ends[0], ends[2])


def test_a_regular_template_stays_regular():
    """All orders that a rotation makes count, though one of them is listed."""
    model = Constellations([torch.tensor(SHAPES["square"])], 0.2).double()
    distribution, points = model.distribution(), scenes_of(12, 0.2, ("square",), seed=6).points
    template = maximization(distribution, expectation(distribution, points)[1]).templates[0]
    assert template.symmetry_order == distribution.templates[0].symmetry_order == 4


@pytest.mark.long
def test_templates_are_learned_from_scenes_without_labels():
    scenes, held_out = scenes_of(120, 0.1, seed=7), scenes_of(100, 0.1, seed=8)
    model = blank(sigma=0.5)
    history = learn_templates(model, scenes.points, starts=2, steps=12, trial_scenes=40, seed=0)
    assert len(history) == 13 and history[-1] > history[0]
    for shape, name in zip(model.corners.detach().split(model.sizes), NAMES, strict=True):
        truth = Template.of(torch.tensor(SHAPES[name]).double())
        corners = as_complex(shape) / shape.square().sum(1).mean().sqrt()
        like = max(
            abs((corners[list(order)].conj() @ truth.corners).item()) / len(truth)
            for order in itertools.permutations(range(len(truth)))
        )
        assert like > 0.995
    assert 0.05 < model.log_sigma.exp().item() < 0.2
    matchings = ExactMatching(model).parse(held_out.points)
    right = segmentation_accuracy(matchings.objects, held_out.objects, held_out.present, [0, 1])
    assert right.mean() > 0.97
