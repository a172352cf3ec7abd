"""Composed pictures are functions of their index, and their truth is what they show."""

import pytest
import torch
from PIL import Image
from torch import Tensor

from capsule_zoo.data.composed_pictures import (
    ComposedPicture,
    ComposedPictures,
    composed_digits,
    composed_emoji,
    composed_sprites,
    photographs,
    resize_patches,
)
from capsule_zoo.data.files import MissingData


def squares(number: int = 5, **options) -> ComposedPictures:
    """Return pictures of opaque squares of 6 pixels, in patches of 8, in four colors."""
    patches = torch.zeros(4, 4, 8, 8)
    patches[:, 3, 1:7, 1:7] = 1
    colors = torch.tensor([[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0]])
    patches[:, :3] = colors[:, :, None, None]
    defaults = dict(canvas=(50, 70), least=2, most=9)
    return ComposedPictures(patches, torch.arange(4), number, **defaults | options)


def check_truth(picture: ComposedPicture, least: int, most: int) -> None:
    """Check that numbers, classes, boxes and centers describe the same objects."""
    objects, (height, width) = picture.objects, picture.image.shape[1:]
    number = len(picture.centers)
    assert least <= number <= most and objects.counts.tolist() == [number]
    assert objects.numbers.unique().tolist() == list(range(number + 1))
    assert objects.numbers.shape == (1, height, width) and objects.boxes.shape == (1, number, 4)
    for k in range(number):
        rows, columns = (objects.numbers[0] == k + 1).nonzero(as_tuple=True)
        left, top, right, bottom = objects.boxes[0, k].tolist()
        assert (left, right) == (columns.min(), columns.max() + 1)
        assert (top, bottom) == (rows.min(), rows.max() + 1)


