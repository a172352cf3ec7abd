"""What is handed over is found again only where nothing that it rests on has changed."""

import copy
import pickle

import pytest
import torch
from torch import nn

from capsule_zoo.models.blocks.handover import Handover


@pytest.fixture
def tensors():
    return [nn.Parameter(torch.ones(2)), torch.zeros(3)]


def left(tensors) -> Handover:
    handover = Handover()
    handover.leave("drawing", tensors)
    return handover


def test_it_is_taken_once(tensors):
    handover = left(tensors)
    assert handover.take(tensors) == "drawing"
    assert handover.take(tensors) is None


def test_the_last_one_left_counts(tensors):
    handover = left(tensors)
    handover.leave("another", tensors)
    assert handover.take(tensors) == "another"


def test_equal_tensors_are_others(tensors):
    assert left(tensors).take([tensors[0], tensors[1].clone()]) is None
    assert left(tensors).take(tensors[:1]) is None
    assert left(tensors).take([*tensors, torch.zeros(1)]) is None


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.SGD])
def test_an_update_in_between_is_seen(tensors, optimizer, fused):
    handover = left(tensors)
    tensors[0].square().sum().backward()
    optimizer(tensors[:1], lr=0.1, fused=fused).step()
    assert handover.take(tensors) is None


def test_weights_read_in_between_are_seen(tensors):
    layer = nn.Linear(2, 2)
    handover = left(list(layer.parameters()))
    layer.load_state_dict(nn.Linear(2, 2).state_dict())
    assert handover.take(list(layer.parameters())) is None


def test_without_a_graph_it_is_of_no_use_to_gradients(tensors):
    with torch.no_grad():
        handover = left(tensors)
    assert handover.take(tensors) is None
    with torch.no_grad():
        assert left(tensors).take(tensors) == "drawing"


def test_what_was_computed_under_autocast_is_of_no_use_without(tensors):
    with torch.autocast("cpu", torch.bfloat16):
        handover = left(tensors)
        assert left(tensors).take(tensors) == "drawing"
    assert handover.take(tensors) is None


def test_an_expanded_view_is_another_tensor(tensors):
    assert left(tensors).take([tensors[0].expand(1, -1), tensors[1]]) is None
    assert left(tensors).take([tensors[0], tensors[1].expand_as(tensors[1])]) is None


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_hold_nothing(tensors, copied):
    product = tensors[0] * 2  # no leaf of a graph: could be neither copied nor stored
    handover = Handover()
    handover.leave(product, [product])
    assert copied(handover).take([product]) is None
    assert handover.take([product]) is product
