"""A value is shared inside the context only, and only for the tensors it was computed from."""

import threading

import pytest
import torch
from torch import nn

from capsule_zoo.models.common.sharing import find_value, share, sharing


@pytest.fixture
def tensors():
    return [nn.Parameter(torch.ones(2)), torch.zeros(3)]


def test_the_last_value_is_returned_once(tensors):
    with sharing():
        share("drawing", tensors)
        share("another", tensors)
        assert find_value(tensors) == "another"
        assert find_value(tensors) is None


def test_nothing_is_shared_outside_or_outlives_the_context(tensors):
    share("drawing", tensors)
    with pytest.raises(RuntimeError), sharing():
        assert find_value(tensors) is None
        share("drawing", tensors)
        raise RuntimeError
    assert find_value(tensors) is None
    with sharing():
        assert find_value(tensors) is None


def test_a_context_within_another_is_its_own(tensors):
    with sharing():
        share("outer", tensors)
        with sharing():
            assert find_value(tensors) is None
            share("inner", tensors)
        assert find_value(tensors) == "outer"


def test_another_thread_shares_nothing(tensors):
    results = []
    with sharing():
        share("drawing", tensors)
        thread = threading.Thread(target=lambda: results.append(find_value(tensors)))
        thread.start()
        thread.join()
        assert results == [None]
        assert find_value(tensors) == "drawing"


@pytest.mark.parametrize(
    "others",
    [
        lambda one, two: [one, two.clone()],
        lambda one, two: [one],
        lambda one, two: [one, two, torch.zeros(1)],
        lambda one, two: [one.expand(1, -1), two],
        lambda one, two: [one, two.expand_as(two)],
    ],
)
def test_equal_tensors_are_other_tensors(tensors, others):
    with sharing():
        share("drawing", tensors)
        assert find_value(others(*tensors)) is None


@pytest.mark.parametrize(
    "lower", [torch.no_grad, lambda: torch.autocast("cpu", torch.bfloat16)], ids=["graph", "digits"]
)
def test_a_value_without_a_graph_or_of_low_precision_is_not_shared_with_others(tensors, lower):
    with sharing():
        with lower():
            share("drawing", tensors)
        assert find_value(tensors) is None
        with lower():
            share("drawing", tensors)
            assert find_value(tensors) == "drawing"
