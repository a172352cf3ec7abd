"""Values with the same noise under another distribution: each rule gives the new distribution."""

import pyro.distributions as dist
import pytest
import torch
from means import same_means
from torch import tensor

from capsule_zoo.guides.per_image.site_distributions import base_distribution
from capsule_zoo.inference.posterior.shared_noise import (
    carry,
    carry_value,
    same_distribution,
    same_gumbels,
)
from capsule_zoo.models import Constellations
from capsule_zoo.models.constellations.matching_distributions import MatchedPoints, RandomMatching
from capsule_zoo.models.parts.parent_selection import ParentMixture
from capsule_zoo.models.parts.pixel_mixture import PixelMixture

ROWS = 20_000
IMPOSSIBLE = -torch.inf


@pytest.fixture(autouse=True)
def in_float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def poses(logits, loc, scale):
    loc = tensor(loc)[:, None] + torch.tensor([0.0, 0.3])
    return ParentMixture(
        dist.Categorical(logits=tensor(logits)),
        dist.Normal(loc, tensor(scale)[:, None]).to_event(1),
    )


def presences(logits, children):
    return ParentMixture(
        dist.Categorical(logits=tensor(logits)), dist.Bernoulli(logits=tensor(children))
    )


def pixels(color, weight):
    shape = len(color), 1, 1, 1, 2
    weights = tensor(weight).view(-1, 1, 1, 1, 1).expand(shape) * tensor([1.0, 0.5])
    return PixelMixture(tensor(color).view(-1, 1, 1, 1, 1).expand(shape), weights, 0.3)


def scenes():
    line, corner = tensor([[0.0, -1.0], [0.0, 1.0]]), tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    return Constellations([line, corner], clutter=2).distribution()


def matching(*presence):
    return RandomMatching(scenes(), tensor(presence), slots=7)


def points(shift, code):
    return MatchedPoints(torch.arange(10.0).view(5, 2) + shift, torch.ones(5) * 0.2, tensor(code))


DISTRIBUTIONS = {
    "normal": (
        dist.Normal(tensor([0.0, 1.0]), 0.5).to_event(1),
        dist.Normal(tensor([2.0, 1.0]), tensor([0.5, 3.0])).to_event(1),
    ),
    "gumbel": (dist.Gumbel(tensor(0.0), 1.0), dist.Gumbel(tensor(2.0), 0.5)),
    "log normal": (dist.LogNormal(tensor(0.0), 0.5), dist.LogNormal(tensor(1.0), 0.2)),
    "bernoulli": (dist.Bernoulli(tensor([0.3, 0.8])), dist.Bernoulli(tensor([0.6, 0.1]))),
    "categorical": (
        dist.Categorical(logits=tensor([0.0, 1.0, IMPOSSIBLE, 0.5])),
        dist.Categorical(logits=tensor([1.0, IMPOSSIBLE, 0.3, 0.0])),
    ),
    "one hot": (
        dist.OneHotCategorical(tensor([0.2, 0.5, 0.3])),
        dist.OneHotCategorical(tensor([0.6, 0.2, 0.2])),
    ),
    "poses": (
        poses([0.0, 1.0, 0.3], [0.0, 1.0, 4.0], [1.0, 0.5, 0.2]),
        poses([0.5, IMPOSSIBLE, 0.3], [1.0, 1.0, 3.0], [0.5, 0.5, 0.4]),
    ),
    "presences": (presences([0.0, 1.0], [-1.0, 2.0]), presences([1.0, 0.0], [0.5, -2.0])),
    "pixels": (pixels([0.0, 1.0], [1.0, 3.0]), pixels([0.2, 2.0], [3.0, 0.5])),
    "matching": (matching(1.0, 0.0), matching(0.0, 1.0)),
    "points": (points(0.0, [1, 0, 2, -1, -1]), points(1.0, [4, 2, 0, 5, -1])),
}


def features(values):
    """Return values and products of neighbors as rows, with one column for each matching code."""
    if values.dim() > 1 and not values.is_floating_point():
        return torch.nn.functional.one_hot(values + 1, 8).flatten(1)[:, :-1].double()
    rows = values.nan_to_num().reshape(len(values), -1).double()
    return torch.cat([rows, rows.square(), (rows[:, :-1] * rows[:, 1:])], 1)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_a_value_from_its_distribution_becomes_a_value_from_the_new_distribution(name):
    before, after = DISTRIBUTIONS[name]
    wide = (
        distribution.expand((ROWS, *distribution.batch_shape))
        for distribution in DISTRIBUTIONS[name]
    )
    moved = carry(before.sample((ROWS,)), *wide)
    fresh = after.sample((ROWS,))
    assert moved.shape == fresh.shape and torch.equal(moved.isnan(), fresh.isnan())
    varying = features(fresh).std(0) > 0
    still = ~varying
    torch.testing.assert_close(features(moved)[:, still], features(fresh)[:, still])
    ours, theirs = features(moved)[:, varying], features(fresh)[:, varying]
    assert same_means(ours, theirs).p > 1e-3
    if name != "points":  # the clutter and the absent corners
        assert same_means(ours, features(before.sample((ROWS,)))[:, varying]).p < 1e-6


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_under_the_same_distribution_a_value_stays(name):
    distribution, other = DISTRIBUTIONS[name]
    value = distribution.sample((50,))
    assert carry(value, distribution, distribution) is value
    base = base_distribution(distribution.expand((50, *distribution.batch_shape)))
    torch.testing.assert_close(
        carry_value(base, base, value).to(value.dtype), value, equal_nan=True, rtol=1e-4, atol=1e-6
    )
    assert same_distribution(distribution, DISTRIBUTIONS[name][0]) and not same_distribution(
        distribution, other
    )


