"""The window of attention against the paper's equations, written out with its counting from 1."""

import math

import pytest
import torch

from capsule_zoo.models.networks.attention_window import Aim, filterbank

N, WIDTH, HEIGHT = 5, 9, 7


def placed(numbers, size=N, shape=(HEIGHT, WIDTH)):
    """Return the window of (g_x, g_y, log variance, log d, log intensity), rows (B, 5), float64."""
    numbers = torch.as_tensor(numbers, dtype=torch.float64).reshape(-1, 5)
    aim = Aim(5, size, shape).double()
    with torch.no_grad():
        aim.place.weight.copy_(torch.eye(5))
    return aim(numbers)


def by_the_paper(g_x, g_y, log_variance, log_delta):
    """Compute F_x, F_y (equations 22 to 26) element by element; A is the width, B the height."""
    centers = (WIDTH + 1) / 2 * (g_x + 1), (HEIGHT + 1) / 2 * (g_y + 1)
    stride = (max(WIDTH, HEIGHT) - 1) / (N - 1) * math.exp(log_delta)
    banks = []
    for center, pixels in zip(centers, (WIDTH, HEIGHT), strict=True):
        bank = torch.zeros(N, pixels, dtype=torch.float64)
        for i in range(1, N + 1):
            mean = center + (i - N / 2 - 0.5) * stride
            for a in range(1, pixels + 1):
                bank[i - 1, a - 1] = math.exp(-((a - mean) ** 2) / (2 * math.exp(log_variance)))
        banks.append(bank / bank.sum(1, keepdim=True))
    return banks


def test_filters_are_those_of_the_paper():
    torch.manual_seed(0)
    numbers = 0.5 * torch.randn(6, 5, dtype=torch.float64)
    window = placed(numbers)
    for n, (g_x, g_y, log_variance, log_delta, _) in enumerate(numbers.tolist()):
        columns, rows = by_the_paper(g_x, g_y, log_variance, log_delta)
        torch.testing.assert_close(window.columns[n], columns)
        torch.testing.assert_close(window.rows[n], rows)


def test_products_of_filters_are_no_denormal_numbers():
    """A CPU needs a hundred times as long for them."""
    window = placed([[0.0, 0.0, math.log(0.05), 0.0, 0.0]], 12, (28, 28))
    products = window.rows.float().mT @ window.columns.float()
    assert (products >= torch.finfo(products.dtype).tiny).all()


def test_reading_and_writing_are_the_papers_sums():
    torch.manual_seed(0)
    window = placed(0.5 * torch.randn(2, 5))
    image = torch.rand(2, 3, HEIGHT, WIDTH, dtype=torch.float64)
    patch = torch.rand(2, 3, N, N, dtype=torch.float64)
    read = torch.einsum("nib,ncba,nja->ncij", window.rows, image, window.columns)
    written = torch.einsum("nib,ncij,nja->ncba", window.rows, patch, window.columns)
    intensity = window.intensity[:, None, None, None]
    torch.testing.assert_close(window.read(image), intensity * read)
    torch.testing.assert_close(window.write(patch), written / intensity)


def test_an_untrained_window_has_a_filter_on_every_pixel():
    """With as many narrow filters as pixels, the window reads and draws the image itself."""
    window = placed([0, 0, -10, 0, 0], size=9, shape=(9, 9))
    image = torch.rand(1, 1, 9, 9, dtype=torch.float64)
    torch.testing.assert_close(window.read(image), image)
    torch.testing.assert_close(window.write(image), image)
    assert window.stride.item() == 1 and window.center.abs().max() == 0


@pytest.mark.parametrize("steps", [(1, 0), (-2, 3)])
def test_a_window_moved_by_pixels_reads_what_lies_there(steps):
    image = torch.rand(1, 1, 9, 9, dtype=torch.float64)
    right, down = steps
    window = placed([right / 5, down / 5, -10, 0, 0], size=9, shape=(9, 9))
    moved = image.roll((-down, -right), (2, 3))[..., 3:6, 3:6]
    torch.testing.assert_close(window.read(image)[..., 3:6, 3:6], moved)
    torch.testing.assert_close(window.center, torch.tensor([steps], dtype=torch.float64))


def test_a_filter_sums_to_one_and_has_a_gradient_wherever_it_lies():
    center = torch.tensor([-1e4, 0.0, 3.5, 1e4], dtype=torch.float64, requires_grad=True)
    stride = torch.tensor([1.0, 0.0, 2.0, 100.0], dtype=torch.float64)
    variance = torch.tensor([1e-3, 1.0, 1e6, 1e-3], dtype=torch.float64)
    bank = filterbank(center, stride, variance, 4, 7)
    torch.testing.assert_close(bank.sum(-1), torch.ones(4, 4, dtype=torch.float64))
    (bank * torch.arange(7)).sum().backward()
    assert torch.isfinite(center.grad).all() and center.grad[2] > 0
