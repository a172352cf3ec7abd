"""The capsule network of 2017: its joint by hand, its mask, and its guides by other code."""

import math

import pytest
import torch
import torch.nn.functional as F
from pyro import poutine
from torch.distributions import Normal

from capsule_zoo.guides import DynamicRouting, EMRouting, RoutedCapsules
from capsule_zoo.guides.capsule_network import OverlappingRoutedCapsules, PaperPrimary, SmallPrimary
from capsule_zoo.models import CapsuleNetwork
from capsule_zoo.models.capsule_network import OverlappingCapsuleNetwork
from capsule_zoo.models.routing.vector_capsules import margin_loss, squash

SHAPE, CLASSES = (2, 17, 18), 3


@pytest.fixture
def model():
    torch.manual_seed(0)
    return CapsuleNetwork(SHAPE, CLASSES, hidden=(9, 11)).double()


@pytest.fixture
def images():
    return torch.rand(4, *SHAPE, generator=torch.Generator().manual_seed(1)).double()


def guide_to(model, routing=None, **options):
    torch.manual_seed(2)
    routing = DynamicRouting(3, fair=False) if routing is None else routing
    return RoutedCapsules(model, routing, channels=4, **options).double().eval()


def decoded(model, pose, winner):
    """The decoder on one image's capsules, with plain matrix products."""
    hidden = torch.zeros(CLASSES, 16, dtype=pose.dtype)
    length = pose[winner].norm()
    hidden[winner] = pose[winner] / length * length**2 / (1 + length**2)
    hidden = hidden.flatten()
    layers = [layer for layer in model.decoder if hasattr(layer, "weight")]
    for layer in layers[:-1]:
        hidden = (layer.weight @ hidden + layer.bias).clamp_min(0)
    return (layers[-1].weight @ hidden + layers[-1].bias).sigmoid().view(SHAPE)


@pytest.mark.parametrize("labeled", [True, False])
def test_the_log_joint_is_the_story_by_hand(model, images, labeled):
    pose = 2 * torch.randn(4, CLASSES, 16, dtype=torch.float64)
    labels = torch.tensor([0, 2, 1, 1]) if labeled else None
    conditioned = poutine.condition(model, {"class_pose": pose})
    log_joint = poutine.trace(conditioned).get_trace(images, labels).log_prob_sum()
    expected = -0.5 * (pose.square() + math.log(2 * math.pi)).sum()
    for n in range(4):
        length = squash(pose[n]).norm(dim=-1)
        winner = int(length.argmax()) if labels is None else int(labels[n])
        mean = decoded(model, pose[n], winner)
        expected = expected + Normal(mean, model.sigma_image).log_prob(images[n]).sum()
        if labels is not None:
            for j in range(CLASSES):
                miss = max(0, 0.9 - length[j]) if j == winner else max(0, length[j] - 0.1)
                half = 1 if j == winner else 0.5
                expected = expected - model.label_weight * half * miss**2
    torch.testing.assert_close(log_joint, expected, rtol=1e-10, atol=1e-10)


def test_by_default_a_squared_error_weighs_what_the_paper_says(model, images):
    """The loss over label_weight is margin loss + .0005 squared error, plus constants."""
    labels = torch.tensor([0, 2, 1, 1])

    def loss(pose):
        conditioned = poutine.condition(model, {"class_pose": pose})
        trace = poutine.trace(conditioned).get_trace(images, labels)
        prior = trace.nodes["class_pose"]["fn"].log_prob(pose).sum()
        return (prior - trace.log_prob_sum()) / model.label_weight

    def papers(pose):
        capsules = squash(pose)
        error = (model.draw(capsules, labels) - images).square().sum()
        presence = F.one_hot(labels, CLASSES)
        return margin_loss(capsules.norm(dim=-1), presence).sum() + 0.0005 * error

    one, other = (torch.randn(4, CLASSES, 16, dtype=torch.float64) for _ in range(2))
    torch.testing.assert_close(loss(one) - loss(other), papers(one) - papers(other))


def test_only_the_winning_capsule_is_drawn(model):
    capsules = squash(torch.randn(5, CLASSES, 16, dtype=torch.float64)).requires_grad_()
    winners = torch.tensor([0, 1, 2, 0, 1])
    model.draw(capsules, winners).sum().backward()
    touched = capsules.grad.abs().sum(-1) > 0
    assert torch.equal(touched, F.one_hot(winners, CLASSES).bool())


