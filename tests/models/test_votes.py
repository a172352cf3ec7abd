"""Votes: their two passes and the competition for children, by brute force and by gradcheck."""

import pytest
import torch
from torch.autograd import gradcheck

from capsule_zoo.models.routing.votes import Votes, Windows, compete

GRIDS = [(4, 5, 3, 1), (5, 5, 3, 2), (6, 4, 2, 2), (3, 3, 3, 1)]  # height, width, kernel, stride
TYPES, PARENTS = 2, 3


def rand(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def pairs(windows):
    """Return (position, place in the window, cell) of every pair that is seen."""
    return [
        (p, k, cell) for p, row in enumerate(windows.cells.tolist()) for k, cell in enumerate(row)
    ]


@pytest.mark.parametrize("grid", GRIDS)
def test_windows_see_what_a_convolution_sees(grid):
    height, width, kernel, stride = grid
    windows = Windows.sliding(*grid)
    image = rand(2, 3, height, width)
    weight = rand(4, 3, kernel, kernel)
    patches = windows.see(image.flatten(2).mT)  # (2, positions, window, 3)
    output = torch.einsum("npkc,ock->nop", patches, weight.flatten(2))
    expected = torch.nn.functional.conv2d(image, weight, stride=stride)
    torch.testing.assert_close(output.unflatten(2, windows.shape), expected)


@pytest.mark.parametrize("grid", GRIDS)
def test_a_child_chooses_one_among_all_its_parents_positions_included(grid):
    """A softmax over types at one position only would count a child once for each window."""
    windows = Windows.sliding(*grid)
    positions, window = windows.cells.shape
    logits = 3 * rand(2, positions, PARENTS, window * TYPES)
    responsibility = compete(logits, windows).unflatten(3, (window, TYPES))
    total = torch.zeros(2, grid[0] * grid[1], TYPES, dtype=torch.float64)
    expected = torch.zeros_like(total)
    for p, k, cell in pairs(windows):
        total[:, cell] += responsibility[:, p, :, k].sum(1)
        expected[:, cell] = 1  # of every cell that is seen at all
    torch.testing.assert_close(total, expected)


def test_shares_are_the_softmax_of_the_logits():
    windows = Windows.sliding(4, 4, 3, 1)
    logits = rand(1, 4, PARENTS, 9 * TYPES)
    responsibility = compete(logits, windows)
    by_cell = {}
    for p, k, cell in pairs(windows):
        by_cell.setdefault(cell, []).append((p, k))
    for entries in by_cell.values():
        for b in range(TYPES):
            mine = torch.stack([logits[0, p, :, k * TYPES + b] for p, k in entries])
            fractions = torch.stack([responsibility[0, p, :, k * TYPES + b] for p, k in entries])
            torch.testing.assert_close(fractions, mine.flatten().softmax(0).view_as(mine))


def test_extreme_logits_give_neither_nan_nor_lost_children():
    windows = Windows.sliding(3, 3, 2, 1)
    logits = 1e4 * rand(1, 4, PARENTS, 4)
    responsibility = compete(logits.requires_grad_(), windows)
    responsibility.square().sum().backward()
    assert responsibility.isfinite().all() and logits.grad.isfinite().all()


def test_competition_has_the_gradient_of_its_values():
    windows = Windows.sliding(4, 3, 2, 1)
    logits = rand(2, 6, PARENTS, 4 * TYPES).requires_grad_()
    assert gradcheck(lambda x: compete(x, windows), logits)


def test_equal_logits_are_uniform_shares():
    windows = Windows.sliding(5, 5, 3, 2)
    values = rand(1, 4, PARENTS, 6, 9 * TYPES)
    votes = Votes(values, torch.ones(1, 4, 9 * TYPES).double(), windows)
    expected = compete(torch.zeros(1, 4, PARENTS, 9 * TYPES).double(), windows)
    torch.testing.assert_close(votes.uniform(), expected)


def test_gathered_votes_are_weighted_means_and_variances():
    values, presence = rand(2, 5, PARENTS, 4) + 100, torch.rand(2, 5, dtype=torch.float64)
    responsibility = torch.rand(2, 1, PARENTS, 5, dtype=torch.float64)
    gathered = Votes.dense(values, presence).gather(responsibility)
    weight = presence[:, :, None] * responsibility[:, 0].mT  # (2, 5, parents)
    count = weight.sum(1)
    mean = torch.einsum("bij,bijd->bjd", weight, values) / count[..., None]
    apart = (values - mean[:, None]).square()
    variance = torch.einsum("bij,bijd->bjd", weight, apart) / count[..., None]
    torch.testing.assert_close(gathered.number[:, 0, :, 0], count)
    torch.testing.assert_close(gathered.mean[:, 0], mean)
    torch.testing.assert_close(gathered.variance[:, 0], variance)
    totals = Votes.dense(values, presence).gather_sum(responsibility)
    torch.testing.assert_close(totals, gathered.number * gathered.mean)


def test_squares_lose_no_digits_far_from_the_origin():
    values = rand(1, 50, 1, 4)
    responsibility = torch.ones(1, 1, 1, 50)
    near = Votes.dense(values).gather(responsibility.double()).variance
    far = Votes.dense((values + 1e3).float()).gather(responsibility).variance
    torch.testing.assert_close(far.double(), near, rtol=1e-3, atol=1e-4)


def test_scores_are_distances_and_agreements():
    values = rand(2, 5, PARENTS, 4)
    mean, vector = rand(2, 1, PARENTS, 4), rand(2, 1, PARENTS, 4)
    precision = rand(2, 1, PARENTS, 4).exp()
    votes = Votes.dense(values)
    distance = (precision * (values - mean).square()).sum(3).mT[:, None]
    torch.testing.assert_close(votes.distance(mean, precision), distance)
    torch.testing.assert_close(votes.agreement(vector), (values * vector).sum(3).mT[:, None])


def without_squares(values, presence, vector):
    """Use the votes alone and then with their squares, as one number for each image."""
    votes = Votes.dense(values, presence)
    total = votes.gather_sum(votes.compete(votes.agreement(vector)))
    gathered = votes.gather(votes.compete(votes.agreement(total)))
    return (total.sin() + gathered.mean.cos() + gathered.variance).sum((1, 2, 3))


def through_both_passes(values, presence, mean):
    """Use votes in all ways that a routing can, twice, as one number for each image."""
    votes = Votes.dense(values, presence)
    responsibility = votes.compete(-votes.distance(mean, mean.exp()))
    gathered = votes.gather(responsibility)
    responsibility = votes.compete(
        votes.agreement(gathered.mean) - gathered.variance.sum(3, keepdim=True)
    )
    again = votes.gather(responsibility)
    return (again.mean.sin() + again.variance * again.number).sum((1, 2, 3))


@pytest.mark.parametrize("function", [through_both_passes, without_squares])
def test_votes_settled_at_the_end_have_the_gradient_of_their_values(function):
    inputs = rand(2, 3, 2, 2), torch.rand(2, 3, dtype=torch.float64), rand(2, 1, 2, 2)
    assert gradcheck(function, [x.requires_grad_() for x in inputs])


def test_a_sweep_that_stops_before_the_votes_leaves_nothing_to_the_next():
    """Gradients are taken for presences alone, then for all: the ledger must not count twice."""
    inputs = [
        x.requires_grad_() for x in (rand(1, 3, 2, 2), torch.rand(1, 3).double(), rand(1, 1, 2, 2))
    ]
    output = through_both_passes(*inputs).sum()
    torch.autograd.grad(output, inputs[1:], retain_graph=True)
    after = torch.autograd.grad(output, inputs, retain_graph=True)
    again = torch.autograd.grad(output, inputs)
    fresh = torch.autograd.grad(through_both_passes(*inputs).sum(), inputs)
    torch.testing.assert_close(after, fresh)
    torch.testing.assert_close(again, fresh)


def test_a_fair_share_is_what_parents_get_when_all_is_shared_equally():
    for windows in (Windows.sliding(5, 6, 3, 2), Windows.sliding(4, 4, 3, 1), Windows.whole(7)):
        positions, window = windows.cells.shape
        votes = Votes(torch.rand(1, positions, 3, 2, 4 * window), torch.ones(1, 1), windows)
        assert votes.votes_per_parent == pytest.approx(votes.uniform().sum(3).mean().item())
