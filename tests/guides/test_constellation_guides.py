"""Guides to constellations: against sums over all matchings, and against each other."""

import itertools
import math

import pyro
import pytest
import torch
from pyro.infer import Trace_ELBO

from capsule_zoo.data.points import SHAPES, TEMPLATES, draw_scenes
from capsule_zoo.guides import ExactMatching, MixtureMatching, RansacMatching, SinkhornMatching
from capsule_zoo.guides.constellations.em import Corners, Poses, fit_poses, patterns, round_off
from capsule_zoo.guides.constellations.exact import groups
from capsule_zoo.inference import evaluate
from capsule_zoo.inference.segmentation import segmentation_accuracy
from capsule_zoo.models import Constellations
from capsule_zoo.models.constellations.matching_distributions import RandomMatching, from_codes
from capsule_zoo.models.constellations.scene_distribution import log_equivalent, log_joint
from capsule_zoo.models.constellations.similarities import Template, as_complex, place_corners

SMALL = ("square", "triangle")


def model_of(names: tuple[str, ...] = SMALL, sigma: float = 0.1, **sizes) -> Constellations:
    return Constellations([torch.tensor(SHAPES[n]) for n in names], sigma, **sizes).double()


def scenes_of(names: tuple[str, ...], number: int, sigma: float = 0.1, clutter: int = 0, seed=0):
    shapes = [SHAPES[name] for name in names]
    return draw_scenes(number, sigma, templates=shapes, clutter=clutter, seed=seed)


def every_matching(sizes: tuple[int, ...], number: int, clutter: int) -> torch.Tensor:
    """Return all matchings of `number` points, by loops over sets of objects and over orders."""
    first = [sum(sizes[:k]) for k in range(len(sizes))]
    matchings = []
    for presence in itertools.product([False, True], repeat=len(sizes)):
        codes = [
            1 + f + c for f, n, t in zip(first, sizes, presence, strict=True) if t for c in range(n)
        ]
        if 0 <= number - len(codes) <= clutter:
            matchings += set(itertools.permutations(codes + [0] * (number - len(codes))))
    return torch.tensor(matchings)


@pytest.mark.parametrize("sigma", [0.0, 0.15])
@pytest.mark.parametrize("names", [("triangle", "triangle"), ("square",)])
def test_exact_evidence_is_the_sum_over_all_matchings(names, sigma):
    model = model_of(names, sigma, sigma_floor=0.05, clutter=1)
    distribution, scenes = model.distribution(), scenes_of(names, 12, 0.1, clutter=1, seed=1)
    matchings = ExactMatching(model).parse(scenes.points)
    for scene, evidence in enumerate(matchings.log_evidence):
        points = scenes.points[scene : scene + 1]
        present = ~points[0, :, 0].isnan()
        codes = every_matching(model.sizes, int(present.sum()), 1)
        full = torch.full((len(codes), 1, points.shape[1]), -1)
        full[:, 0, present] = codes
        joint = log_joint(distribution, points, *from_codes(distribution, full))
        torch.testing.assert_close(joint.logsumexp(0)[0], evidence, rtol=0, atol=1e-5)
        prior = torch.stack(
            [
                RandomMatching(distribution, torch.tensor(t).double(), full.shape[-1]).log_prob(
                    full
                )
                + len(names) * math.log(0.5)
                for t in itertools.product([0, 1], repeat=len(names))
            ]
        )
        # the model's own distribution of matchings is what log_joint has beside the points
        assert (prior.logsumexp(0).isfinite() == joint.isfinite()).all()


def test_the_log_weight_of_every_exact_draw_is_the_evidence():
    model, scenes = model_of(clutter=1), scenes_of(SMALL, 10, clutter=1, seed=2)
    guide = ExactMatching(model)
    idata = evaluate(model, guide, scenes.points, num_particles=5)
    weights = torch.from_numpy(idata.sample_stats.log_weight.values[0])
    expected = guide.parse(scenes.points).log_evidence.expand(5, -1)
    torch.testing.assert_close(weights, expected, rtol=0, atol=2e-3)
    assert (weights - expected).abs().mean() < 2e-4


