"""Requests: negative ones undo them, whole ones are exact, draws stay in their range."""

import pytest
import torch

from capsule_zoo.data import Rotations, Shifts
from capsule_zoo.data.transforms import shift_pixels


@pytest.fixture
def images():
    torch.manual_seed(0)
    return torch.rand(4, 1, 12, 12, dtype=torch.float64)


def random_parameters(requests):
    torch.manual_seed(1)
    return 10 * torch.randn(4, requests.parameters, dtype=torch.float64)


@pytest.mark.parametrize("requests", [Rotations(), Shifts(5)])
def test_negative_parameters_undo_a_request(requests):
    asked = random_parameters(requests)
    forward, back = requests.motions(asked), requests.motions(-asked)
    linear = back[:, :, :2] @ forward[:, :, :2]
    offset = back[:, :, :2] @ forward[:, :, 2:] + back[:, :, 2:]
    torch.testing.assert_close(linear, torch.eye(2).to(linear).expand(4, 2, 2))
    torch.testing.assert_close(offset, torch.zeros_like(offset))


@pytest.mark.parametrize("requests", [Rotations(), Shifts(5)])
def test_nothing_asked_is_the_identity(requests, images):
    nothing = torch.zeros(4, requests.parameters, dtype=torch.float64)
    torch.testing.assert_close(requests.move(images, nothing), images)
    assert requests.numbers(nothing).tolist() == 4 * [list(requests.identity)]


def test_whole_shifts_and_right_angles_are_exact(images):
    asked = torch.tensor([[3.0, -2.0], [0.0, 5.0], [-4.0, 0.0], [12.0, 0.0]], dtype=torch.float64)
    moved = Shifts().move(images, asked)
    torch.testing.assert_close(moved, shift_pixels(images, *asked.long().unbind(-1)))
    torch.testing.assert_close(Shifts(5).numbers(asked), asked / 5)
    rotations = 90 * torch.arange(4.0, dtype=torch.float64)[:, None]
    expected = torch.stack([torch.rot90(image, k, (1, 2)) for k, image in enumerate(images)])
    torch.testing.assert_close(Rotations().move(images, rotations), expected)
    numbers = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]]).double()
    torch.testing.assert_close(Rotations().numbers(rotations), numbers)


@pytest.mark.parametrize("requests", [Rotations(), Shifts(5)])
def test_moved_images_are_differentiable_by_the_request(requests, images):
    asked = random_parameters(requests).requires_grad_()
    smooth = torch.nn.functional.avg_pool2d(images, 3, 1, 1)
    assert torch.autograd.gradcheck(lambda p: requests.move(smooth, p), asked)


def test_each_image_is_asked_for_in_its_own_range():
    low = torch.tensor([-3.0, 7.0, 18.0]).repeat(400)
    high = torch.tensor([3.0, 9.0, 18.0]).repeat(400)
    for requests in (Rotations(), Shifts()):
        drawn = requests.draw(low, high).view(400, 3, -1)
        assert (drawn[:, 2] == 18).all()
        assert (drawn[:, 0] >= -3).all() and (drawn[:, 0] < 3).all()
        assert (drawn[:, 1] >= 7).all() and (drawn[:, 1] < 9).all()
    whole = drawn[:, 0]  # of shifts: 400 draws of six numbers miss one with probability 1e-31
    assert set(whole.unique().tolist()) == {-3.0, -2.0, -1.0, 0.0, 1.0, 2.0}
    assert not torch.equal(whole[:, 0], whole[:, 1])
