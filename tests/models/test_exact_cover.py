"""The recursion over covers: against loops over all ways, in float64."""

import itertools
import math

import pytest
import torch

from capsule_zoo.models.constellations.exact_cover import all_covers, backward, forward, plan

NUMBER, SIZES = 5, (2, 3, 2)


def tables(batch: int = 3) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(batch, math.comb(NUMBER, size)).double() for size in SIZES]


def weights(clutter: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    on = torch.tensor([0.3, 0.6, 0.5]).double()
    return on.log(), (-on).log1p(), torch.tensor([0.2, -1.0, 0.7, 0.1]).double()[: clutter + 1]


def every_way(clutter: int) -> dict[tuple[int, ...], torch.Tensor]:
    """Return the log weight of every way to share out the points, by loops."""
    on, off, left = weights(clutter)
    options = [
        [*enumerate(itertools.combinations(range(NUMBER), size)), (math.comb(NUMBER, size), ())]
        for size in SIZES
    ]
    log_weights = {}
    for way in itertools.product(*options):
        points = [point for _, members in way for point in members]
        spare = NUMBER - len(points)
        if len(set(points)) < len(points) or spare > clutter:
            continue
        total = left[spare].expand(3)
        for k, (index, members) in enumerate(way):
            total = total + (on[k] + tables()[k][:, index] if members else off[k])
        log_weights[tuple(index for index, _ in way)] = total
    return log_weights


@pytest.mark.parametrize("clutter", [0, 1, 3])
def test_sum_best_and_list_agree_with_loops(clutter):
    expected = every_way(clutter)
    recursion = plan(NUMBER, SIZES, clutter)
    total, _ = forward(recursion, tables(), *weights(clutter))
    torch.testing.assert_close(total, torch.stack([*expected.values()]).logsumexp(0))
    best, values = forward(recursion, tables(), *weights(clutter), best=True)
    torch.testing.assert_close(best, torch.stack([*expected.values()]).amax(0))
    taken = torch.stack(backward(recursion, values, best=True), 1)
    for scene, way in enumerate(taken.tolist()):
        assert expected[tuple(way)][scene] == pytest.approx(best[scene].item())
    assert {tuple(way) for way in all_covers(recursion).tolist()} == set(expected)


def test_draws_have_the_posterior_probabilities():
    expected = every_way(1)
    torch.manual_seed(3)
    many = [table[:1].expand(40_000, -1) for table in tables()]
    recursion = plan(NUMBER, SIZES, 1)
    _, values = forward(recursion, many, *weights(1))
    drawn = torch.stack(backward(recursion, values, best=False), 1)
    counts = {way: 0 for way in expected}
    for way in drawn.tolist():
        counts[tuple(way)] += 1
    exact = torch.stack([total[0] for total in expected.values()]).softmax(0)
    frequencies = torch.tensor([counts[way] for way in expected]).double() / len(drawn)
    error = (exact * (1 - exact) / len(drawn)).sqrt()
    assert ((frequencies - exact).abs() < 5 * error + 1e-4).all()


def test_the_scenes_of_the_paper_have_5775_covers_and_two_squares_to_exchange():
    assert len(all_covers(plan(11, (4, 3, 4), 0))) == 2 * 5775


def test_no_way_is_evidence_zero():
    total, _ = forward(plan(5, (4,), 0), [torch.zeros(2, 5)], *weights(0)[:2], torch.zeros(1))
    assert (total == -math.inf).all()
