"""Leveled pictures: a common size of objects, a black ground, a scale of equal contrast."""

import numpy as np
import pytest
import torch
from PIL import Image

from capsule_zoo.data import load_dataset
from capsule_zoo.data.leveling import OBJECT, fit_leveling


def disks(height=120, width=160, radius=8, contrast=0.4, channels=1, ground=None):
    """Return a picture (C, H, W) of twelve disks on a sloping ground, and their mask."""
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    mask = torch.zeros(height, width, dtype=torch.bool)
    for row in range(20, height, 40):
        for column in range(20, width, 40):
            mask |= (rows - row) ** 2 + (columns - column) ** 2 <= radius**2
    slope = 0.3 + 0.2 * columns / width if ground is None else ground
    return (slope + contrast * mask).expand(channels, -1, -1).clone(), mask


@pytest.mark.parametrize("contrast", [0.4, -0.25])
@pytest.mark.parametrize("channels", [1, 3])
def test_the_ground_is_black_and_objects_are_bright(channels, contrast):
    picture, mask = disks(contrast=contrast, channels=channels)
    leveling = fit_leveling([picture], width=16)
    assert leveling.dark == (contrast < 0,) * channels
    leveled = leveling(picture)
    assert leveled.shape == (1, 120 * OBJECT // 16, 160 * OBJECT // 16)
    inside = leveling.resize(mask[None].float())[0]
    assert leveled[0][inside > 0.99].min() > 0.8
    assert leveled[0][inside < 0.01].max() < 0.15  # the blur of the ground reaches across edges


def test_the_width_of_objects_is_guessed_and_can_be_given():
    picture, _ = disks()
    assert fit_leveling([picture]).width == pytest.approx(16, rel=0.25)
    assert fit_leveling([picture], width=10).size_of(picture) == (288, 384)


def test_bright_objects_do_not_hide_dim_ones():
    picture, mask = disks(contrast=0.02, ground=0.1)
    picture[:, :40, :40] += 0.8 * mask[:40, :40]
    leveled = fit_leveling([picture], width=16)(picture)
    assert leveled[0, 30, 30] > 0.95  # the bright disk
    assert leveled[0, 30, 90] > 0.15  # contrast 40 times smaller


def test_one_leveling_serves_pictures_of_other_sizes_and_missing_pixels():
    picture, _ = disks()
    leveling = fit_leveling([picture, disks(80, 120)[0]], width=16)
    whole = leveling(picture)
    picture[:, 50:60, 70:80] = torch.nan
    leveled = leveling(picture)
    assert leveled[0].isnan().any()
    near = ~leveled[0].isnan()
    torch.testing.assert_close(leveled[0][near], whole[0][near], atol=0.1, rtol=0)
    with pytest.raises(ValueError, match=r"\(1, height, width\)"):
        leveling(picture.expand(3, -1, -1))


@pytest.mark.parametrize("picture", [torch.full((1, 60, 60), 0.4), torch.zeros(3, 60, 60)])
def test_pictures_of_one_color_are_refused(picture):
    with pytest.raises(ValueError, match="show no objects"):
        fit_leveling([picture], width=16)
    with pytest.raises(ValueError, match="no size can be guessed"):
        fit_leveling([picture])


@pytest.mark.parametrize("bits", [8, 16])
def test_a_picture_file_is_read_as_tiles(tmp_path, bits):
    picture, _ = disks()
    values = (picture[0].numpy() * (2**bits - 1)).astype(np.uint8 if bits == 8 else np.uint16)
    Image.fromarray(values).save(tmp_path / "disks.png")
    data = load_dataset(str(tmp_path / "disks.png"), size=16)
    assert data.train.images.shape[1:] == (1, 64, 64)
    assert data.name.startswith("tiles:") or data.name.endswith("disks.png")
    assert data.settings["counts"] == "poisson"
    assert data.settings["leveling"].width == 16
    assert data.train.images.min() >= 0 and data.train.images.max() <= 1
    with pytest.raises(ValueError, match="one number"):
        load_dataset(str(tmp_path / "disks.png"), size=(16, 12))


def test_small_pictures_get_a_margin_of_ground(tmp_path):
    for number in range(2):
        picture, _ = disks(40, 40)
        Image.fromarray((255 * picture[0]).byte().numpy()).save(tmp_path / f"{number}.png")
    data = load_dataset(f"tiles:{tmp_path}", size=16)
    assert data.train.images.shape[1:] == (1, 64, 64)
