"""The code is the pose of one class; the network that it comes from may be held still."""

import pytest
import torch

from capsule_zoo.data import Split
from capsule_zoo.guides import EMRouting
from capsule_zoo.guides.label import ClassPose
from capsule_zoo.inference import Checks, Inputs, check_pair, fit
from capsule_zoo.models import MatrixCapsules, VariationalAutoencoder

SHAPE = (1, 17, 17)


@pytest.fixture
def pair():
    classifier = MatrixCapsules(SHAPE, 3, routing=EMRouting(2), features=3, capsules=(2, 2, 2))
    model = VariationalAutoencoder(SHAPE, 48, channels=2)
    return model, ClassPose(model, classifier)


def test_the_code_is_the_pose_of_the_label_or_of_the_likeliest(pair):
    model, guide = pair
    images, labels = torch.rand(4, *SHAPE), torch.tensor([2, 0, 1, 1])
    check_pair(model, guide, images)
    pose = guide.classifier.capsules(images)[-1].pose[:, 0].flatten(2)  # (B, classes, 16)
    for argument, used in ((labels, labels), (None, guide.classifier.predict(images))):
        code = guide(images, argument).unflatten(1, (3, 16))
        for n, label in enumerate(used.tolist()):
            torch.testing.assert_close(code[n, label], pose[n, label])
            assert code[n].norm().item() == pytest.approx(pose[n, label].norm().item())


def test_standardized_codes_have_mean_zero_and_variance_one_in_every_class(pair):
    guide = pair[1]
    images, labels = torch.rand(30, *SHAPE), torch.arange(30) % 2  # no image of the third class
    plain = guide(images, torch.full_like(labels, 2))
    guide.standardize(images, labels)
    codes = guide(images, labels).unflatten(1, (3, 16))
    for label in (0, 1):
        class_codes = codes[labels == label, label]
        torch.testing.assert_close(class_codes.mean(0), torch.ones(16), atol=1e-3, rtol=0)
        torch.testing.assert_close(class_codes.std(0), torch.ones(16), atol=1e-3, rtol=0)
    torch.testing.assert_close(guide(images, torch.full_like(labels, 2)), plain)
    for dtype in (torch.int32, torch.uint8):
        guide.standardize(images, labels.to(dtype))
        torch.testing.assert_close(guide(images, labels.to(dtype)).unflatten(1, (3, 16)), codes)


def test_the_decoder_learns_while_the_network_stays(pair):
    model, guide = pair
    split = Split(torch.rand(8, *SHAPE), torch.arange(8) % 3)
    parameters = dict(guide.classifier.named_parameters())
    before = {name: p.detach().clone() for name, p in parameters.items()}
    painted = model.decoder.paint.weight.detach().clone()
    fit(model, guide, split, steps=2, inputs=Inputs(labels=True), checks=Checks(progress=False))
    assert all(torch.equal(p, before[name]) for name, p in parameters.items())
    assert not torch.equal(model.decoder.paint.weight, painted)
