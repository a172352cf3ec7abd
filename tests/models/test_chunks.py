"""Chunks of a batch, put together, are the batch; so are their gradients."""

import pytest
import torch

from capsule_zoo.models.common import chunks
from capsule_zoo.models.common.chunks import map_in_chunks


def function(x, y, w):
    return x * w + y, (x.sin() * y).sum(1)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("size", [1, 2, 5, 9])
def test_chunks_have_the_values_and_the_gradient_of_the_whole(size, recompute, monkeypatch):
    monkeypatch.setattr(chunks, "AT_ONCE", 2 * size)
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in ((5, 2), (5, 2), (2,))]
    inputs = [x.requires_grad_() for x in inputs]

    def chunked(*t):
        return map_in_chunks(function, t[:2], t[2:], 2, recompute)

    torch.testing.assert_close(chunked(*inputs), function(*inputs))
    assert torch.autograd.gradcheck(chunked, inputs)


@pytest.mark.parametrize("recompute", [False, True])
def test_autocast_takes_no_digit_from_the_precision_of_the_shared_tensors(recompute):
    def product(x, w):
        return (x @ w,)

    shared = torch.randn(3, 4)
    rows = torch.randn(5, 3).bfloat16().requires_grad_()
    expected = rows.float() @ shared
    with torch.autocast("cpu", torch.bfloat16):
        (output,) = map_in_chunks(product, (rows,), (shared,), 5, recompute)
    assert torch.equal(output, expected)
    slopes = [torch.autograd.grad(y.sum(), rows)[0] for y in (output, expected)]
    assert slopes[0].dtype == torch.bfloat16
    assert torch.equal(*slopes)
