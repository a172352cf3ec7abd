"""Scenes of points: their laws, and files of the user."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from capsule_zoo.data import MissingData, draw_scenes, load_dataset, read_scenes
from capsule_zoo.data.constellations import TEMPLATES, check_points, check_templates


def local_noise(sigma: float) -> torch.Tensor:
    """Return residuals of the first square's corners, in the template's frame, after a fit."""
    scenes = draw_scenes(4000, sigma, seed=1)
    whole = (scenes.objects == 0).any(1)
    objects, corners = scenes.objects[whole], scenes.corners[whole]
    slots = torch.stack([((objects == 0) & (corners == c)).int().argmax(1) for c in range(4)], 1)
    points = torch.view_as_complex(
        scenes.points[whole].gather(1, slots[..., None].expand(-1, -1, 2))
    )
    square = torch.view_as_complex(torch.tensor(TEMPLATES[0]).double())
    points = points - points.mean(1, keepdim=True)
    turn = (points * square.conj()).sum(1, keepdim=True) / square.abs().square().sum()
    return torch.view_as_real(points / turn - square)


@pytest.mark.parametrize("sigma", [0.0, 0.05])
def test_corners_are_similar_to_their_template_up_to_the_noise(sigma):
    residual = local_noise(sigma)
    # a fit of four numbers to eight leaves half of the variance
    assert residual.square().mean().sqrt().item() == pytest.approx(sigma / math.sqrt(2), rel=0.05)


def test_scenes_fill_the_square_and_hold_whole_objects():
    scenes = draw_scenes(3000, 0.1, seed=2)
    assert scenes.points.nan_to_num(0.0).amin((1, 2)).eq(-1).all()
    assert scenes.points.nan_to_num(0.0).amax((1, 2)).sub(1).abs().max() < 1e-12
    assert torch.equal(scenes.present, ~scenes.points.isnan().any(-1))
    number = torch.arange(3)
    count = (scenes.objects[..., None] == number).sum(1)
    assert ((count == torch.tensor([4, 3, 4])) | (count == 0)).all()
    share = (count > 0).double().mean(0)
    assert (share - 4 / 7).abs().max() < 5 * math.sqrt(4 / 7 * 3 / 7 / 3000)
    again = [draw_scenes(5, 0.1, seed=2).points for _ in range(2)]
    torch.testing.assert_close(*again, rtol=0, atol=0, equal_nan=True)


def test_clutter_comes_in_every_number():
    scenes = draw_scenes(2000, 0.1, clutter=2, seed=3)
    stray = (scenes.present & (scenes.objects < 0)).sum(1)
    found = torch.bincount(stray) / 2000
    assert (found - 1 / 3).abs().max() < 5 * math.sqrt(2 / 9 / 2000)


def test_the_data_set_has_splits_and_its_user_file_too(tmp_path):
    data = load_dataset("constellations")
    assert data.train.images.shape == (9800, 11, 2) and len(data.validation) == 200
    assert len(data.test) == 2000 and data.test.images.dtype == torch.float32
    scenes = draw_scenes(10, 0.1, seed=4)
    path = tmp_path / "mine.npz"
    templates = np.full((2, 4, 2), np.nan)
    templates[0], templates[1, :3] = TEMPLATES[0], TEMPLATES[1]
    np.savez(path, points=scenes.points.nan_to_num(), present=scenes.present, templates=templates)
    mine = load_dataset(f"constellations:{path}")
    torch.testing.assert_close(mine.test.images.double(), scenes.points[-2:], equal_nan=True)
    points, present, shapes = read_scenes(path)
    assert torch.equal(present, scenes.present) and [len(shape) for shape in shapes] == [4, 3]
    torch.testing.assert_close(points, scenes.points, equal_nan=True)
    with pytest.raises(ValueError, match="no pixels"):
        _ = data.image_shape
    with pytest.raises(ValueError, match="size"):
        load_dataset("constellations", size=28)


def test_points_without_a_mask_are_present_unless_they_are_nan(tmp_path):
    points = draw_scenes(10, 0.1, seed=4).points
    points[:, -1] = np.nan
    np.savez(tmp_path / "mine.npz", points=points)
    assert torch.equal(read_scenes(tmp_path / "mine.npz")[1], ~points.isnan().any(-1))
    data = load_dataset(f"constellations:{tmp_path / 'mine.npz'}")
    assert data.train.labels is None and data.num_classes == 0


def test_bad_points_are_refused_with_a_remedy(tmp_path):
    points, present = np.zeros((3, 4, 2)), np.ones((3, 4))
    broken = points.copy()
    broken[1, 2, 0] = np.nan
    for wrong, words in (
        ((points[0], present), "points\\[None\\]"),
        ((points, present[:, 1:]), "present must be \\(3, 4\\)"),
        ((points, present / 2), "0 and 1"),
        ((broken, present), "set present to 0"),
        ((points, present * (np.arange(4) < 1)), "scene 0 has fewer than two points"),
    ):
        with pytest.raises(ValueError, match=words):
            check_points(*wrong)
    with pytest.raises(MissingData, match="cannot be read"):
        read_scenes(tmp_path / "nothing.npz")
    np.savez(tmp_path / "half.npz", present=present)
    with pytest.raises(ValueError, match="lacks points"):
        read_scenes(tmp_path / "half.npz")
    np.savez(tmp_path / "pickle.npz", points=np.array([None, 1], dtype=object), present=present)
    with pytest.raises(MissingData, match="cannot be read"):
        read_scenes(tmp_path / "pickle.npz")


def test_bad_templates_and_numbers_are_refused():
    for wrong in ([[[0.0, 0.0]]], [[[1.0, 1.0], [1.0, 1.0]]]):
        with pytest.raises(ValueError, match="fewer than two different points"):
            check_templates(wrong)
    with pytest.raises(ValueError, match="templates is empty"):
        check_templates([])
    for wrong in (dict(number=0), dict(number=2, clutter=-1), dict(number=2, sigma=-0.1)):
        with pytest.raises(ValueError, match="must be"):
            draw_scenes(**wrong)
