"""Distances of votes and responsibilities are compared with the votes written out."""

from itertools import product

import pytest
import torch

from capsule_zoo.guides import EMRouting
from capsule_zoo.inference.evaluation.vote_history import vote_history
from capsule_zoo.models import MatrixCapsules


@pytest.fixture
def recording():
    model = MatrixCapsules((1, 17, 17), 4, routing=EMRouting(3), features=4, capsules=(2, 2, 3))
    images = torch.rand(5, 1, 17, 17)
    return model, images, vote_history(model, images, batch_size=2)


def test_every_childs_presence_is_shared_among_the_classes(recording):
    model, images, history = recording
    presence = model.capsules(images)[-2].presence.flatten(1)
    for weight in history.weight:
        torch.testing.assert_close(weight.sum(1), presence)
    assert torch.equal(history.wins.int().argmax(1), model.predict(images))
    assert (history.wins.sum(1) == 1).all()


def test_distances_are_those_of_the_votes(recording):
    model, images, history = recording
    votes, _ = model.class_votes(images)
    cast = votes.values.unflatten(0, votes.shape)[:, 0]
    mean = votes.gather(votes.uniform()).mean[:, 0]  # after the first iteration
    distance = (cast - mean[..., None]).norm(dim=2)
    torch.testing.assert_close(history.distance[0], distance, rtol=1e-3, atol=1e-3)


def test_means_are_weighted_by_assignment(recording):
    _, _, history = recording
    near, fraction = history.mean_distance(history.wins), history.winner_fraction()
    for t, n in product(range(3), range(5)):
        weight = history.weight[t, n]
        (winner,) = history.wins[n].nonzero().flatten().tolist()
        mean = (weight[winner] * history.distance[t, n, winner]).sum() / weight[winner].sum()
        assert near[t, n].item() == pytest.approx(mean.item(), rel=1e-5)
        assert fraction[t, n].item() == pytest.approx((weight[winner].sum() / weight.sum()).item())