def test_presences_are_lengths_and_predictions_the_longest(model, images):
    guide = guide_to(model)
    length = squash(guide.poses(images)).norm(dim=-1)
    torch.testing.assert_close(length, guide.scores(images).sigmoid())
    assert torch.equal(guide.predict(images), length.argmax(-1))


def test_another_routing_reads_the_same_votes_with_the_same_parameters(model, images):
    guide = guide_to(model)
    other = guide.with_routing(EMRouting(2))
    assert {id(p) for p in other.parameters()} == {id(p) for p in guide.parameters()}
    assert not torch.allclose(guide.poses(images), other.poses(images))
    torch.testing.assert_close(other.with_routing(guide.routing).poses(images), guide.poses(images))


def test_pairs_require_both_classes_and_draw_one(images):
    """The joint of a batch of pairs by hand, with the capsules of the overlays."""
    torch.manual_seed(0)
    model = OverlappingCapsuleNetwork(SHAPE, CLASSES, hidden=(9, 11)).double()
    guide = OverlappingRoutedCapsules(model, DynamicRouting(3), channels=4).double().eval()
    labels = torch.tensor([0, 2, 1, 1])
    trace = poutine.trace(guide).get_trace(images, labels)
    overlays = torch.stack([torch.maximum(images[n], images[n - 1]) for n in range(4)])
    torch.testing.assert_close(trace.nodes["class_pose"]["value"], guide.poses(overlays))
    model_trace = poutine.trace(poutine.replay(model, trace=trace)).get_trace(images, labels)
    model_trace.compute_log_prob()
    capsules = squash(guide.poses(overlays))
    for n in range(4):
        length = capsules[n].norm(dim=-1)
        both = {int(labels[n]), int(labels[n - 1])}
        cost = sum((0.9 - length[j]).clamp_min(0) ** 2 for j in both)
        cost += sum(0.5 * (length[j] - 0.1).clamp_min(0) ** 2 for j in set(range(CLASSES)) - both)
        factor = model_trace.nodes["label"]["log_prob"][n]
        torch.testing.assert_close(factor, -model.label_weight * cost)
        drawn = decoded(model, guide.poses(overlays)[n], int(labels[n]))
        torch.testing.assert_close(guide.take_out(overlays, labels)[n], drawn)
        expected = Normal(drawn, model.sigma_image).log_prob(images[n]).sum()
        torch.testing.assert_close(model_trace.nodes["image"]["log_prob"][n], expected)


def test_normal_poses_start_at_the_points_of_the_guide_that_they_replace(model, images):
    points = guide_to(model)
    normal = points.with_poses("normal").double()
    distribution = poutine.trace(normal).get_trace(images).nodes["class_pose"]["fn"]
    torch.testing.assert_close(distribution.mean, points.poses(images))
    torch.testing.assert_close(distribution.stddev, torch.full_like(distribution.mean, 0.05))
    assert points.with_poses("delta").pose == "delta"
    assert "log_scale" not in dict(points.named_parameters())


def test_small_primary_capsules_are_depthwise_convolutions(images):
    torch.manual_seed(0)
    primary = SmallPrimary(SHAPE, 4).double().eval()
    maps = primary.maps(images)
    kernel = primary.read[:, None]  # one filter a map, as large as the map
    numbers = F.conv2d(maps, kernel, groups=maps.shape[1])[..., 0, 0]
    torch.testing.assert_close(primary(images), squash(numbers.unflatten(1, (-1, 8))))
    assert primary.capsules == 2


def test_the_papers_network_has_its_sizes():
    """1,152 primary capsules in 32 types on a grid of 6x6, and the published 8.2 M parameters."""
    guide = RoutedCapsules(CapsuleNetwork(), DynamicRouting(3, fair=False), network="paper")
    assert guide.primary.capsules == 1152
    assert guide.transform.shape == (1152, 8, 160)
    total = guide.num_parameters + guide.model.num_parameters
    assert total == pytest.approx(8.2e6, rel=0.01)


def test_paper_primary_reads_cells_in_place(images):
    """A capsule's numbers are channels of one cell, and cells of one type stand together."""
    torch.manual_seed(0)
    primary = PaperPrimary((2, 19, 17), channels=3, types=2).double()
    image = torch.rand(1, 2, 19, 17, dtype=torch.float64)
    maps = primary.second(primary.first(image).relu())[0]  # (16, 2, 1)
    vectors = primary(image)[0]
    for kind in range(2):
        for row in range(2):
            expected = squash(maps[8 * kind : 8 * kind + 8, row, 0])
            torch.testing.assert_close(vectors[2 * kind + row], expected)
