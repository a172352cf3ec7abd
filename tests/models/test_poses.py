"""Distributions of the affine group: `poses` against homogeneous matrices, in float64."""

import pytest
import torch

from capsule_zoo.models.parts import poses


@pytest.fixture
def some_poses():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 50, 6, dtype=torch.float64, generator=generator)


def test_compose_is_the_matrix_product(some_poses):
    outer, inner = some_poses
    product = poses.to_matrix(outer) @ poses.to_matrix(inner)
    torch.testing.assert_close(poses.to_matrix(poses.compose(outer, inner)), product)


def test_inverse_composes_to_the_identity(some_poses):
    pose = some_poses[0]
    identity = poses.identity_like(pose).expand_as(pose)
    torch.testing.assert_close(poses.compose(pose, poses.inverse(pose)), identity)
    torch.testing.assert_close(poses.compose(poses.inverse(pose), pose), identity)


def test_matrices_round_trip(some_poses):
    assert torch.equal(poses.from_matrix(poses.to_matrix(some_poses)), some_poses)


def test_a_singular_pose_has_a_finite_inverse_and_gradient():
    collapsed = torch.zeros(3, 6, dtype=torch.float64)
    collapsed[1] = torch.tensor([1.0, 2.0, 0.0, 2.0, 4.0, 0.0])  # rank one
    collapsed[2] = torch.tensor([1e-9, 0.0, 0.3, 0.0, -1e-9, 0.1])
    collapsed.requires_grad_()
    inverse = poses.inverse(collapsed)
    inverse.sum().backward()
    assert inverse.isfinite().all() and collapsed.grad.isfinite().all()


def test_rotation_turns_right_into_down():
    quarter = poses.rotation(torch.tensor(torch.pi / 2, dtype=torch.float64))
    right = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)
    down = torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64)
    torch.testing.assert_close(poses.to_matrix(quarter) @ right, down)


@pytest.mark.parametrize("anisotropy", [None, 1.5])
def test_parameters_give_poses_within_their_bounds(anisotropy):
    raw = 10 * torch.randn(1000, 6, generator=torch.Generator().manual_seed(1)).double()
    pose = poses.from_parameters(raw, min_scale=0.1, max_scale=0.6, anisotropy=anisotropy)
    linear = poses.to_matrix(pose)[:, :2, :2]
    assert pose[:, [2, 5]].abs().max() <= 1
    determinant = torch.linalg.det(linear)
    assert (determinant > 0.1**2 - 1e-12).all() and (determinant < 0.6**2 + 1e-12).all()
    if anisotropy is not None:  # rotation @ diag @ shear: each factor's condition is bounded
        bound = anisotropy * ((anisotropy - 1) / 2 + (1 + (anisotropy - 1) ** 2 / 4) ** 0.5) ** 2
        assert (torch.linalg.cond(linear) <= bound + 1e-9).all()


@pytest.mark.parametrize("anisotropy", [None, 1.5])
def test_parameters_split_into_rotation_scale_and_shear(anisotropy):
    raw = torch.tensor([0.3, -0.2, 0.1, 0.05, 0.1, -0.3], dtype=torch.float64)
    width, height = 0.01 + raw[0].sigmoid(), 0.01 + raw[1].sigmoid()
    shear = torch.eye(2, dtype=torch.float64)
    shear[0, 1] = torch.tanh(5 * raw[3])
    if anisotropy is not None:  # one size, and width over height between 1 / 1.5 and 1.5
        stretch = anisotropy ** (raw[1].tanh() / 2)
        width, height = width * stretch, width / stretch
        shear[0, 1] = 0.5 * torch.tanh(raw[3])
    scale = torch.diag(torch.stack([width, height]))
    matrix = poses.to_matrix(poses.rotation(2 * torch.pi * raw[2]))[:2, :2]
    expected = torch.cat([matrix @ scale @ shear, torch.tanh(5 * raw[4:])[:, None]], dim=1)
    pose = poses.from_parameters(raw, anisotropy=anisotropy)
    torch.testing.assert_close(pose, poses.from_matrix(expected))


def test_components_name_every_regular_pose_once():
    pose = torch.randn(200, 6, dtype=torch.float64)
    determinant = torch.linalg.det(poses.to_matrix(pose))
    assert (determinant < 0).any() and (determinant > 0).any()
    named = poses.to_components(pose)
    torch.testing.assert_close(poses.from_components(named), pose)
    torch.testing.assert_close(poses.to_components(poses.from_components(named)), named)


def test_components_are_place_angle_size_stretch_and_shear():
    angle = torch.tensor(0.7, dtype=torch.float64)
    rotated = poses.to_components(2 * poses.rotation(angle))
    torch.testing.assert_close(rotated, rotated.new_tensor([0, 0, 0.7, 2, 1, 0]))
    drawn_out = rotated.new_tensor(
        [3.0, 0, 0.5, 0, 1, -0.5]
    )  # three wide, one high, off the middle
    expected = rotated.new_tensor([0.5, -0.5, 0, 3**0.5, 3, 0])
    torch.testing.assert_close(poses.to_components(drawn_out), expected)
    mirrored = rotated.new_tensor([1.0, 0.5, 0, 0, -1, 0])
    torch.testing.assert_close(
        poses.to_components(mirrored), rotated.new_tensor([0, 0, 0, -1, 1, 0.5])
    )
    assert poses.to_components(torch.zeros(6)).isfinite().all()
