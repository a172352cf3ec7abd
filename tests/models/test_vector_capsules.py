"""Vector capsules: squash, the margin loss, and the routed layer against its procedure in loops."""

import pytest
import torch

from capsule_zoo.guides import DynamicRouting, EMRouting
from capsule_zoo.models.common import chunks
from capsule_zoo.models.routing.vector_capsules import ClassVectors, keep_scale, margin_loss, squash


def test_squash_is_the_papers():
    vectors = torch.randn(20, 8, dtype=torch.float64)
    for s, v in zip(vectors, squash(vectors), strict=True):
        length = s.norm()
        torch.testing.assert_close(v, length**2 / (1 + length**2) * s / length)


def test_squash_reaches_the_margin_and_no_more_than_one():
    long = squash(torch.tensor([[3.0, 0.0], [0.0, 1e6]], dtype=torch.float64)).norm(dim=-1)
    assert long[0].item() == pytest.approx(0.9) and 0.999 < long[1] <= 1


def test_squash_is_safe_at_zero_in_value_and_gradient():
    """The derivative at zero is zero: near it squash is s |s|."""
    for scale in (0.0, 1e-30, 1e-9):
        s = torch.full((1, 4), scale, requires_grad=True)
        v = squash(s)
        v.sum().backward()
        assert torch.isfinite(v).all() and v.abs().max() <= 1e-12
        assert torch.isfinite(s.grad).all() and s.grad.abs().max() < 1e-5
    s = torch.tensor([[1e-3, -2e-3, 0.5]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(squash, s)


def test_margin_loss_is_the_papers():
    length, presence = torch.rand(5, 4, dtype=torch.float64), torch.randint(2, (5, 4))
    for n, value in enumerate(margin_loss(length, presence).tolist()):
        loss = 0.0
        for v, t in zip(length[n].tolist(), presence[n].tolist(), strict=True):
            loss += t * max(0, 0.9 - v) ** 2 + 0.5 * (1 - t) * max(0, v - 0.1) ** 2
        assert value == pytest.approx(loss)
    assert margin_loss(torch.tensor([[0.95, 0.05]]), torch.tensor([[1, 0]])).item() == 0


def dynamic_routing(children, transform, classes, iterations):
    """Run procedure 1 of Sabour et al. for one image, in loops."""
    votes = torch.stack([u @ w for u, w in zip(children, transform, strict=True)])
    votes = votes.unflatten(1, (classes, -1))  # (children, classes, 16)
    logits = torch.zeros(votes.shape[:2], dtype=votes.dtype)
    for _ in range(iterations):
        fraction = logits.softmax(1)
        parents = [squash((fraction[:, j, None] * votes[:, j]).sum(0)) for j in range(classes)]
        for j, v in enumerate(parents):
            logits[:, j] += votes[:, j] @ v
    return torch.stack(parents)


def test_class_vectors_are_those_of_dynamic_routing():
    layer = ClassVectors(6, 3, DynamicRouting(3, fair=False)).double()
    children = torch.randn(4, 6, 8, dtype=torch.float64)
    with torch.no_grad():
        for u, v in zip(children, layer(children), strict=True):
            torch.testing.assert_close(v, dynamic_routing(u, layer.transform, 3, 3))


def test_batches_in_chunks_give_the_same_classes_and_gradients(monkeypatch):
    layer = ClassVectors(6, 3, DynamicRouting(2, fair=False)).double()
    children = torch.randn(5, 6, 8, dtype=torch.float64, requires_grad=True)
    results = []
    for at_once in (2**21, 2 * 6 * 3 * 16):
        monkeypatch.setattr(chunks, "AT_ONCE", at_once)
        vectors = layer(children)
        wanted = (children, layer.transform)
        results.append((vectors, *torch.autograd.grad(vectors.square().sum(), wanted)))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("routing", [DynamicRouting(3, fair=False), EMRouting(3), None])
def test_lengths_are_presences_whatever_the_routing(routing):
    layer = ClassVectors(20, 3, routing)
    children = squash(torch.randn(7, 20, 8)).requires_grad_()
    vectors = layer(children)
    length = vectors.norm(dim=-1)
    assert vectors.shape == (7, 3, 16) and length.min() > 0 and length.max() < 1
    vectors.sum().backward()
    for p in (children, *layer.parameters()):
        assert torch.isfinite(p.grad).all() and p.grad.abs().max() > 0


@pytest.mark.parametrize(("children", "classes"), [(8, 10), (288, 10), (1152, 10), (32, 3)])
def test_untrained_classes_are_neither_there_nor_not(children, classes):
    torch.manual_seed(0)
    layer = ClassVectors(children, classes, DynamicRouting(1, fair=False))
    with torch.no_grad():
        length = layer(squash(torch.randn(50, children, 8))).norm(dim=-1)
    assert 0.25 < length.mean() < 0.75


def test_initial_weights_keep_the_scale_of_what_is_half_passed():
    layer = torch.nn.Conv2d(32, 64, 3)
    keep_scale(layer, 32 * 9)
    inputs = torch.randn(8, 32, 12, 12)
    assert layer(inputs.relu()).square().mean().item() == pytest.approx(1, rel=0.1)
