"""The renderer against a slow per-pixel reference, in float64."""

import math

import torch

from capsule_zoo.models.parts import poses, templates


def pixel_by_pixel(template, pose, height, width):
    """Render a channel (h, w) under one pose (6,) by bilinear interpolation, pixel by pixel."""
    h, w = template.shape
    to_part = torch.linalg.inv(poses.to_matrix(pose))
    image = torch.zeros(height, width, dtype=template.dtype)
    for row in range(height):
        for column in range(width):
            x, y = (column + 0.5) / width * 2 - 1, (row + 0.5) / height * 2 - 1
            u, v, _ = (to_part @ torch.tensor([x, y, 1.0], dtype=template.dtype)).tolist()
            u, v = (u + 1) / 2 * w - 0.5, (v + 1) / 2 * h - 0.5  # in template pixels
            for i in (math.floor(v), math.floor(v) + 1):
                for j in (math.floor(u), math.floor(u) + 1):
                    if 0 <= i < h and 0 <= j < w:
                        image[row, column] += (1 - abs(v - i)) * (1 - abs(u - j)) * template[i, j]
    return image


def random_scene(parts=3, batch=2, channels=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    paint = torch.rand(parts, channels + 1, 4, 5, dtype=torch.float64, generator=generator)
    raw = 0.7 * torch.randn(batch, parts, 6, dtype=torch.float64, generator=generator)
    presence = torch.rand(batch, parts, dtype=torch.float64, generator=generator)
    return paint, poses.from_parameters(raw), presence


def test_warp_equals_the_per_pixel_reference():
    paint, pose, _ = random_scene()
    layers = templates.warp_templates(paint, pose, (7, 6))
    assert layers.shape == (3, 4, 2, 7, 6)
    for part in range(3):
        for channel in range(4):
            for image in range(2):
                expected = pixel_by_pixel(paint[part, channel], pose[image, part], 7, 6)
                torch.testing.assert_close(layers[part, channel, image], expected)


def test_over_equals_the_per_pixel_reference():
    paint, pose, presence = random_scene()
    layers = templates.warp_templates(paint, pose, (7, 6))
    color, alpha = layers[:, :3], layers[:, 3:] * presence.T[:, None, :, None, None]
    background = torch.rand(3, 1, 7, 6, dtype=torch.float64)
    expected = background.expand(3, 2, 7, 6).clone()
    for part in range(3):
        expected = alpha[part] * color[part] + (1 - alpha[part]) * expected
    torch.testing.assert_close(templates.over(color, alpha, background), expected)
    black = templates.over(color, alpha, torch.zeros_like(background))
    torch.testing.assert_close((templates.visibility(alpha) * color).sum(0), black)


def test_the_identity_pose_at_the_template_size_returns_the_template():
    paint, _, _ = random_scene()
    identity = poses.identity_like(paint).expand(2, 3, 6)
    layers = templates.warp_templates(paint, identity, (4, 5))
    torch.testing.assert_close(layers[:, :, 0], paint)


def test_gradients_by_finite_differences():
    paint, pose, presence = random_scene(parts=2, batch=1, channels=1)

    def draw(paint, pose, presence):
        layers = templates.warp_templates(paint, pose, (5, 5))
        alpha = layers[:, 1:] * presence.T[:, None, :, None, None]
        return templates.over(layers[:, :1], alpha, torch.zeros(1, 1, 5, 5, dtype=paint.dtype))

    inputs = [tensor.clone().requires_grad_() for tensor in (paint, pose, presence)]
    assert torch.autograd.gradcheck(draw, inputs)


def test_a_part_far_outside_leaves_no_trace():
    paint, pose, _ = random_scene()
    pose[..., 2] = 10.0
    assert templates.warp_templates(paint, pose, (7, 6)).abs().max() == 0


def test_new_templates_leave_nearly_all_of_the_background():
    torch.manual_seed(0)
    paint = templates.faint((16, 4, 11, 11)).sigmoid()
    alone = torch.eye(2, 3).reshape(1, 1, 6).expand(1, 16, 6)  # every part fills the image
    color, alpha = templates.warp_templates(paint, alone, (11, 11)).split([3, 1], dim=1)
    image = templates.over(color, alpha, torch.zeros(3, 1, 1, 1))
    assert alpha.max() < 0.1 and 0 < image.mean() < 0.5
    assert abs(paint[:, :3].mean() - 0.5) < 0.01
