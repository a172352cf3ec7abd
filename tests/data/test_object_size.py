"""The size of objects is guessed within 30 % on real and composed pictures, or refused."""

import pytest
import torch
from torch import Tensor

from capsule_zoo.data.composed_pictures import composed_digits, composed_sprites
from capsule_zoo.data.object_size import guess_object_size, otsu_threshold
from capsule_zoo.data.whole_pictures import read_whole_picture

PLACE = torch.arange(200)


def disk(radius: float, x: int, y: int) -> Tensor:
    return ((PLACE - x).square() + (PLACE[:, None] - y).square() <= radius**2).float()


def disks(radius: float) -> Tensor:
    """Return a picture of nine disks, (1, 200, 200)."""
    places = [(x, y) for x in (35, 98, 162) for y in (30, 101, 165)]
    return torch.stack([disk(radius, x, y) for x, y in places]).amax(0, keepdim=True)


@pytest.mark.parametrize("radius", [4, 8, 16, 20])
@pytest.mark.parametrize("bright", [True, False])
def test_disks_of_any_size_and_sign(radius, bright):
    picture = disks(radius) if bright else 0.8 - 0.5 * disks(radius)
    noise = 0.03 * torch.randn(picture.shape)
    for pixels in (picture, picture + noise, picture.expand(3, -1, -1)):
        guess = guess_object_size([pixels])
        assert 2 * radius / 1.3 < guess.diameter < 2 * radius * 1.3
        assert guess.size == round(1.2 * guess.diameter)


@pytest.mark.parametrize("scale", [0.4, 0.6, 1.0])
def test_coins(scale):
    picture = read_whole_picture("coins", scale)
    diameter = 2 * picture.radii.median().item()
    for image in (picture.image, 1 - picture.image):
        assert diameter / 1.3 < guess_object_size([image]).diameter < diameter * 1.3


@pytest.mark.parametrize("scale", [0.25, 1 / 3, 1.0])
def test_nuclei(scale):
    guess = guess_object_size([read_whole_picture("nuclei", scale).image])
    # most are of 95x75 to 70x65 pixels; the three brightest alone would tell 64
    assert 80 * scale / 1.2 < guess.diameter < 80 * scale * 1.2


@pytest.mark.parametrize("ground", ["black", "smooth"])
def test_squares_of_digits_and_sprites(ground):
    digits = [composed_digits(None, number=2, of="digits", ground=ground)[k].image for k in (0, 1)]
    assert 28 / 1.3 < guess_object_size(digits).size < 28 * 1.3
    sprites = composed_sprites(1, ground=ground, channels=3)[0].image
    assert 15 / 1.3 < guess_object_size([sprites]).diameter < 15 * 1.3


def test_pictures_of_different_sizes_and_one_object():
    picture = disks(8)
    parts = [picture[:, :120], picture[:, :, 60:], picture]
    assert 16 / 1.3 < guess_object_size(parts).diameter < 16 * 1.3
    lone = guess_object_size([disk(20, 90, 110)[None]])
    assert 40 / 1.3 < lone.diameter < 40 * 1.3
    assert str(lone).startswith("objects about 4") and "pixels wide, in squares of" in str(lone)


def test_missing_pixels_are_of_the_ground():
    picture = disks(8)
    holes = torch.where(torch.rand(picture.shape) < 0.01, torch.nan, picture)
    assert 16 / 1.3 < guess_object_size([holes]).diameter < 16 * 1.3


def test_large_pictures_are_reduced_first():
    large = disks(16).repeat_interleave(8, 1).repeat_interleave(8, 2)
    assert 256 / 1.3 < guess_object_size([large]).diameter < 256 * 1.3


@pytest.mark.parametrize(
    ("picture", "message"),
    [
        (torch.full((1, 60, 80), 0.4), "have one color each and show no objects"),
        (torch.zeros(3, 200, 200), "have one color each"),
        (torch.linspace(0, 1, 200).expand(1, 200, 200), "show no objects of one size"),
        (torch.ones(1, 2, 2).tril(), "show no objects of one size"),
    ],
)
def test_pictures_without_objects_are_refused(picture, message):
    with pytest.raises(ValueError, match=message) as refusal:
        guess_object_size([picture])
    assert "\n" not in str(refusal.value)
    with pytest.raises(ValueError, match="it is empty"):
        guess_object_size([])


@pytest.mark.parametrize("seed", range(20))
def test_noise_has_no_objects(seed):
    noise = torch.randn(1, 150, 150, generator=torch.Generator().manual_seed(seed))
    with pytest.raises(ValueError, match="show no objects of one size, but noise"):
        guess_object_size([0.5 + 0.02 * noise])


def test_the_threshold_lies_between_two_groups():
    values = torch.cat([torch.randn(1000) * 0.1, 2 + torch.randn(100) * 0.1])
    assert 0.3 < otsu_threshold(values) < 1.7
