"""Poses that follow a motion exactly have no error, and those that stay have the motion itself."""

import pytest
import torch
from miniature import few_digits, names_in_record

from capsule_zoo.data import transforms
from capsule_zoo.experiments import Options, reproduce
from capsule_zoo.experiments.part_whole import equivariance as part_whole_equivariance
from capsule_zoo.experiments.part_whole.equivariance import as_pose, errors
from capsule_zoo.models.parts import poses
from capsule_zoo.registry import create, save, small_sizes

SIDE = 12


@pytest.fixture
def entry():
    torch.manual_seed(0)
    return create("part-whole", **small_sizes("part-whole"))


def drawn(entry, batch: int = 4) -> dict[str, torch.Tensor]:
    found = {}
    for level in entry.model.levels:
        found[f"{level.name}_presence"] = torch.ones(batch, level.size)
        raw = torch.randn(batch, level.size, 6)
        found[f"{level.name}_pose"] = poses.from_parameters(0.2 * raw)
    return found


@pytest.mark.parametrize("degrees, shift", [(0.0, (3.0, 0.0)), (30.0, (0.0, 0.0))])
def test_errors_are_zero_or_the_motion_itself(entry, degrees, shift):
    motion = as_pose(transforms.motion(degrees, shift=shift)[0], SIDE)
    before = drawn(entry)
    follow = {k: poses.compose(motion, v) if "pose" in k else v for k, v in before.items()}
    stay = errors(entry.guide, before, before, motion, SIDE)
    for level in ("object", "part"):
        moved = errors(entry.guide, before, follow, motion, SIDE)
        assert moved[f"{level}_place_error"][0] == pytest.approx(0, abs=1e-4)
        assert moved[f"{level}_angle_error"][0] == pytest.approx(0, abs=1e-2)
        assert stay[f"{level}_place_error"] == stay[f"{level}_place_motion"]
        assert stay[f"{level}_angle_error"][0] == pytest.approx(degrees, abs=0.1 + degrees / 3)
        if not degrees:
            assert stay[f"{level}_place_error"][0] == pytest.approx(3, abs=1e-5)


def test_the_pose_of_a_motion_moves_things_as_the_image_moves():
    """A dot right of the middle, turned by a quarter, counter-clockwise as seen, is above it."""
    image = torch.zeros(1, 1, SIDE, SIDE)
    image[..., 5:7, 9:11] = 1
    motion = transforms.motion(90.0)
    moved = transforms.warp_images(image, motion)
    assert moved[..., 1:3, 5:7].min() > 0.9
    dot = poses.identity_like(image).clone()
    dot[2] = 2 * 4 / SIDE
    place = poses.compose(as_pose(motion[0], SIDE), dot)
    assert place[2] == pytest.approx(0, abs=1e-6) and place[5] == pytest.approx(-2 * 4 / SIDE)


def test_capsules_that_vanish_do_not_count(entry):
    before = drawn(entry)
    after = {name: value.clone() for name, value in before.items()}
    after["part_presence"][:, 1:] = 0
    after["part_pose"][:, 1:] += 9
    found = errors(entry.guide, before, after, poses.identity_like(after["part_pose"]), SIDE)
    assert found["part_place_error"][0] == pytest.approx(0, abs=1e-5)
    assert found["part_seen"][0] == pytest.approx(1 / entry.model.levels[-1].size)
    assert found["object_seen"][0] == 1


def test_a_run_is_measured_and_another_family_is_refused(monkeypatch, tmp_path, entry):
    monkeypatch.setattr(
        part_whole_equivariance, "load_dataset", lambda *a, **k: few_digits(9, 6, SIDE)
    )
    save(entry, tmp_path / "run", data="digits", seed=0)
    options = Options(run=str(tmp_path / "run"), progress=False)
    settings = dict(shifts=(0.5, 2.0), degrees=(10.0,))
    names, figures = names_in_record("part-whole/equivariance", options, tmp_path, **settings)
    assert {
        "part_place_error_0_5_pixels",
        "part_place_error_2_pixels",
        "object_angle_error_10_degrees",
    } <= names
    assert figures == {""}
    save(create("vae", **small_sizes("vae")), tmp_path / "vae", data="digits", seed=0)
    with pytest.raises(ValueError, match="part-whole capsules are needed"):
        reproduce("part-whole/equivariance", Options(run=str(tmp_path / "vae"), progress=False))
