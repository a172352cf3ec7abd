"""A rate of serving is images over the processor time of a call, for every verb and weights."""

import pytest


@pytest.fixture
def serving(load_benchmark):
    return load_benchmark("serving")


@pytest.mark.parametrize("weights", ["part-whole-mnist", "capsule-network-mnist"])
def test_every_call_answers_its_number_of_images(serving, weights):
    for verb in serving.VERBS[weights]:
        answers: list = []

        def spy(*arguments, verb=verb, answers=answers):
            answers.append(verb(*arguments))

        assert serving.make_timer(spy, weights, 2)() > 0
        outputs = answers[0].values() if isinstance(answers[0], dict) else answers
        assert [len(values) for values in outputs] == [2] * len(outputs)


def test_a_rate_is_images_a_second(serving, monkeypatch):
    monkeypatch.setattr(
        serving, "make_timer", lambda verb, weights, number: lambda: 0.25 * number**0.5
    )
    rates = serving.measure(2)
    assert rates.keys() == serving.CALLS.keys()
    assert {value for value, _, _ in rates["one_a_call"].values()} == {4.0}
    assert {value for value, _, _ in rates["64_a_call"].values()} == {32.0}
    assert set(rates["64_a_call"]) == set(rates["one_a_call"]) >= {"matrix_capsules_classify"}
