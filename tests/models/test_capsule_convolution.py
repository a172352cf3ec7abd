"""Capsule layers are compared with a loop over children and parents, for all settings."""

import math

import pytest
import torch

from capsule_zoo.guides import DynamicRouting, EMRouting, VBRouting
from capsule_zoo.models.common import chunks
from capsule_zoo.models.routing import capsule_convolution
from capsule_zoo.models.routing.capsule_convolution import (
    CapsuleGrid,
    CapsuleLayer,
    ClassCapsules,
    PrimaryCapsules,
)
from capsule_zoo.models.routing.votes import Windows

B, TYPES, PARENTS, GRID = 3, 2, 2, (3, 4)


@pytest.fixture
def grid():
    cells = GRID[0] * GRID[1]
    pose = torch.randn(B, cells, TYPES, 4, 4, dtype=torch.float64)
    return CapsuleGrid(pose, torch.randn(B, cells, TYPES, dtype=torch.float64), GRID)


def conv(routing=None, **options):
    routing = EMRouting(3) if routing is None else routing
    return CapsuleLayer(Windows.sliding(*GRID, 2, 1), TYPES, PARENTS, routing, **options).double()


def classes(routing=None, **options):
    routing = EMRouting(3) if routing is None else routing
    return ClassCapsules(TYPES, PARENTS, GRID, routing, **options).double()


def with_costs(layer):
    """Return the layer with costs that differ from parent to parent."""
    for beta in (layer.beta_a, layer.beta_u):
        torch.nn.init.normal_(beta)
    return layer


def em_by_hand(layer, grid, votes, seen_by):
    """Run the paper's procedure 1 with loops; votes[p][j] is (children, 16), the children seen.

    Args:
        seen_by: for each position the (cell, type) of its children.
    """
    presence = grid.presence[0]
    votes_per_parent = len(set().union(*seen_by)) / (len(seen_by) * PARENTS)
    weight = {
        (p, j): torch.tensor([1.0 / (PARENTS * sum(c in s for s in seen_by)) for c in window])
        for p, window in enumerate(seen_by)
        for j in range(PARENTS)
    }
    for t in range(3):
        claim = {}
        for p, window in enumerate(seen_by):
            activation = torch.stack([presence[cell, b] for cell, b in window])
            for j in range(PARENTS):
                r = (weight[p, j] * activation)[:, None]
                mean = (r * votes[p][j]).sum(0) / r.sum()
                sigma2 = (r * (votes[p][j] - mean).square()).sum(0) / r.sum() + layer.noise
                cost = (layer.beta_u[j] + 0.5 * sigma2.log()).mean() * r.sum() / votes_per_parent
                cold = layer.inverse_temperature * (1 - 0.95 ** (t + 1))
                presence_j = torch.sigmoid(cold * (layer.beta_a[j] - cost))
                square = (votes[p][j] - mean).square() + layer.noise
                density = -0.5 * (square / sigma2 + (2 * math.pi * sigma2).log()).sum(1)
                claim[p, j] = presence_j * density.exp(), mean, presence_j
        for p, window in enumerate(seen_by):
            for n, child in enumerate(window):
                total = sum(
                    claim[q, j][0][other.index(child)]
                    for q, other in enumerate(seen_by)
                    for j in range(PARENTS)
                    if child in other
                )
                for j in range(PARENTS):
                    weight[p, j][n] = claim[p, j][0][n] / total
    pose = torch.stack(
        [torch.stack([claim[p, j][1] for j in range(PARENTS)]) for p in range(len(seen_by))]
    )
    present = torch.stack(
        [torch.stack([claim[p, j][2] for j in range(PARENTS)]) for p in range(len(seen_by))]
    )
    return pose.unflatten(2, (4, 4)), present


def check_by_hand(layer, grid, places, offset):
    """Check poses and presences of the first image; places[p] lists (cell, place in the window)."""
    weight = layer.transform.detach()
    votes, seen_by = [], []
    for window in places:
        children = [(cell, k, b) for cell, k in window for b in range(TYPES)]
        seen_by.append([(cell, b) for cell, _, b in children])
        votes.append(
            [
                torch.stack(
                    [
                        (grid.pose[0, c, b] @ weight[k, b, j] + offset(c)).flatten()
                        for c, k, b in children
                    ]
                )
                for j in range(PARENTS)
            ]
        )
    with torch.no_grad():
        pose, presence = em_by_hand(layer, grid, votes, seen_by)
        output = layer(grid)
    torch.testing.assert_close(output.pose[0], pose)
    torch.testing.assert_close(output.presence[0], presence)


