"""Pictures of coins and nuclei, and the marks that were made on them by hand."""

import pytest
import torch

from capsule_zoo.data import whole_pictures
from capsule_zoo.data.files import MissingData
from capsule_zoo.data.whole_pictures import read_whole_picture

SIZES = {"coins": (182, 230), "nuclei": (341, 448)}
NUMBERS = {"coins": 24, "nuclei": 61}


@pytest.mark.parametrize("name", SIZES)
def test_a_picture_is_gray_from_zero_to_one(name):
    picture = read_whole_picture(name)
    assert picture.image.shape == (1, *SIZES[name]) and picture.image.dtype == torch.float32
    assert 0 <= picture.image.min() < 0.1 and 0.8 < picture.image.max() <= 1


@pytest.mark.parametrize("name", SIZES)
def test_every_object_has_one_mark_inside(name):
    picture = read_whole_picture(name)
    height, width = SIZES[name]
    assert len(picture.centers) == len(picture.radii) == NUMBERS[name]
    assert (picture.centers >= 0).all()
    assert (picture.centers < picture.centers.new_tensor([width, height])).all()
    distances = torch.cdist(picture.centers, picture.centers).fill_diagonal_(torch.inf)
    assert distances.min() > 15, "two marks of one object"


@pytest.mark.parametrize("name", SIZES)
def test_marks_are_brighter_than_most_of_the_picture(name):
    picture = read_whole_picture(name)
    x, y = picture.centers.round().long().unbind(1)
    assert (picture.image[0, y, x] > picture.image.median()).float().mean() > 0.95


def test_circles_of_coins_end_at_the_border_of_the_coin():
    picture = read_whole_picture("coins", scale=1)
    image, angle = picture.image[0], torch.arange(0, 6.28, 0.05)
    x, y = picture.centers.T
    assert (picture.radii < torch.minimum(x, y) + 1).all(), "no coin is cut by the border"
    assert (picture.radii < torch.minimum(383 - x, 302 - y) + 1).all()

    def ring(radius: torch.Tensor) -> torch.Tensor:
        columns = (x[:, None] + radius[:, None] * angle.cos()).round().long().clamp(0, 383)
        rows = (y[:, None] + radius[:, None] * angle.sin()).round().long().clamp(0, 302)
        return image[rows, columns].mean(1)

    drop = ring(picture.radii - 2.5) - ring(picture.radii + 2.5)
    outside = ring(picture.radii + 2.5) - ring(picture.radii + 6)
    assert (drop > 0.1).all() and (drop > 2 * outside.abs()).all()


def test_marks_move_with_the_scale():
    small, large = (read_whole_picture("coins", scale) for scale in (0.5, 1))
    torch.testing.assert_close((small.centers + 0.5) * 2, large.centers + 0.5, rtol=0.01, atol=0.1)
    torch.testing.assert_close(small.radii * 2, large.radii, rtol=0.01, atol=0)


def test_a_missing_package_is_named_with_its_remedy(monkeypatch):
    monkeypatch.setattr(whole_pictures, "find_spec", lambda name: None)
    with pytest.raises(MissingData, match=r"scikit-image, which is not installed; .*\[pictures\]"):
        read_whole_picture("coins")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("cells",), "coins or nuclei, not 'cells'"), (("coins", 0), "above 0, such as 1, not 0")],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        read_whole_picture(*arguments)
