"""Pictures of energy models show what they claim, and leave the random state alone."""

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

from capsule_zoo import energy_figures
from capsule_zoo.registry import create, small_sizes


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


@pytest.mark.parametrize("name", ["capsule-rbm", "rbm", "capsule-helmholtz"])
def test_every_picture_of_an_entry_is_drawn(name):
    entry = create(name, **small_sizes(name))
    images = torch.rand(3, *entry.model.image_shape)
    state = torch.get_rng_state()
    for draw in entry.figures.values():
        figure = draw(entry, images)
        assert any(axis.images for axis in figure.axes)
    assert torch.equal(state, torch.get_rng_state())


def test_fields_are_one_for_each_capsule_and_samples_36():
    entry = create("capsule-rbm", **{**small_sizes("capsule-rbm"), "capsules": 12})
    fields = energy_figures.projective_fields(entry.model)
    assert sum(bool(axis.images) for axis in fields.axes) == 12
    samples = energy_figures.samples(entry.model)
    assert sum(bool(axis.images) for axis in samples.axes) == 36


def test_spectra_hold_each_class_in_a_panel_of_its_own():
    labels = np.array([0, 1, 0, 2, 1, 0])
    features = np.eye(6)
    figure = energy_figures.spectra(features, labels, "switches", each=2)
    shown = [axis.images[0].get_array() for axis in figure.axes]
    for panel, rows in zip(shown, ([0, 2], [1, 4], [3]), strict=True):
        np.testing.assert_array_equal(panel, features[rows])
