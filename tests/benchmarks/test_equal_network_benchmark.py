"""Capsules and equal networks classify the same images, and times are per image."""

import numpy as np
import pytest


@pytest.fixture
def equal(load_benchmark):
    return load_benchmark("equal_network")


def test_times_are_of_an_image_and_ratios_to_the_equal_network(equal, monkeypatch):
    monkeypatch.setattr(equal, "entries", lambda: {"a": None, "a_equal": None})
    monkeypatch.setattr(equal, "make_timer", lambda entry, number: None)
    taken = {"a": 4.0, "a_equal": 0.5}
    monkeypatch.setattr(
        equal,
        "interleave",
        lambda calls, rounds: {call: np.full(rounds, taken[call.split()[1]]) for call in calls},
    )
    times = equal.measure(3)
    assert times["128_a_call"]["a"][0] == pytest.approx(1000 * 4 / 128)
    assert times["one_a_call"]["a_equal"][0] == pytest.approx(500)
    assert times["times_equal_one_a_call"] == {"a": (8.0, 0.0, 3)}
