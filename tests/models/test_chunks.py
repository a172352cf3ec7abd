"""Chunks of a batch, put together, are the batch; so are their gradients."""

import pytest
import torch

from capsule_zoo.models.chunks import in_chunks


def function(x, y, w):
    return x * w + y, (x.sin() * y).sum(1)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("size", [1, 2, 5, 9])
def test_chunks_have_the_values_and_the_gradient_of_the_whole(size, recompute):
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in ((5, 2), (5, 2), (2,))]
    inputs = [x.requires_grad_() for x in inputs]

    def chunked(*t):
        return in_chunks(function, t[:2], t[2:], size, recompute)

    torch.testing.assert_close(chunked(*inputs), function(*inputs))
    assert torch.autograd.gradcheck(chunked, inputs)
