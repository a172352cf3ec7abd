"""Tiles of pictures of any sizes, and own pictures of any sizes and bits."""

import warnings

import numpy as np
import pytest
import torch
from PIL import Image

from capsule_zoo.data.files import MissingData
from capsule_zoo.data.own_pictures import read_whole_pictures
from capsule_zoo.data.tiles import tiles_of_pictures
from capsule_zoo.data.whole_pictures import read_whole_picture, whole_picture_file


def numbered(height: int, width: int, first: int = 0) -> torch.Tensor:
    """Return a picture whose pixels are different whole numbers, (1, height, width)."""
    return (first + torch.arange(height * width)).reshape(1, height, width).double()


def test_tiles_are_parts_of_the_pictures_at_every_position():
    pictures = [numbered(5, 7), numbered(4, 4, first=100)]
    tiles = tiles_of_pictures(pictures, 4, 2000, rotations=False)
    assert tiles.shape == (2000, 1, 4, 4)
    corners, counts = tiles[:, 0, 0, 0].unique(return_counts=True)
    assert corners.tolist() == [0, 1, 2, 3, 7, 8, 9, 10, 100]  # 2x4 positions, and one
    assert ((counts - 2000 / 9).square() / (2000 / 9)).sum() < 26.1  # chi-square, 8 degrees, .001
    for tile in tiles[:50]:
        width = 4 if tile[0, 0, 0] == 100 else 7
        expected = numbered(4, width)[:, :, :4] + tile[0, 0, 0]
        torch.testing.assert_close(tile, expected)


def test_all_eight_motions_are_alike():
    picture = numbered(3, 3)
    tiles = tiles_of_pictures([picture], 3, 800)
    motions = [torch.rot90(p, k, (1, 2)) for p in (picture, picture.flip(2)) for k in range(4)]
    counts = torch.tensor([float((tiles == m).all(-1).all(-1).sum()) for m in motions])
    assert counts.sum() == 800 and (counts - 100).square().sum() / 100 < 24.3  # 7 degrees, .001


def test_tiles_depend_on_the_seed_alone():
    pictures = [torch.rand(3, 30, 40), torch.rand(3, 50, 20)]
    first, again, other = (tiles_of_pictures(pictures, 16, 9, seed) for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_small_pictures_are_left_out_with_a_warning():
    pictures = [torch.zeros(1, 30, 30), torch.ones(1, 30, 9)]
    with pytest.warns(UserWarning, match="1 of 2 pictures are smaller than a tile of 10x10"):
        assert tiles_of_pictures(pictures, 10, 50).max() == 0


@pytest.mark.parametrize(
    ("pictures", "size", "message"),
    [
        ([torch.rand(1, 9, 30)], 10, "no picture is as large as a tile of 10x10 .* has 9"),
        ([], 10, "no picture is as large"),
        ([torch.rand(1, 20, 20), torch.rand(3, 20, 20)], 10, "one number of channels"),
        ([torch.rand(20, 20)], 10, r"must be \(C, H, W\)"),
        ([torch.rand(1, 20, 20)], 0, "at least 1, not 0 and 5"),
    ],
)
def test_tiles_that_do_not_fit_are_refused(pictures, size, message):
    with pytest.raises(ValueError, match=message):
        tiles_of_pictures(pictures, size, 5)


@pytest.mark.parametrize("bits", [8, 12, 16])
def test_pictures_are_read_on_the_scale_of_their_bits(tmp_path, bits):
    top = 2**bits - 1
    values = np.linspace(0, top, 60).round().reshape(6, 10)
    file = tmp_path / "x.png"
    Image.fromarray(values.astype(np.uint8 if bits == 8 else np.uint16)).save(file)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (picture,), names = read_whole_pictures(file)
    assert names == ["x.png"] and picture.shape == (1, 6, 10)
    np.testing.assert_allclose(picture[0], values / top, atol=1e-6)
    assert [("12 bits" in str(w.message)) for w in caught] == [True] * (bits == 12)


def test_a_folder_of_pictures_of_any_sizes_and_colors(tmp_path):
    Image.fromarray(np.full((8, 9), 51, np.uint8)).save(tmp_path / "a.png")
    Image.new("RGB", (7, 5), (255, 0, 51)).save(tmp_path / "b.png")
    np.save(tmp_path / "c.npy", np.zeros((2, 3, 4)))
    pictures, names = read_whole_pictures(tmp_path)
    assert names == ["a.png", "b.png", "c.npy", "c.npy"]
    assert [tuple(p.shape) for p in pictures] == [(3, 8, 9), (3, 5, 7), (3, 3, 4), (3, 3, 4)]
    torch.testing.assert_close(pictures[1][:, 0, 0], torch.tensor([1.0, 0.0, 0.2]))
    assert (pictures[0] == 0.2).all()


def test_only_files_of_sixteen_bits_are_scaled(tmp_path):
    Image.fromarray(np.full((8, 9), 4095, np.uint16)).save(tmp_path / "a.png")
    Image.fromarray(np.full((8, 9), 51, np.uint8)).save(tmp_path / "b.png")
    np.save(tmp_path / "c.npy", np.full((1, 3, 4), 0.2))
    with pytest.warns(UserWarning, match="largest pixel is 4,095 of 65,535, so they are read as"):
        pictures, _ = read_whole_pictures(tmp_path)
    assert [picture.max().item() for picture in pictures] == pytest.approx([1.0, 0.2, 0.2])


def test_the_file_of_a_picture_is_read_as_it_is():
    (picture,), _ = read_whole_pictures(whole_picture_file("coins"))
    assert torch.equal(picture, read_whole_picture("coins", scale=1).image)


@pytest.mark.parametrize("name", ["none.png", "none", "text.txt"])
def test_what_is_no_picture_is_refused(tmp_path, name):
    (tmp_path / "text.txt").write_text("x")
    with pytest.raises(MissingData) as refusal:
        read_whole_pictures(tmp_path / name)
    assert "\n" not in str(refusal.value)
