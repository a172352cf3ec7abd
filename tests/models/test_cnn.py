"""The baseline of matrix capsules."""

import pytest
import torch
from pyro import poutine

from capsule_zoo.models import ConvolutionalClassifier
from capsule_zoo.registry import create


def test_it_has_the_papers_size():
    model = ConvolutionalClassifier((2, 32, 32), 5)
    assert 4.2e6 < model.num_parameters < 4.3e6


def test_scores_do_not_depend_on_brightness_and_contrast():
    model = ConvolutionalClassifier((1, 9, 10), 3, channels=(4, 4), hidden=16).double().eval()
    images = torch.rand(2, 1, 9, 10, dtype=torch.float64)
    logits = model.scores(0.3 * images + 0.2)
    torch.testing.assert_close(logits, model.scores(images), rtol=1e-3, atol=1e-4)


def test_units_are_dropped_in_training_only():
    model, images = ConvolutionalClassifier((1, 8, 8), 3), torch.rand(2, 1, 8, 8)
    assert not torch.equal(model.scores(images), model.scores(images))
    model.eval()
    assert torch.equal(model.scores(images), model.scores(images))


@pytest.mark.parametrize("like", ["capsule-network", "recurrent-capsules"])
def test_pairs_have_one_bernoulli_for_each_class(like):
    torch.manual_seed(0)
    of_pairs = dict(preset=like, capsules={"preset": "overlapping"})
    model = create("cnn", image_shape=(1, 17, 17), classes=3, **of_pairs).model.double().eval()
    images, labels = torch.rand(3, 1, 17, 17, dtype=torch.float64), torch.tensor([0, 2, 2])
    trace = poutine.trace(model).get_trace(images, labels)
    trace.compute_log_prob()
    probability = model.scores(torch.maximum(images, images[[2, 0, 1]])).sigmoid()
    presence = torch.tensor([[1.0, 0, 1], [1, 0, 1], [0, 0, 1]], dtype=torch.float64)
    expected = (presence * probability + (1 - presence) * (1 - probability)).log().sum(-1)
    torch.testing.assert_close(trace.nodes["label"]["log_prob"], expected)
