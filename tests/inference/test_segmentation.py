"""Measures of segmentations, by hand."""

import math

import pytest
import torch

from capsule_zoo.inference.segmentation import (
    adjusted_rand_index,
    relabel,
    segmentation_accuracy,
    variation_of_information,
)

TRUE = torch.tensor([[0, 0, 1, 1, 2, 2, -1]])
HERE = torch.ones_like(TRUE, dtype=torch.bool)


def test_objects_of_one_kind_may_be_exchanged_and_others_not():
    swapped = torch.tensor([[2, 2, 1, 1, 0, 0, -1]])
    assert segmentation_accuracy(swapped, TRUE, HERE, [0, 1, 0]).tolist() == [1.0]
    expected = pytest.approx(3 / 7)
    assert segmentation_accuracy(swapped, TRUE, HERE, [0, 1, 2]).item() == expected
    rotated = torch.tensor([[1, 1, 2, 2, 0, 0, -1]])
    assert segmentation_accuracy(rotated, TRUE, HERE).tolist() == [1.0]
    assert segmentation_accuracy(rotated, TRUE, HERE, [0, 1, 0]).item() == expected


def test_an_object_that_is_called_clutter_is_wrong_and_so_is_clutter_that_is_not():
    prediction = torch.tensor([[-1, 0, 1, 1, 2, 2, -1]])
    assert segmentation_accuracy(prediction, TRUE, HERE, [0, 1, 0]).item() == pytest.approx(6 / 7)
    assert segmentation_accuracy(TRUE, prediction, HERE, [0, 1, 0]).item() == pytest.approx(6 / 7)


def test_relabeling_exchanges_objects_of_one_kind_only():
    swapped = torch.tensor([[2, 2, 1, 1, 0, 0, -1]])
    assert torch.equal(relabel(swapped, TRUE, [0, 1, 0]), TRUE)
    assert torch.equal(relabel(swapped, TRUE, [0, 1, 2]), swapped)


def test_one_wrong_point_costs_its_share_of_the_points_present():
    prediction = torch.tensor([[0, 1, 1, 1, 2, 2, -1]])
    assert segmentation_accuracy(prediction, TRUE, HERE, [0, 1, 0]).item() == pytest.approx(6 / 7)
    here = HERE.clone()
    here[0, 1] = False
    assert segmentation_accuracy(prediction, TRUE, here, [0, 1, 0]).tolist() == [1.0]


def test_many_kinds_are_matched_as_few_are():
    """Beyond a number of exchanges the Hungarian algorithm takes over."""
    torch.manual_seed(0)
    true, prediction = torch.randint(0, 4, (2, 5, 12))
    here = torch.ones(5, 12, dtype=torch.bool)
    accuracy = segmentation_accuracy(prediction, true, here, [0] * 4)
    many = segmentation_accuracy(prediction, true, here, [0] * 9)
    torch.testing.assert_close(accuracy, many)


def test_rand_index_and_variation_of_information():
    assert adjusted_rand_index(TRUE, TRUE, HERE).tolist() == [1.0]
    assert variation_of_information(TRUE, TRUE, HERE).tolist() == [0.0]
    one, halves = torch.zeros(1, 4).long(), torch.tensor([[0, 0, 1, 1]])
    here = torch.ones(1, 4, dtype=torch.bool)
    assert adjusted_rand_index(one, halves, here).tolist() == [0.0]
    assert variation_of_information(one, halves, here).item() == pytest.approx(math.log(2))
