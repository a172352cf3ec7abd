"""Error rates and the attack, on a classifier whose gradient is known."""

import pytest
import torch

from capsule_zoo.data import Split
from capsule_zoo.guides import ExactLabel
from capsule_zoo.inference.evaluation.classification import Fraction, classify, error_rate, fgsm
from capsule_zoo.models import ConvolutionalClassifier
from capsule_zoo.models.networks.classifier import Classifier


class Weighing(Classifier):
    """A classifier of two classes: the second score is a weighted sum of the pixels."""

    def __init__(self):
        super().__init__((1, 2, 2), 2)
        weight = torch.tensor([[1.0, -2.0], [0.5, -0.1]])
        self.weight = torch.nn.Parameter(weight)

    def scores(self, images):
        total = (images[:, 0] * self.weight).sum((1, 2))
        return torch.stack([torch.zeros_like(total), total], 1)


@pytest.fixture
def split():
    return Split(torch.rand(7, 1, 2, 2), torch.tensor([0, 1, 0, 1, 1, 0, 0]))


def test_the_error_rate_counts_wrong_answers(split):
    model = Weighing()
    guide = ExactLabel(model)
    result = classify(model, guide, split.images, batch_size=3)
    assert torch.equal(result, model.predict(split.images))
    wrong = (model.scores(split.images).argmax(1) != split.labels).double().mean().item()
    result = error_rate(model, guide, split)
    assert result.value == pytest.approx(wrong) and result.n == 7
    assert result.se == pytest.approx((wrong * (1 - wrong) / 7) ** 0.5)


@pytest.mark.parametrize("answer", [True, False])
def test_answers_that_all_agree_have_an_error_too(answer):
    """By Laplace's rule the next of ten equal answers differs with a probability of 1/12."""
    fraction = Fraction.of(torch.full((10,), answer))
    assert fraction.value == answer and fraction.n == 10
    assert fraction.se == pytest.approx((11 / 144 / 10) ** 0.5)


def test_the_attack_moves_every_pixel_against_its_weight(split):
    model = Weighing()
    moved = fgsm(model, split, 0.1, batch_size=3)
    towards = torch.where(split.labels == 1, -1.0, 1.0)[:, None, None, None]
    expected = (split.images + 0.1 * towards * model.weight.sign()).clamp(0, 1)
    torch.testing.assert_close(moved.images, expected)
    assert torch.equal(moved.labels, split.labels)
    assert torch.equal(fgsm(model, split, 0.0).images, split.images)
    with torch.no_grad():
        assert torch.equal(fgsm(model, split, 0.1).images, moved.images)
    whole = Split(split.images, split.labels.int())
    assert torch.equal(fgsm(model, whole, 0.1).images, moved.images)


class Bent(Classifier):
    """A classifier whose second score first falls and then rises with its only pixel."""

    def __init__(self):
        super().__init__((1, 1, 1), 2)

    def scores(self, images):
        rise = (images.flatten(1) - 0.45).square()
        return torch.cat([torch.zeros_like(rise), rise], 1)


def test_several_steps_follow_the_gradient_where_they_are():
    """One long step overshoots the lowest score of the label, several short ones stop near it."""
    model, split = Bent(), Split(torch.full((1, 1, 1, 1), 0.6), torch.tensor([1]))
    assert fgsm(model, split, 0.4).images.item() == pytest.approx(0.2)
    near = fgsm(model, split, 0.4, steps=40).images.item()
    assert near == pytest.approx(0.45, abs=0.02)
    far = fgsm(model, split, 0.1, steps=40).images.item()  # no further than epsilon
    assert far == pytest.approx(0.5)


def test_both_look_at_the_model_as_it_is_used_and_leave_it_as_it_was():
    """In training mode the convolutional network drops half of its units."""
    model = ConvolutionalClassifier((1, 8, 8), 3)
    guide = ExactLabel(model)
    split = Split(torch.rand(40, 1, 8, 8), torch.arange(40) % 3)
    assert torch.equal(*(fgsm(model, split, 0.1).images for _ in range(2)))
    assert error_rate(model, guide, split) == error_rate(model, guide, split)
    assert model.training and all(p.grad is None for p in model.parameters())
