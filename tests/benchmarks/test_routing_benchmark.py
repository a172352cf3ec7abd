"""The routing benchmark times two programs that compute the same, and each of them runs."""

import pytest


@pytest.fixture
def routing(load_benchmark, monkeypatch):
    routing = load_benchmark("routing")
    monkeypatch.setattr(routing, "keep_memory", lambda: True)  # of the whole process
    monkeypatch.setattr(routing, "BATCH", {"small": 1, "full": 1})
    tiny = dict(features=4, capsules=(2, 3, 2))
    monkeypatch.setattr(routing, "PRESETS", {"small": tiny, "full": tiny})
    return routing


def test_ours_is_the_textbook_to_the_last_digits_and_all_contestants_run(routing):
    routing.check()
    contestants = routing.make()
    assert {"small", "textbook", "full"} <= contestants.keys()
    contestants["small"]()
    contestants["textbook"]()