def test_digits_of_scikit_learn_are_where_the_truth_says():
    picture = composed_digits(None, number=3, of="digits")[1]
    assert picture.image.shape == (1, 300, 300)
    check_truth(picture, 20, 60)
    assert ((picture.image[0] > 0.5) == (picture.objects.numbers[0] > 0)).float().mean() > 0.999
    for k, center in enumerate(picture.centers):
        pixels = (picture.objects.numbers[0] == k + 1).nonzero().double().mean(0)
        torch.testing.assert_close(pixels.flip(0), center.double(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("ground", ["black", "plain", "smooth"])
@pytest.mark.parametrize("channels", [1, 3])
def test_sprites_can_be_seen_on_every_ground(ground, channels):
    options = dict(canvas=(120, 90), least=3, most=8, spread=0.1)
    picture = composed_sprites(2, channels=channels, ground=ground, **options)[0]
    check_truth(picture, 3, 8)
    assert picture.image.shape == (channels, 120, 90)
    assert picture.image.min() >= 0 and picture.image.max() <= 1
    numbers = picture.objects.numbers[0]
    rim = torch.nn.functional.max_pool2d((numbers > 0).float()[None], 9, 1, 4)[0] > 0
    for k in range(len(picture.centers)):
        inside = picture.image[:, numbers == k + 1].mean(1)
        left, top, right, bottom = (int(x) for x in picture.objects.boxes[0, k])
        part = (slice(max(top - 9, 0), bottom + 9), slice(max(left - 9, 0), right + 9))
        outside = picture.image[:, *part][:, ~rim[part]].mean(1)
        assert (inside - outside).abs().max() > 0.15


def test_a_picture_depends_on_seed_and_index_alone():
    pictures, again, other = squares(), squares(number=99), squares(seed=1)
    first = pictures[3].image
    pictures[0]
    assert torch.equal(first, pictures[3].image) and torch.equal(pictures[-2].image, first)
    assert torch.equal(first, again[3].image)
    assert not torch.equal(first, other[3].image) and not torch.equal(first, pictures[2].image)
    assert len(list(pictures)) == len(pictures) == 5


def test_numbers_are_uniform():
    counts = torch.tensor([len(picture.centers) for picture in squares(400, least=1, most=4)])
    observed = torch.bincount(counts, minlength=5)[1:]
    assert (observed - 100).square().sum() / 100 < 16.3  # chi-square, 3 degrees, p = .001


def visible(picture: ComposedPicture) -> Tensor:
    """Return the visible pixels of each object."""
    return picture.objects.masks[0].sum((1, 2))


def test_masks_do_not_overlap_unless_allowed():
    crowded = dict(canvas=(40, 40), least=14, most=14)
    assert all((visible(picture) == 36).all() for picture in squares(5, **crowded))
    some = torch.stack([visible(picture) for picture in squares(20, overlap=0.5, **crowded)])
    assert (some >= 18).all() and (some < 36).any()


def test_colors_of_patches_are_painted_by_their_coverage():
    patch = torch.rand(1, 4, 5, 5)
    patch[0, 3] = 0.55 + 0.4 * patch[0, 3]
    color, cover = patch[0, :3], patch[0, 3:]
    options = dict(canvas=(5, 5), least=1, most=1, ground="plain")
    image = ComposedPictures(patch, torch.tensor([0]), 1, **options)[0].image
    ground = (image - cover * color) / (1 - cover)  # one color, whatever the patch
    assert (ground.flatten(1).amax(1) - ground.flatten(1).amin(1) < 1e-4).all()
    assert (ground > 0).all() and (ground < 1).all()


def test_a_shrunk_patch_keeps_its_color():
    patch = torch.zeros(1, 4, 64, 64)
    patch[:, 0] = 1  # the color of pixels that nothing covers must not count
    patch[:, 3, 10:50, 10:50], patch[:, 0, 10:50, 10:50] = 1, 0.3
    small = resize_patches(patch, 18)[0]
    partly = small[3] > 0.05
    torch.testing.assert_close(small[0][partly], torch.full((int(partly.sum()),), 0.3))
    torch.testing.assert_close(
        small[3].sum(), torch.tensor(1600 * (18 / 64) ** 2), rtol=0.01, atol=0
    )


def test_photographs_are_cropped_or_enlarged():
    large = torch.arange(3 * 80 * 90).reshape(1, 3, 80, 90) / (3 * 80 * 90)
    image = squares(1, least=0, most=1, canvas=(20, 30), ground=large)[0].image
    first = (large[0] - image[:, :1, -1:]).abs().sum(0).min()
    assert image.shape == (3, 20, 30) and first < 1e-6  # a part, pixel for pixel
    small = torch.full((1, 3, 8, 8), 0.25)
    assert squares(1, canvas=(50, 70), ground=small)[0].image.min() == 0


@pytest.fixture
def emoji(tmp_path):
    """Return a folder of ten disks, each of its own color."""
    for k in range(10):
        disk = Image.new("RGBA", (64, 64))
        disk.paste((25 * k, 255 - 25 * k, 128, 255), (8, 8, 56, 56))
        disk.save(tmp_path / f"{k}.png")
    return tmp_path


def test_emoji_of_training_and_test_are_disjoint(emoji):
    train, test = composed_emoji(emoji, "train"), composed_emoji(emoji, "test")
    assert (len(train.classes), len(test.classes)) == (8, 2)
    assert not set(train.classes.tolist()) & set(test.classes.tolist())
    picture = test[0]
    assert picture.image.shape == (3, 48, 48) and len(picture.centers) <= 3
    sizes = [picture.objects.boxes[0] for picture in map(test.__getitem__, range(20))]
    sides = torch.cat(sizes)[:, 2:] - torch.cat(sizes)[:, :2]
    assert (sides - 18 * 48 / 64).abs().max() <= 1.5


def test_photographs_of_training_and_test_differ():
    train, test = photographs("train"), photographs("test")
    assert train.shape == test.shape == (3, 3, 300, 400)
    assert all((first - second).abs().mean() > 0.1 for first in train for second in test)
    assert 0 <= train.min() < 0.1 and 0.9 < train.max() <= 1


@pytest.mark.data
def test_digits_of_both_splits_differ(mnist_root):
    train, test = (composed_digits(mnist_root, split, 1) for split in ("train", "test"))
    assert (len(train.patches), len(test.patches)) == (60_000, 10_000)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: squares(least=3, most=2), "not 3 and 2"),
        (lambda: squares(size=0), "size must be above 0.*not 0, "),
        (lambda: squares(ground="gray"), "ground must be black, plain, smooth or photo.*'gray'"),
        (lambda: squares(ground=torch.zeros(1, 1, 9, 9)), "ground has 1 channels, and pict.* 3"),
        (lambda: squares(least=60, most=60)[0], "60 objects of 8 pixels do not fit on 70x50"),
        (lambda: squares(size=99), r"canvas=\(50, 70\) has no room for objects of 99 pixels"),
        (lambda: composed_digits(None, "validation"), "split must be train or test"),
        (lambda: photographs("validation"), "split must be train or test"),
        (lambda: composed_digits(None, of="letters"), "of must be mnist, fashion-mnist or digits"),
    ],
)
def test_wrong_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_picture_that_is_not_there_is_an_index_error():
    with pytest.raises(IndexError, match="5 pictures, and none of index 5"):
        squares()[5]


def test_a_folder_without_transparent_pictures_is_refused(emoji):
    with pytest.raises(MissingData, match=r"is no folder of PNG pictures.*tools/emoji\.py"):
        composed_emoji(emoji / "none")
    Image.new("RGB", (64, 64)).save(emoji / "5.png")
    with pytest.raises(MissingData, match=r"5\.png has no transparent pixel"):
        composed_emoji(emoji)
    Image.new("RGBA", (32, 32)).save(emoji / "5.png")
    with pytest.raises(MissingData, match=r"5\.png has another size than .*0\.png"):
        composed_emoji(emoji)
