"""Scores of counted objects on examples that are worked out by hand."""

import itertools

import pytest
import torch
from torch import Tensor

from capsule_zoo.inference.counting import (
    circle_overlaps,
    count_interval,
    disk_masks,
    interval_coverage,
    label_centers,
    match_centers,
    score_centers,
)

MARKS = torch.tensor([[10.0, 10.0], [30.0, 10.0], [10.0, 40.0]])


def test_perfect_centers_have_perfect_scores():
    assert score_centers(MARKS.flip(0), MARKS, 3) == (3, 0, 1.0, 1.0, 0)


def test_a_miss_a_repeat_and_a_false_object_are_counted():
    centers = torch.tensor([[11.0, 10.0], [9.0, 11.0], [30.0, 12.0], [80.0, 80.0]])
    # the first two are of mark 0, one of them extra; mark 2 is missed; the last is of none
    assert score_centers(centers, MARKS, 3) == (4, 1, 2 / 4, 2 / 3, 1)


def test_a_distance_of_each_mark_counts():
    centers = torch.tensor([[14.0, 10.0], [34.0, 10.0]])
    scores = score_centers(centers, MARKS, torch.tensor([5.0, 3.0, 1.0]))
    assert scores.recall == 1 / 3 and scores.precision == 1 / 2


@pytest.mark.parametrize("lists", [True, False])
def test_empty_pictures_are_scored(lists):
    none, marks = torch.zeros(0, 2), MARKS.tolist() if lists else MARKS
    assert score_centers(none, marks, 3) == (0, -3, 1.0, 0.0, 0)
    assert score_centers(marks, none, 3) == (3, 3, 0.0, 1.0, 0)
    assert score_centers(none, none, 3) == (0, 0, 1.0, 1.0, 0)


def test_nearest_first_would_lose_a_pair():
    marks, centers = torch.tensor([[0.0, 0.0], [4.0, 0.0]]), torch.tensor([[3.0, 0.0], [7.5, 0.0]])
    # the first center is nearer to the second mark, which alone is in reach of the second center
    assert match_centers(centers, marks, 4.0).tolist() == [[0, 0], [1, 1]]


@pytest.mark.parametrize("seed", range(5))
def test_the_match_is_the_best_of_all_orders(seed):
    torch.manual_seed(seed)
    centers, marks, limit = torch.rand(4, 2).double(), torch.rand(5, 2).double(), 0.4

    def value(order: tuple[int, ...]) -> tuple[int, float]:
        distances = (centers - marks[list(order)]).norm(dim=1)
        near = distances <= limit
        return int(near.sum()), -float(distances[near].sum())

    best = max(map(value, itertools.permutations(range(5), 4)))
    pairs = match_centers(centers, marks, limit)
    total = (centers[pairs[:, 0]] - marks[pairs[:, 1]]).norm(dim=1).sum()
    assert len(pairs) == best[0] and float(total) == pytest.approx(-best[1])


def test_centers_of_labels_are_means_of_pixels():
    labels = torch.zeros(6, 8, dtype=torch.int64)
    labels[1:3, 2:6], labels[5, 0] = 7, 2
    assert label_centers(labels).tolist() == [[0.0, 5.0], [3.5, 1.5]]  # numbers 2 and 7


def test_a_disk_of_one_pixel_and_of_its_neighbors():
    masks = disk_masks(torch.tensor([[1.0, 2.0], [3.0, 2.0]]), torch.tensor([0.5, 1.0]), (5, 6))
    assert masks[0].nonzero().tolist() == [[2, 1]]
    assert masks[1].nonzero().tolist() == [[1, 3], [2, 2], [2, 3], [2, 4], [3, 3]]


def disks() -> tuple[Tensor, Tensor, Tensor]:
    """Return two circles that do not touch, and the pixels of each."""
    centers, radii = torch.tensor([[12.0, 12.0], [40.0, 12.0]]), torch.tensor([8.0, 9.0])
    return centers, radii, disk_masks(centers, radii, (25, 60))


def test_overlaps_of_equal_half_and_merged_segments():
    centers, radii, masks = disks()
    areas = masks.sum((1, 2)).double()
    whole = masks[0] * 2 + masks[1] * 1
    assert circle_overlaps(whole, centers, radii).tolist() == [1.0, 1.0]
    half = torch.where(torch.arange(60) < 12, whole, whole * 0 + masks[1])
    expected = (masks[0] & (torch.arange(60) < 12)).sum() / areas[0]
    torch.testing.assert_close(
        circle_overlaps(half, centers, radii).double(), torch.stack([expected, expected**0])
    )
    merged = circle_overlaps(masks.any(0).long(), centers, radii).double()
    torch.testing.assert_close(merged, torch.stack([expected * 0, areas[1] / areas.sum()]))
    assert circle_overlaps(whole * 0, centers, radii).tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("probabilities", "interval"),
    [
        ([0, 0, 1.0], (2, 2)),
        ([0.04, 0.06, 0.8, 0.06, 0.04], (1, 3)),
        ([0.05, 0.9, 0.05], (1, 1)),
        ([0.06, 0.88, 0.06], (0, 1)),  # both sides are alike, and one is enough
        ([0.02, 0.1, 0.8, 0.08], (1, 2)),
        ([0.3, 0.0, 0.3, 0.4], (0, 3)),
        ([1.0], (0, 0)),
    ],
)
def test_intervals_are_the_shortest_that_hold_nine_tenths(probabilities, interval):
    assert count_interval(probabilities) == interval


def test_the_coverage_of_exact_posteriors_is_as_expected():
    generator = torch.Generator().manual_seed(0)
    posteriors = torch.rand(4000, 12, generator=generator).double().pow(3)
    posteriors = posteriors / posteriors.sum(1, keepdim=True)
    numbers = torch.multinomial(posteriors, 1, generator=generator)[:, 0]
    coverage = interval_coverage(list(posteriors), numbers)
    assert 0.9 < coverage.expected < 0.97
    assert abs(coverage.covered - coverage.expected) < 0.015  # three standard errors
    sharp = posteriors**4 / (posteriors**4).sum(1, keepdim=True)
    too_sure = interval_coverage(list(sharp), numbers)
    assert too_sure.covered < too_sure.expected - 0.1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: match_centers(MARKS[0], MARKS, 3), r"centers must be .*not \(2,\)"),
        (lambda: match_centers(MARKS, MARKS, 0), "distance must be a positive number.*not 0"),
        (lambda: match_centers(MARKS, MARKS, [1.0, 2.0]), "one of each of the 3 marks"),
        (lambda: circle_overlaps(torch.zeros(4, 4), MARKS, torch.zeros(3)), "radii must be pos"),
        (lambda: count_interval([0.5, 0.5], 90), "between 0 and 1, such as 0.9, not 90"),
        (lambda: count_interval([0.5, 0.2]), "which sum to 1"),
        (lambda: interval_coverage([], []), "at least 1, not 0 and 0"),
    ],
)
def test_wrong_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
