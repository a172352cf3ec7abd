"""The experiments on the capsule network of 2017 run in miniature and name what they promise."""

import pytest
import torch
from miniature import few_digits, names_in_record
from pyro import poutine

from capsule_zoo.experiments import Options
from capsule_zoo.experiments.capsule_network import classification as capsule_network
from capsule_zoo.experiments.capsule_network.classification import create_row
from capsule_zoo.experiments.study import Study
from capsule_zoo.records import read_record

QUICK = Options(minutes=1e-4, progress=False, processes=1)
ROUTINGS = ("attention", "dynamic", "em", "self", "uncertain", "uniform", "vb")


@pytest.fixture(autouse=True)
def few(monkeypatch, unpainted):
    """Use few digits for MNIST."""
    data = few_digits(60, 30, size=17)
    monkeypatch.setattr(capsule_network, "load_dataset", lambda name, root: data)
    return data


def test_the_same_weights_are_read_by_every_routing(tmp_path):
    name = "capsule-network/mnist"
    metrics, figures = names_in_record(name, QUICK, tmp_path)
    errors = {f"error_{routing}" for routing in ROUTINGS}
    assert metrics == errors | {"test_error", "validation_error", "squared_error", "parameters"}
    assert figures == {"reconstructions", "dimensions"}
    found = read_record(name, tmp_path)["metrics"]
    assert found["test_error"] == found["error_dynamic"]


def test_a_blind_network_learns_nothing_from_the_image_that_it_should_draw(few):
    """The gradient of its capsules is the same whichever image is observed."""
    labels = few.train.labels[:8]
    pose = torch.randn(8, 10, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
    slopes = {}
    for draws in (False, True):
        row = "three_drawing" if draws else "three_blind"
        model = create_row(row, few.image_shape).model
        for image in (few.train.images[:8], few.train.images[8:16]):
            conditioned = poutine.condition(model, {"class_pose": pose})
            loss = -poutine.trace(conditioned).get_trace(image, labels).log_prob_sum()
            (slope,) = torch.autograd.grad(loss, pose)
            slopes.setdefault(draws, []).append(slope)
    change = {draws: (a - b).norm() / a.norm() for draws, (a, b) in slopes.items()}
    assert change[False] < 1e-6 < 1e-5 < change[True]


def test_outcomes_depend_on_the_seed_of_the_run_only(few):
    (job,) = Study({"three_drawing": (20, 1)}, seeds=1).jobs(QUICK)
    assert capsule_network.learn(job) == capsule_network.learn(job)
