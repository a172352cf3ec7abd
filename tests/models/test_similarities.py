"""Evidence of points under a similarity: against dense integrals and against a Gaussian by hand."""

import itertools
import math

import pytest
import torch
from torch.distributions import MultivariateNormal

from capsule_zoo.data.points import SHAPES
from capsule_zoo.models.constellations.similarities import (
    Noise,
    Template,
    as_complex,
    fit_of,
    log_evidence,
    place_corners,
    tuple_evidence,
)

TAU = 0.6
TEMPLATES = {name: Template.of(torch.tensor(s).double()) for name, s in SHAPES.items()}


def rows_of(template: Template) -> torch.Tensor:
    """Return F, (2 n, 4), with rows [1 0 p_x p_y] and [0 1 p_y -p_x]."""
    rows = []
    for corner in template.corners.tolist():
        x, y = corner.real, corner.imag
        rows += [[1, 0, x, y], [0, 1, y, -x]]
    return torch.tensor(rows, dtype=torch.float64)


def points_on(template: Template, noise: float, seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    exact = place_corners(torch.tensor([0.1, -0.2, 0.4, 0.3]).double(), template.corners)
    return exact + noise * as_complex(torch.randn(len(template), 2).double())


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_pose_acts_linearly_by_the_rows_of_the_paper(name):
    pose, template = torch.randn(4).double(), TEMPLATES[name]
    placed = torch.view_as_real(place_corners(pose, template.corners)).flatten()
    torch.testing.assert_close(placed, rows_of(template) @ pose)
    torch.testing.assert_close(template.corners.abs().square().sum().item(), float(len(template)))


@pytest.mark.parametrize("floor", [0.02, 0.3])
@pytest.mark.parametrize("name", TEMPLATES)
def test_noise_on_the_scene_leaves_a_gaussian(name, floor):
    template, points = TEMPLATES[name], points_on(TEMPLATES[name], 0.05)
    rows = rows_of(template)
    covariance = TAU**2 * rows @ rows.T + floor**2 * torch.eye(len(rows)).double()
    distribution = MultivariateNormal(torch.zeros(len(rows)).double(), covariance)
    expected = distribution.log_prob(torch.view_as_real(points).flatten())
    fit = fit_of(points, template.corners)
    torch.testing.assert_close(log_evidence(fit, Noise(floor), TAU), expected, rtol=1e-9, atol=0)
    nearly = log_evidence(fit, Noise(floor, 1e-9), TAU)  # by quadrature
    torch.testing.assert_close(nearly, expected, rtol=0, atol=1e-4 if floor < 0.1 else 1e-3)


def dense_integral(points: torch.Tensor, template: Template, noise: Noise) -> torch.Tensor:
    """Integrate over the angle and the scale on a fine grid; the place is Gaussian."""
    scale, angle = (
        torch.linspace(1e-3, 3, 1501).double(),
        torch.arange(360).double() * math.pi / 180,
    )
    rotation = torch.polar(scale[:, None].expand(-1, 360), angle.expand(1501, 360))
    variance, number = noise.variance(scale)[:, None], len(template)
    rest = points - rotation[..., None] * template.corners
    center = rest.mean(-1)
    spread = (rest - center[..., None]).abs().square().sum(-1)
    log = -spread / (2 * variance) - (number - 1) * (2 * math.pi * variance).log()
    place = TAU**2 + variance / number
    log = log - math.log(number) - center.abs().square() / (2 * place) - (2 * math.pi * place).log()
    prior = -(scale**2)[:, None] / (2 * TAU**2) - math.log(2 * math.pi * TAU**2)
    cell = math.log((scale[1] - scale[0]).item() * math.pi / 180)
    return (log + prior + scale.log()[:, None]).logsumexp((0, 1)) + cell


@pytest.mark.parametrize("noise", [Noise(0.01, 0.2), Noise(0.05, 0.05), Noise(0.005, 0.5)])
@pytest.mark.parametrize("name", ["square", "triangle"])
def test_noise_on_the_template_agrees_with_a_dense_integral(name, noise):
    template = TEMPLATES[name]
    for error in (0.03, 0.3):  # a good fit and a bad one
        points = points_on(template, error)
        evidence = log_evidence(fit_of(points, template.corners), noise, TAU)
        expected = dense_integral(points, template, noise)
        torch.testing.assert_close(evidence, expected, rtol=0, atol=2e-3)


def test_orders_stand_for_all_permutations():
    """A square is mapped to itself by four rotations, this triangle by one."""
    assert {name: t.symmetry_order for name, t in TEMPLATES.items()} == {
        **{"square": 4, "triangle": 1, "pentagon": 1, "corner": 1}
    }
    for name in ("square", "triangle"):
        template = TEMPLATES[name]
        places = as_complex(torch.randn(2, 5, 2).double())
        noise = Noise(0.2, 0.1)
        relative_noise = Noise(noise.floor, noise.proportional / template.radius)
        evidence = tuple_evidence(places, template, noise, TAU).logsumexp(-1)
        evidence = evidence + math.log(template.symmetry_order)
        for k, subset in enumerate(itertools.combinations(range(5), len(template))):
            every = torch.stack(
                [
                    log_evidence(
                        fit_of(places[:, list(order)], template.corners), relative_noise, TAU
                    )
                    for order in itertools.permutations(subset)
                ]
            )
            torch.testing.assert_close(evidence[:, k], every.logsumexp(0), rtol=0, atol=1e-6)