def test_transforms_and_numbers_are_part_of_a_distribution():
    squashed = [
        dist.TransformedDistribution(
            dist.Normal(0.0, 1.0), [torch.distributions.AffineTransform(shift, 1.0)]
        )
        for shift in (0.0, 1.0)
    ]
    assert same_distribution(squashed[0], squashed[0]) and not same_distribution(*squashed)
    assert carry(tensor(0.3), *squashed).item() == pytest.approx(1.3, abs=1e-12)


def test_gumbels_given_the_largest_agree_with_rejection():
    """The counterfactual of a category, from noise drawn afresh until it gives the category."""
    before, after = tensor([0.5, 0.3, 0.2]).log(), tensor([0.2, 0.3, 0.5]).log()
    noise = -torch.empty(400_000, 3).exponential_().log()
    first, second = (before + noise).argmax(-1), (after + noise).argmax(-1)
    for index in range(3):
        wanted = torch.bincount(second[first == index], minlength=3) / (first == index).sum()
        categories = torch.full((200_000,), index)
        frequencies = torch.bincount(same_gumbels(categories, before, after), minlength=3) / len(
            categories
        )
        torch.testing.assert_close(frequencies, wanted, atol=0.006, rtol=0)
    assert not ((first == 2) & (second != 2)).any()  # a category that gains is never left


@pytest.mark.parametrize(("before", "after"), [(0.3, 0.6), (0.6, 0.3)])
def test_a_coin_keeps_its_uniform_number(before, after):
    one = carry(torch.ones(ROWS), dist.Bernoulli(tensor(before)), dist.Bernoulli(tensor(after)))
    none = carry(torch.zeros(ROWS), dist.Bernoulli(tensor(before)), dist.Bernoulli(tensor(after)))
    assert one.mean().item() == pytest.approx(min(1, after / before), abs=0.015)
    gain = max(0, (after - before) / (1 - before))
    assert none.mean().item() == pytest.approx(gain, abs=0.015)


def test_a_pose_keeps_its_residual_from_its_parent():
    before = poses([0.0, 0.0], [0.0, 100.0], [1.0, 1.0])
    after = poses([0.0, 0.0], [7.0, -50.0], [2.0, 1.0])
    value = tensor([[0.5, -0.2], [101.0, 99.0]])
    moved = carry_value(after.expand((2,)), before.expand((2,)), value)
    torch.testing.assert_close(
        moved, tensor([[7 + 2 * 0.5, 7.3 + 2 * (-0.2 - 0.3)], [-49.0, -51.0]])
    )


def test_a_matching_keeps_the_order_of_what_stays():
    """Object 1 has corners 1 and 2, object 2 has corners 3, 4 and 5; 0 is clutter."""
    value = tensor([[2, 0, 1, -1, -1, -1, -1]]).expand(500, 7)
    more = carry(value, matching(1.0, 0.0), matching(1.0, 1.0))
    fewer = carry(more, matching(1.0, 1.0), matching(1.0, 0.0))
    assert torch.equal(fewer, value)
    assert (more.sort(-1).values == tensor([-1, 0, 1, 2, 3, 4, 5])).all()
    old = more[(more >= 0) & (more < 3)].view(500, 3)
    assert (old == tensor([2, 0, 1])).all()
    crowded = RandomMatching(scenes(), tensor([1.0, 1.0]), slots=4)
    with pytest.raises(ValueError, match="more points than the 4 slots"):
        carry(value[:, :4], RandomMatching(scenes(), tensor([1.0, 0.0]), slots=4), crowded)


def test_points_move_with_their_corners_and_clutter_stays():
    before, after = points(0.0, [1, 0, 2, -1, -1]), points(1.0, [2, 1, 0, -1, -1])
    value = before.sample()
    moved = carry(value, before, after)
    torch.testing.assert_close(moved[0], value[2] + 1)
    torch.testing.assert_close(moved[1], value[0] + 1)
    assert torch.equal(moved[2], value[1]) and moved[3:].isnan().all()
