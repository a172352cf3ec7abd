"""Poses: affine maps of the plane, each as the six numbers of a 2x3 matrix.

A pose is `[R | tau] = [[a, b, x], [c, d, y]]`, stored row by row as `(a, b, x, c, d, y)`. It maps a
capsule's own frame, the square [-1, 1]^2 with x to the right and y downwards, into its parent's
frame. All functions take and give tensors (..., 6), broadcast, and are differentiable.
"""

import math

import torch
from torch import Tensor

IDENTITY = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0)
MIN_DETERMINANT = 1e-4


def identity_like(tensor: Tensor) -> Tensor:
    """Return the identity pose (6,) in the dtype and on the device of `tensor`."""
    return tensor.new_tensor(IDENTITY)


def to_matrix(pose: Tensor) -> Tensor:
    """Convert poses (..., 6) to homogeneous matrices (..., 3, 3)."""
    last = pose.new_tensor([0.0, 0.0, 1.0]).expand(*pose.shape[:-1], 1, 3)
    return torch.cat([pose.unflatten(-1, (2, 3)), last], dim=-2)


def from_matrix(matrix: Tensor) -> Tensor:
    """Convert matrices (..., 2, 3), or homogeneous ones (..., 3, 3), to poses (..., 6)."""
    return matrix[..., :2, :].flatten(-2)


def compose(outer: Tensor, inner: Tensor) -> Tensor:
    """Compute the pose (..., 6) that first applies `inner`, then `outer`."""
    a, b, x, c, d, y = outer.unbind(-1)
    e, f, u, g, h, v = inner.unbind(-1)
    return torch.stack(
        [
            a * e + b * g,
            a * f + b * h,
            a * u + b * v + x,
            c * e + d * g,
            c * f + d * h,
            c * u + d * v + y,
        ],
        dim=-1,
    )


def inverse(pose: Tensor) -> Tensor:
    """Compute the inverse pose (..., 6), with the determinant kept away from zero.

    The determinant is at least `MIN_DETERMINANT` in size. With this floor a pose that collapses
    during training shrinks its capsule to (almost) nothing instead of giving infinities and NaN
    gradients. Regular poses are inverted exactly.
    """
    a, b, x, c, d, y = pose.unbind(-1)
    determinant = a * d - b * c
    floor = torch.where(determinant < 0, -MIN_DETERMINANT, MIN_DETERMINANT).to(pose.dtype)
    determinant = torch.where(determinant.abs() < MIN_DETERMINANT, floor, determinant)
    a, b, c, d = d / determinant, -b / determinant, -c / determinant, a / determinant
    return torch.stack([a, b, -(a * x + b * y), c, d, -(c * x + d * y)], dim=-1)


def from_parameters(
    raw: Tensor, min_scale: float = 0.01, max_scale: float = 1.01, anisotropy: float | None = None
) -> Tensor:
    """Compute poses from unconstrained numbers (..., 6) that start at sensible values.

    With raw = (s_x, s_y, angle, shear, x, y), the pose is rotation(2 pi angle) @ scale @ shear:

        R = [[cos, -sin], [sin, cos]] @ diag(s_x, s_y) @ [[1, h], [0, 1]],   tau = tanh(5 (x, y)),

    scales are `min_scale + sigmoid(.) (max_scale - min_scale)`, h = tanh(5 shear).

    Args:
        raw: unconstrained parameters (..., 6).
        min_scale, max_scale: bounds of both scales, in units of half an image.
        anisotropy: when given, bounds s_x / s_y to [1 / anisotropy, anisotropy] and |h| to
            `anisotropy - 1`, so that a part keeps its own shape; None leaves both free.
    """
    width, height, angle, shear, x, y = raw.unbind(-1)
    span = max_scale - min_scale
    if anisotropy is None:
        s_x, s_y = (min_scale + span * s.sigmoid() for s in (width, height))
        h = torch.tanh(5 * shear)
    else:
        size = min_scale + span * width.sigmoid()
        stretch = torch.exp(0.5 * math.log(anisotropy) * torch.tanh(height))
        s_x, s_y = size * stretch, size / stretch
        h = (anisotropy - 1) * torch.tanh(shear)
    return _from_factors(2 * math.pi * angle, s_x, s_y, h, torch.tanh(5 * x), torch.tanh(5 * y))


def from_components(components: Tensor) -> Tensor:
    """Compute poses (..., 6) from position, angle, size, stretch and shear.

    With components = (x, y, angle, size, stretch, shear):

        R = [[cos, -sin], [sin, cos]] @ diag(width, height) @ [[1, shear], [0, 1]],   tau = (x, y),
        width = |size| sqrt(stretch),   height = size / sqrt(stretch),   det R = size |size|.

    Args:
        components: (..., 6); the angle is in radians, clockwise as seen; a negative size mirrors;
            the stretch is positive.
    """
    x, y, angle, size, stretch, shear = components.unbind(-1)
    width, height = size.abs() * stretch.sqrt(), size * stretch.rsqrt()
    return _from_factors(angle, width, height, shear, x, y)


def _from_factors(
    angle: Tensor, s_x: Tensor, s_y: Tensor, shear: Tensor, x: Tensor, y: Tensor
) -> Tensor:
    """Return rotation(angle) @ diag(s_x, s_y) @ [[1, shear], [0, 1]] with (x, y), (..., 6)."""
    cos, sin = angle.cos(), angle.sin()
    first = [cos * s_x, cos * s_x * shear - sin * s_y, x]
    second = [sin * s_x, sin * s_x * shear + cos * s_y, y]
    return torch.stack(first + second, dim=-1)


def to_components(pose: Tensor) -> Tensor:
    """Decompose poses into the arguments of `from_components`, (..., 6); angle in [-pi, pi].

    Sides shorter than `MIN_DETERMINANT` are treated as this long, because a collapsed pose has no
    angle.
    """
    a, b, x, c, d, y = pose.unbind(-1)
    determinant, length = a * d - b * c, torch.hypot(a, c)
    width = length.clamp(min=MIN_DETERMINANT)
    height = (determinant.abs() / width).clamp(min=MIN_DETERMINANT)
    size = torch.where(determinant < 0, -1, 1) * (width * height).sqrt()
    shear = (a * b + c * d) / width.square()
    return torch.stack([x, y, torch.atan2(c, a), size, width / height, shear], dim=-1)


def rotation(angle: Tensor) -> Tensor:
    """Return poses (..., 6) that rotate by `angle` (...) radians, clockwise as seen (y is down)."""
    cos, sin, zero = torch.cos(angle), torch.sin(angle), torch.zeros_like(angle)
    return torch.stack([cos, -sin, zero, sin, cos, zero], dim=-1)
