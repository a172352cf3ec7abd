"""Warps: exact at right angles, invertible, centered, and within the given range."""

import pytest
import torch

from capsule_zoo.data.seeds import seeded_generator
from capsule_zoo.data.transforms import (
    Affine,
    Rotate,
    Shift,
    ink_extent,
    motion,
    pixel_centers,
    shift_pixels,
    warp_images,
)


@pytest.fixture
def images():
    return torch.rand(3, 2, 12, 12, generator=seeded_generator(0), dtype=torch.float64)


def disc(x: torch.Tensor, y: torch.Tensor, size: int = 41) -> torch.Tensor:
    """Return smooth blobs (B, 1, size, size) centered at (x, y) pixels from the middle."""
    pixels = pixel_centers(size, size).double()
    square = ((pixels - torch.stack([x, y], -1)[:, None]) ** 2).sum(-1)
    return torch.exp(-square / 8).view(-1, 1, size, size)


def center_of_mass(images: torch.Tensor) -> torch.Tensor:
    mass = images.flatten(1)
    return (mass / mass.sum(1, keepdim=True)) @ pixel_centers(*images.shape[-2:]).double()


def test_whole_degrees_cut_no_other_number():
    matrices = motion(torch.tensor([0, 90]), 0.2, (1.5, 0.5), (2.5, -0.5))
    torch.testing.assert_close(
        matrices, motion(torch.tensor([0.0, 90.0]), 0.2, (1.5, 0.5), (2.5, -0.5))
    )


def test_no_motion_changes_nothing(images):
    torch.testing.assert_close(warp_images(images, motion()), images)


@pytest.mark.parametrize("rotations", [1, 2, 3])
def test_right_angles_are_exact_and_counter_clockwise(images, rotations):
    rotated = torch.rot90(images, rotations, (-2, -1))
    torch.testing.assert_close(
        warp_images(images, motion(torch.tensor(90.0 * rotations).double())), rotated
    )


def test_content_moves_as_the_matrix_says():
    where = torch.tensor([[5.0, -3.0], [-6.0, 2.0]], dtype=torch.float64)
    moves = motion(torch.tensor([20.0, -50.0]).double(), 0.2, (1.2, 0.9), (2.5, -1.5))
    moved = warp_images(disc(*where.T), moves)
    expected = (moves[:, :, :2] @ where[..., None]).squeeze(-1) + moves[:, :, 2]
    torch.testing.assert_close(center_of_mass(moved), expected, atol=0.02, rtol=0)


def test_scale_acts_before_shear_before_rotation():
    linear = motion(torch.tensor(30.0).double(), 0.2, (1.2, 0.8))[0, :, :2]
    scale = motion(torch.tensor(0.0).double(), 0, (1.2, 0.8))[0, :, :2]
    shear = motion(torch.tensor(0.0).double(), 0.2)[0, :, :2]
    rotation = motion(torch.tensor(30.0).double())[0, :, :2]
    torch.testing.assert_close(linear, rotation @ shear @ scale)
    torch.testing.assert_close(shear, torch.tensor([[1, 0.2], [0, 1]]).double())
    torch.testing.assert_close(rotation @ rotation.T, torch.eye(2).double())


def test_whole_pixel_shifts_agree_with_the_warp(images):
    x, y = torch.tensor([3, -1, 0]), torch.tensor([-2, 5, 12])
    moves = motion(torch.zeros(3).double(), shift=(x, y))
    shifted = shift_pixels(images, x, y)
    torch.testing.assert_close(shifted, warp_images(images, moves))
    assert set(shifted.unique().tolist()) <= {0.0, *images.unique().tolist()}


def test_shift_and_back_restores_the_inside(images):
    bordered = torch.nn.functional.pad(images, (4, 4, 4, 4))
    x, y = torch.tensor([4, -4, 1]), torch.tensor([-4, 3, 0])
    assert torch.equal(shift_pixels(shift_pixels(bordered, x, y), -x, -y), bordered)


def test_images_need_not_be_square():
    image = torch.zeros(1, 1, 9, 15, dtype=torch.float64)
    image[0, 0, 4, 12] = 1  # 5 pixels to the right of the center
    rotated = warp_images(image, motion(torch.tensor(90.0).double()), (15, 9))
    assert rotated[0, 0, 2, 4] == pytest.approx(1)
    torch.testing.assert_close(rotated, torch.rot90(image, 1, (-2, -1)))


def test_ink_extent_is_where_a_large_canvas_shows_ink():
    images = (torch.rand(40, 1, 16, 16, generator=seeded_generator(1)) > 0.97).float()
    images[:, 0, 8, 8] = 1  # no image is empty
    moves = Affine(40, 0.3, (0.7, 1.4), 3.0).motions(40, seeded_generator(2))
    left, right, top, bottom = ink_extent(images, moves).T
    ink = warp_images(images, moves, (64, 64)).flatten(1) > 1e-6
    x, y = pixel_centers(64, 64).T
    for i in range(40):
        assert left[i] <= x[ink[i]].min() and x[ink[i]].max() <= right[i]
        assert top[i] <= y[ink[i]].min() and y[ink[i]].max() <= bottom[i]
    assert ((right - left) <= 16 * 2.5).all()  # and no wider than the motions can make it


@pytest.mark.parametrize(
    "transform", [Shift(2), Rotate(30.0), Affine(20, 0.2, (0.8, 1.2), 1.5)], ids=str
)
def test_a_transform_is_a_function_of_its_generator(images, transform):
    first = transform(images, generator=seeded_generator(5))
    assert torch.equal(first, transform(images, generator=seeded_generator(5)))
    assert not torch.equal(first, transform(images, generator=seeded_generator(6)))
    assert first.shape == images.shape and first.dtype == images.dtype
    assert first.min() >= 0 and first.max() <= 1


@pytest.mark.parametrize("transform", [Shift(0), Rotate(0.0), Affine()], ids=str)
def test_ranges_of_zero_change_nothing(images, transform):
    torch.testing.assert_close(transform(images, generator=seeded_generator(0)), images)


def test_rotations_fill_their_range():
    blobs = disc(torch.full((400,), 12.0), torch.zeros(400))
    x, y = center_of_mass(Rotate(30.0)(blobs, generator=seeded_generator(3))).T
    degrees = torch.rad2deg(torch.atan2(-y, x))
    assert degrees.abs().max() <= 30.1
    assert degrees.min() < -28 and degrees.max() > 28  # missed with probability 2 (29/30)^400
    assert abs(degrees.mean()) < 4  # 4.6 standard errors


def test_affine_parameters_keep_to_their_ranges():
    linear = Affine(scale=(0.8, 1.2), shift=2.0).motions(500, seeded_generator(4))
    assert linear[:, 0, 0].min() >= 0.8 and linear[:, 0, 0].max() <= 1.2
    assert linear[:, :, 2].abs().max() <= 2.0
    assert not torch.equal(linear[:, 0, 0], linear[:, 1, 1])  # each axis has its own