def test_the_exact_guide_gives_the_gradient_of_the_evidence():
    """Its draws carry no gradient, and need none: this is the E step of EM."""
    model, scenes = model_of(sigma=0.2), scenes_of(SMALL, 8, 0.2, seed=3)
    guide = ExactMatching(model)
    pyro.set_rng_seed(0)
    objective = Trace_ELBO(num_particles=150, vectorize_particles=True, max_plate_nesting=1)
    objective.differentiable_loss(model, guide, scenes.points).backward()
    delta, value = 1e-3, model.log_sigma.item()
    ends = []
    for shift in (-delta, delta):
        model.log_sigma.data.fill_(value + shift)
        ends.append(guide.parse(scenes.points).log_evidence.sum().item())
    slope = (ends[1] - ends[0]) / (2 * delta)
    assert -model.log_sigma.grad.item() == pytest.approx(slope, abs=0.05 * abs(slope) + 1.0)


@pytest.mark.parametrize("guide", [RansacMatching, SinkhornMatching])
def test_other_guides_bound_the_evidence_by_the_joint_of_their_matching(guide):
    names = ("square", "triangle", "square")
    model, scenes = model_of(names, 0.1, clutter=1), scenes_of(names, 24, 0.1, clutter=1, seed=4)
    exact = ExactMatching(model).parse(scenes.points)
    matchings = guide(model).parse(scenes.points)
    assert (matchings.log_evidence <= exact.log_evidence + 1e-6).all()
    distribution = model.distribution()
    joint = log_joint(distribution, scenes.points, matchings.objects, matchings.corners)
    joint = joint + log_equivalent(distribution, matchings.objects)
    assert (matchings.log_evidence >= joint - 1e-6).all()


def test_ransac_finds_the_exact_parse_where_noise_is_small():
    names = ("square", "triangle", "square")
    model, scenes = model_of(names, 0.02), scenes_of(names, 60, 0.02, seed=5)
    exact, ransac = (g(model).parse(scenes.points) for g in (ExactMatching, RansacMatching))
    right = segmentation_accuracy(ransac.objects, exact.objects, scenes.present, [0, 1, 0])
    assert (right == 1).all()
    assert (exact.log_evidence - ransac.log_evidence).mean() < 0.05


def test_the_exact_posterior_knows_how_often_it_is_right():
    """On scenes of the generator: their frame is scaled and shifted, which the poses absorb."""
    model, scenes = model_of(("square", "square"), 0.25), scenes_of(("square", "square"), 300, 0.25)
    model.sigma_pose = 0.5
    confidence, right = [], []
    for group in groups(model.distribution(), scenes.points):
        objects, probability = group.posterior()
        best = objects[probability.argmax(1)]
        true = scenes.objects[group.rows[:, None], group.slots]
        for k in range(len(best)):
            every = torch.ones_like(objects, dtype=torch.bool)
            same = segmentation_accuracy(best[k].expand_as(objects), objects, every, [0, 0]) == 1
            confidence.append(probability[k][same].sum().item())
            right.append(torch.equal(best[k], true[k]) or torch.equal(1 - best[k], true[k]))
    confidence, right = torch.tensor(confidence), torch.tensor(right).float()
    error = ((confidence * (1 - confidence)).sum().sqrt() / len(confidence)).item()
    assert right.mean().item() == pytest.approx(confidence.mean().item(), abs=4 * error)
    assert right.mean() < 1  # some scenes are truly ambiguous


