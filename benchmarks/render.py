"""Compare the renderer with a naive one: `affine_grid`, `grid_sample` and a loop of "over".

Both draw 24 parts into 128 images of 28x28 pixels, forward and backward, from equal templates,
poses and presences. The naive renderer copies every template for every image.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from harness import Benchmark, Contestants, main
from torch import Tensor

from capsule_zoo.models.parts import poses, templates

IMAGES, PARTS, TEMPLATE, SIZE = 128, 24, 11, 28


def zoo(paint: Tensor, pose: Tensor, presence: Tensor) -> Tensor:
    """Render mean images (B, 1, H, W) with `capsule_zoo.models.parts.templates`."""
    drawn = templates.warp_templates(paint, pose, (SIZE, SIZE))
    color, alpha = drawn[:, :-1], drawn[:, -1:] * presence.T[:, None, :, None, None]
    black = paint.new_zeros(1, 1, SIZE, SIZE)
    return templates.over(color, alpha, black).transpose(0, 1)


def obvious(paint: Tensor, pose: Tensor, presence: Tensor) -> Tensor:
    """Render the mean images with textbook calls: one copy of each template for each image."""
    batch, parts = presence.shape
    to_part = torch.linalg.inv(poses.to_matrix(pose))[..., :2, :].flatten(0, 1)
    grid = F.affine_grid(to_part, [batch * parts, 2, SIZE, SIZE], align_corners=False)
    copies = paint.expand(batch, *paint.shape).flatten(0, 1)
    drawn = F.grid_sample(copies, grid, align_corners=False).unflatten(0, (batch, parts))
    canvas = paint.new_zeros(batch, 1, SIZE, SIZE)
    for part in range(parts):
        alpha = drawn[:, part, 1:] * presence[:, part, None, None, None]
        canvas = alpha * drawn[:, part, :1] + (1 - alpha) * canvas
    return canvas


Renderer = Callable[[Tensor, Tensor, Tensor], Tensor]


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Return random templates with their alphas, poses and presences."""
    torch.manual_seed(0)
    paint = torch.rand(PARTS, 2, TEMPLATE, TEMPLATE)
    pose = poses.from_parameters(0.3 * torch.randn(IMAGES, PARTS, 6))
    presence = torch.rand(IMAGES, PARTS)
    return paint.requires_grad_(), pose.requires_grad_(), presence.requires_grad_()


def slopes(render: Renderer, leaves: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Return the gradients of the image's mean square in all inputs."""
    return torch.autograd.grad(render(*leaves).square().mean(), leaves)


def make() -> Contestants:
    leaves = inputs()
    return {"zoo": lambda: slopes(zoo, leaves), "affine_grid": lambda: slopes(obvious, leaves)}


def check() -> None:
    leaves = inputs()
    torch.testing.assert_close(zoo(*leaves), obvious(*leaves), rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(slopes(zoo, leaves), slopes(obvious, leaves), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


if __name__ == "__main__":
    data = f"{IMAGES} images, {PARTS} parts, templates {TEMPLATE}x{TEMPLATE}, {SIZE}x{SIZE} pixels"
    main(Benchmark("render", make, check, "zoo", ("affine_grid",), data))
