"""The amortized guide to constellations: normalized assignments, and it learns asleep."""

import itertools

import pyro
import pytest
import torch

from capsule_zoo.data.points import SHAPES, draw_scenes
from capsule_zoo.guides import AmortizedMatching, ExactMatching
from capsule_zoo.guides.constellations.amortized import dreams, exchanges, views
from capsule_zoo.guides.constellations.exact import groups
from capsule_zoo.inference import SleepPhase, evaluate
from capsule_zoo.models import Constellations
from capsule_zoo.models.constellations.similarities import as_complex


def pair(
    names: tuple[str, ...] = ("square", "square", "triangle"), clutter: int = 1, **sizes: int
) -> tuple[Constellations, AmortizedMatching]:
    pyro.set_rng_seed(0)
    shapes = [torch.tensor(SHAPES[name]) for name in names]
    model = Constellations(shapes, 0.1, clutter=clutter).double()
    guide = AmortizedMatching(model, width=8, blocks=1, **sizes).double()
    guide.transformer.read_weight.data *= 3  # claims that differ much
    return model, guide


def scenes_of(names: tuple[str, ...], number: int, clutter: int = 1, seed: int = 1):
    return draw_scenes(
        number, 0.1, clutter=clutter, templates=[SHAPES[n] for n in names], seed=seed
    )


def test_probabilities_of_all_shares_sum_to_one():
    model, guide = pair()
    scenes = scenes_of(("square", "square", "triangle"), 5)
    for group in groups(model.distribution(), scenes.points):
        objects, _ = group.posterior()  # all assignments
        points = scenes.points[group.rows]
        every = torch.full((len(objects), *points.shape[:2]), -1)
        rows = torch.arange(len(points))
        for way, assignment in enumerate(objects):
            every[way, rows[:, None], group.slots] = assignment
        total = guide.log_assignment(points, every).logsumexp(0)
        torch.testing.assert_close(total, torch.zeros_like(total))


def test_probabilities_of_all_matchings_sum_to_one():
    names = ("triangle", "triangle")
    model, guide = pair(names, clutter=0)
    scenes = scenes_of(names, 6, clutter=0)
    whole = scenes.points[scenes.present.all(1)][:2]
    distribution = guide.matchings(model.distribution(), whole, torch.float64)
    codes = torch.tensor(list(itertools.permutations(range(1, 7))))
    total = distribution.log_prob(codes[:, None].expand(-1, len(whole), -1)).logsumexp(0)
    torch.testing.assert_close(total, torch.zeros_like(total))
    counted = torch.bincount(distribution.sample((200,))[:, 0, 0].long(), minlength=7)
    assert counted[0] == 0 and (counted[1:4].sum() - 100).abs() < 40  # objects are exchanged


def test_equal_objects_may_be_exchanged_whatever_the_order_of_their_corners():
    model, guide = pair()
    with torch.no_grad():
        model.corners[4:8] = model.corners[[6, 4, 7, 5]] * 1.001
    assert exchanges(model.distribution()).tolist() == [[0, 1, 2], [1, 0, 2]]
    scenes = scenes_of(("square", "square", "triangle"), 8)
    swapped = torch.tensor([1, 0, 2, -1])[scenes.objects]
    first, second = (guide.log_assignment(scenes.points, o) for o in (scenes.objects, swapped))
    torch.testing.assert_close(first, second)


def test_where_the_share_is_certain_the_guide_is_exact():
    """A scene of as many points as one object alone leaves the network nothing to decide."""
    model, guide = pair(clutter=0)
    points = scenes_of(("square",), 6, clutter=0).points
    exact = ExactMatching(model).parse(points).log_evidence
    matchings = guide.parse(points)
    assert (matchings.log_evidence <= exact + 1e-6).all()
    idata = evaluate(model, guide, points, num_particles=4)
    weights = torch.from_numpy(idata.sample_stats.log_weight.values[0])
    torch.testing.assert_close(weights, exact.expand(4, -1), rtol=0, atol=2e-3)


def test_scenes_of_fewer_points_than_an_object_has_corners_are_parsed():
    _, guide = pair(("square", "triangle"), clutter=0)
    points = scenes_of(("triangle",), 4, clutter=0).points
    assert (guide.parse(points).objects == 1).all()
    assert guide(points).shape == (len(points), 2, 4)


def test_more_proposals_give_no_smaller_evidence():
    names = ("square", "square", "triangle")
    _, guide = pair()
    points = scenes_of(names, 8).points
    torch.manual_seed(2)
    one, many = (guide.with_proposals(n).parse(points).log_evidence for n in (1, 12))
    assert (many >= one).all() and (many > one).any()


def test_every_point_sees_the_others_in_a_frame_of_its_own():
    points = torch.randn(2, 5, 2, generator=torch.Generator().manual_seed(3)).double()
    rotated = torch.view_as_real(as_complex(points) * torch.tensor(0.6 + 0.8j) + (1 - 2j))
    features, again = views(points, 6), views(rotated, 6)
    assert features.shape == (2, 5, 18)
    torch.testing.assert_close(features[..., :12], again[..., :12])  # 4 others, 3 numbers each
    assert not torch.allclose(features[..., 12:14], again[..., 12:14])
    assert (features[..., 12:14] == points).all() and (features[..., 15:] == 0).all()


def test_samples_look_like_scenes_of_the_data_set():
    model, _ = pair()
    points, objects = dreams(model, 50)
    presence = ~points[..., 0].isnan()
    assert len(points) == len(objects) == 50 and presence.sum(1).min() >= 2
    for scene, present in zip(points, presence, strict=True):
        assert scene[present].amax().item() == pytest.approx(1)
        assert scene[present].amin().item() == pytest.approx(-1)
    for k, size in enumerate(model.sizes):
        assert set((objects == k).sum(1).tolist()) == {0, size}
    assert (objects[~presence] == -1).all()


def test_it_learns_to_share_from_samples_and_leaves_the_model_alone():
    model, guide = pair(("square", "triangle"), clutter=0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    objective, points = SleepPhase(), torch.zeros(24, 7, 2)
    optimizer = torch.optim.Adam([*guide.parameters(), *model.parameters()], lr=1e-2)
    losses = []
    for _ in range(25):
        optimizer.zero_grad()
        loss = objective.differentiable_loss(model, guide, points)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
