"""Every contestant of the RBM benchmark runs, ours with the textbook's gradient, and learns."""

import pytest
import torch


@pytest.fixture
def rbm(load_benchmark):
    return load_benchmark("rbm")


def test_ours_has_the_textbooks_gradient_and_all_contestants_run(rbm):
    rbm.check()
    contestants = rbm.make()
    assert {"zoo", "zoo_capsules", "scikit_learn", "floor"} <= contestants.keys()
    for update in contestants.values():
        update()


def test_an_update_moves_every_parameter(rbm):
    model = rbm.CapsuleRBM(rbm.VISIBLE, 4, 2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    rbm.zoo(model)()
    assert not any(torch.equal(p, before[name]) for name, p in model.named_parameters())