def test_convolution_is_the_papers_procedure_over_windows(grid):
    layer = with_costs(conv())
    assert layer.shape == (2, 3)
    places = [
        [((y + dy) * GRID[1] + x + dx, dy * 2 + dx) for dy in range(2) for dx in range(2)]
        for y in range(2)
        for x in range(3)
    ]
    check_by_hand(layer, grid, places, lambda cell: torch.zeros(4, 4))


@pytest.mark.parametrize("elements", [((0, 3), (1, 3)), ((3, 0), (2, 1))])
def test_classes_add_the_coordinates_of_a_cell_to_two_elements(grid, elements):
    """The default is the paper's: the first two elements of the right-hand column."""
    options = {} if elements[0] == (0, 3) else {"coordinates": elements}
    layer = with_costs(classes(spread=0.3, **options))
    assert layer.shape == (1, 1)

    def offset(cell):
        added = torch.zeros(4, 4, dtype=torch.float64)
        added[elements[0]] = (cell // GRID[1] + 0.5) / GRID[0]
        added[elements[1]] = (cell % GRID[1] + 0.5) / GRID[1]
        return added

    check_by_hand(layer, grid, [[(cell, 0) for cell in range(12)]], offset)


def test_without_coordinates_classes_do_not_see_places(grid):
    order = torch.randperm(12)
    moved = CapsuleGrid(grid.pose[:, order], grid.logits[:, order], GRID)
    blind, seeing = classes(coordinates=None, spread=0.3), classes(spread=0.3)
    torch.testing.assert_close(blind(moved).pose, blind(grid).pose)
    assert (seeing(moved).pose - seeing(grid).pose).abs().max() > 1e-3


@pytest.mark.parametrize("routing", [EMRouting(3), VBRouting(2), DynamicRouting(3)], ids=repr)
def test_chunks_of_a_batch_recomputed_or_not_are_the_whole(grid, routing, monkeypatch):
    results = []
    many = 2**21
    for at_once, recompute, in_cache in [
        (many, False, many),
        (many, False, 1),
        (many, False, 5 * 6 * 32),
        (1, False, many),
        (1, True, many),
        (2 * 6 * 8 * 32, True, 1),
    ]:
        monkeypatch.setattr(chunks, "AT_ONCE", at_once)
        monkeypatch.setattr(capsule_convolution, "_IN_CACHE", in_cache)
        torch.manual_seed(0)
        layer = conv(routing, recompute=recompute)
        inputs = [x.clone().requires_grad_() for x in grid[:2]]
        parents = layer(CapsuleGrid(*inputs, GRID))
        (parents.pose.sin().sum() + parents.presence.sum()).backward()
        results.append([*parents[:2], *(x.grad for x in (*inputs, layer.transform))])
    for other in results[1:]:
        torch.testing.assert_close(results[0], other)


def test_layers_turn_with_their_children(grid):
    """Poses multiplied from the left move all votes alike: M W -> (T M) W, so parents turn too."""
    rotation = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64))[0]
    routing = DynamicRouting(3)  # agreement and length are the same in every frame
    layer = conv(routing)
    still, rotated = layer(grid), layer(grid._replace(pose=rotation @ grid.pose))
    torch.testing.assert_close(rotated.pose, rotation @ still.pose)
    torch.testing.assert_close(rotated.logits, still.logits)


def test_primary_capsules_read_each_cell_alone():
    layer = PrimaryCapsules(5, TYPES).double()
    features = torch.randn(2, 5, 3, 4, dtype=torch.float64)
    capsules = layer(features)
    assert capsules.pose.shape == (2, 12, TYPES, 4, 4) and capsules.presence.shape == (2, 12, TYPES)
    cell = layer(features[:, :, 1:2, 2:3])
    torch.testing.assert_close(capsules.pose[:, 6], cell.pose[:, 0])
    torch.testing.assert_close(capsules.presence[:, 6], cell.presence[:, 0])
