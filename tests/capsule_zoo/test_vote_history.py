"""Distances of votes and responsibilities are compared with the votes written out."""

import pytest
import torch

from capsule_zoo.guides import EMRouting
from capsule_zoo.models import MatrixCapsules
from capsule_zoo.zoo.matrix_capsules.vote_history import vote_history


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
