"""Convolutions that are computed as products have the values and gradients of convolutions."""

import pytest
import torch
import torch.nn.functional as F

from capsule_zoo.models.networks.convolutional import Conv2d, ConvTranspose2d

CASES = [
    (Conv2d(2, 3, 4, stride=2).double(), F.conv2d, (4, 4)),
    (Conv2d(2, 3, 4, stride=2).double(), F.conv2d, (6, 5)),
    (ConvTranspose2d(2, 3, 4).double(), F.conv_transpose2d, (1, 1)),
    (ConvTranspose2d(2, 3, 4).double(), F.conv_transpose2d, (2, 1)),
]


@pytest.mark.parametrize("layer, function, size", CASES)
def test_products_are_convolutions(layer, function, size):
    inputs = torch.randn(5, 2, *size, dtype=torch.float64).requires_grad_()
    leaves = inputs, layer.weight, layer.bias
    expected = function(*leaves, stride=layer.stride)
    output = layer(inputs)
    torch.testing.assert_close(output, expected)
    slopes = [torch.autograd.grad(out.sin().sum(), leaves) for out in (output, expected)]
    torch.testing.assert_close(*slopes)