def test_poses_are_a_ridge_regression_on_responsible_points():
    model = model_of()
    distribution = model.distribution()
    torch.manual_seed(6)
    points = torch.randn(1, 7, 2).double()
    places = as_complex(points)
    corners = Corners.of(distribution, (0, 1), 0, places)
    responsibility = torch.rand(1, 7, 7).double()
    start = torch.complex(torch.randn(1, 2).double(), torch.randn(1, 2).double())
    zero = torch.zeros(1, 2).double()
    before = Poses(start, start.conj(), zero, zero, start * 0)
    posterior = fit_poses(places, corners, responsibility, before, distribution.tau)
    for k, owned in enumerate((range(4), range(4, 7))):
        variance = corners.noises[k].variance(before.rotation[0, k].abs())
        rows, values = [], []
        for i, j in itertools.product(range(7), owned):
            x, y = corners.place[j].real.item(), corners.place[j].imag.item()
            weight = (responsibility[0, i, j] / variance).sqrt()
            rows += [weight * torch.tensor(r).double() for r in ([1, 0, x, y], [0, 1, y, -x])]
            values += [weight * points[0, i, 0], weight * points[0, i, 1]]
        rows, values = torch.stack(rows), torch.stack(values)
        precision = rows.T @ rows + torch.eye(4).double() / distribution.tau**2
        mean = torch.linalg.solve(precision, rows.T @ values)
        coefficients = torch.stack(
            [
                posterior.place[0, k].real,
                posterior.place[0, k].imag,
                posterior.rotation[0, k].real,
                -posterior.rotation[0, k].imag,
            ]
        )
        torch.testing.assert_close(coefficients, mean)
        torch.testing.assert_close(posterior.var_rotation[0, k], precision.inverse()[2, 2])
        torch.testing.assert_close(posterior.var_place[0, k], precision.inverse()[0, 0])


def test_rounding_finds_the_best_permutation():
    weights = torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(7))
    orders = list(itertools.permutations(range(4)))
    sums = torch.stack([weights[:, range(4), list(o)].sum(1) for o in orders], 1)
    expected = torch.tensor([orders[i] for i in sums.argmax(1)])
    assert torch.equal(round_off(weights), expected)


def test_patterns_name_each_set_of_equal_objects_once():
    distribution = model_of(("square", "triangle", "square"), clutter=1).distribution()
    assert patterns(distribution, 4) == [((0,), 0), ((1,), 1)]
    assert patterns(distribution, 8) == [((0, 1), 1), ((0, 2), 0)]


def test_symmetric_matchings_are_equally_likely_and_counted():
    model, scenes = model_of(("square", "square")), scenes_of(("square", "square"), 8, seed=8)
    distribution = model.distribution()
    joint = log_joint(distribution, scenes.points, scenes.objects, scenes.corners)
    rotated = torch.where(scenes.corners >= 0, (scenes.corners + 1) % 4, scenes.corners)
    torch.testing.assert_close(
        joint, log_joint(distribution, scenes.points, scenes.objects, rotated)
    )
    both = (scenes.present.sum(1) == 8).double()
    expected = torch.where(both > 0, 2.0 * 16, 2.0 * 4).log().double()
    torch.testing.assert_close(log_equivalent(distribution, scenes.objects), expected)


def test_the_mixture_says_when_its_parse_is_no_matching():
    names = ("square", "triangle", "square")
    model, scenes = model_of(names), scenes_of(names, 40, seed=9)
    matchings = MixtureMatching(model).parse(scenes.points)
    for objects, corners, evidence in zip(
        matchings.objects, matchings.corners, matchings.log_evidence, strict=True
    ):
        held = [(o, c) for o, c in zip(objects.tolist(), corners.tolist(), strict=True) if o >= 0]
        assert math.isfinite(evidence) == (len(set(held)) == len(held))
    assert matchings.log_evidence.isinf().any() and matchings.log_evidence.isfinite().any()


def test_a_parse_moves_its_templates_onto_the_points():
    """Object and corner numbers are those of the model's templates."""
    template = Template.of(torch.tensor(TEMPLATES[1]).double())
    points = place_corners(torch.tensor([0.1, 0.2, 0.3, -0.5]).double(), template.corners)
    order = torch.tensor([2, 0, 1])
    scene = torch.view_as_real(points[order])[None]
    matchings = ExactMatching(model_of(sigma=0.01)).parse(scene)
    assert matchings.objects.tolist() == [[1, 1, 1]]
    assert matchings.corners.tolist() == [order.tolist()]
