"""DRAW's attention window: N x N Gaussian filters on a grid that is moved and zoomed.

A linear map of a hidden state places the window. With A the width and B the height of the image,
in pixels, and x and y measured from its center,

    (g_x, g_y, log variance, log d, log intensity) = linear(hidden)
    center = (g_x (A + 1) / 2, g_y (B + 1) / 2)
    stride = d (max(A, B) - 1) / (N - 1)
    mean_i = center + (i - (N - 1) / 2) stride                        # i = 0 .. N - 1
    F[i, a] = exp(-(a - mean_i)^2 / 2 variance) / sum over pixels a   # a filter for each i

    read(image) = intensity F_y image F_x^T          # (N, N)
    write(patch) = F_y^T patch F_x / intensity       # (B, A)

In coordinates from the center, the grid of an untrained window spans the image from the first pixel
to the last. Papers and programs count from 0 or from 1, and their formulas differ by one pixel. The
softmax normalizes a filter anywhere, even far outside the image. No pixel has less than e^-30
of a filter's largest weight: products of smaller weights are denormal numbers, which took a
CPU two fifths of the time of a training step of DRAW.

References:
    Gregor, Danihelka, Graves, Rezende & Wierstra 2015, "DRAW" (arXiv 1502.04623): equations 19 to
    29. Their pixels count from 1, so that their center (A + 1) / 2 is 0 here.
"""

from typing import NamedTuple

import torch
from pyro.nn import PyroModule
from torch import Tensor, nn

from capsule_zoo.models.checks import check_at_least

_RANGE = 30.0  # nats; products of smaller filters would be denormal, which makes a CPU slow


def filterbank(center: Tensor, stride: Tensor, variance: Tensor, size: int, pixels: int) -> Tensor:
    """Compute the filters along one axis, (*batch, size, pixels), each of which sums to 1.

    Args:
        center: center of the window, in pixels from the center of the image, (*batch,).
        stride: pixels from one filter to the next, (*batch,).
        variance: variance of a filter, in squared pixels, (*batch,).
        size: number of filters.
        pixels: number of pixels of the image along this axis.
    """
    step = torch.arange(size, device=center.device) - (size - 1) / 2
    pixel = torch.arange(pixels, device=center.device) - (pixels - 1) / 2
    mean = center[..., None] + step.to(center) * stride[..., None]  # (*batch, size)
    apart = (pixel.to(center) - mean[..., None]).square()
    logits = -0.5 * apart / variance[..., None, None]
    return (logits - logits.detach().amax(-1, keepdim=True)).clamp_min(-_RANGE).softmax(-1)


class Window(NamedTuple):
    """An attention window for each image of a batch, which may have several dims.

    Attributes:
        rows, columns: filters along y and x, (*batch, N, height) and (*batch, N, width).
        intensity: (*batch,).
        center: (x, y), pixels from the center of the image, (*batch, 2).
        stride: pixels from one filter to the next, (*batch,).
    """

    rows: Tensor
    columns: Tensor
    intensity: Tensor
    center: Tensor
    stride: Tensor

    def read(self, images: Tensor) -> Tensor:
        """Extract patches (*batch, C, N, N) from images (*batch, C, height, width)."""
        patches = self.rows[..., None, :, :] @ images @ self.columns[..., None, :, :].mT
        return self.intensity[..., None, None, None] * patches

    def write(self, patches: Tensor) -> Tensor:
        """Write patches (*batch, C, N, N) into empty images (*batch, C, height, width)."""
        images = self.rows[..., None, :, :].mT @ patches @ self.columns[..., None, :, :]
        return images / self.intensity[..., None, None, None]


class Aim(PyroModule):
    """The linear map from a hidden state to the position and zoom of a window.

    Args:
        hidden: numbers in the state.
        size: N, filters along each axis.
        shape: height and width of the images, in pixels.

    Called on states (*batch, hidden) it returns a `Window`.
    """

    def __init__(self, hidden: int, size: int, shape: tuple[int, int]) -> None:
        super().__init__()
        check_at_least(2, window=size)
        self.size = size
        self.shape = shape
        self.place = PyroModule[nn.Linear](hidden, 5)
        nn.init.zeros_(self.place.bias)

    def forward(self, hidden: Tensor) -> Window:
        height, width = self.shape
        numbers = self.place(hidden)
        center = 0.5 * numbers[..., :2] * numbers.new_tensor([width + 1, height + 1])
        variance, zoom, intensity = numbers[..., 2:].exp().unbind(-1)
        stride = zoom * (max(height, width) - 1) / (self.size - 1)
        rows = filterbank(center[..., 1], stride, variance, self.size, height)
        columns = filterbank(center[..., 0], stride, variance, self.size, width)
        return Window(rows, columns, intensity, center, stride)
