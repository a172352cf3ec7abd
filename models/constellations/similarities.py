"""Similarities of the plane, and the evidence of points with the similarity integrated out.

A point (x, y) is the complex number x + iy. A similarity moves a corner p of a template to

    z = t + u p,    t = y_1 + i y_2,    u = y_3 - i y_4,    y ~ Normal(0, tau^2 I_4)

so that y acts linearly, with rows [1 0 p_x p_y] and [0 1 p_y -p_x]. A template is centered, with
sum p = 0, and has as many corners as sum |p|^2. The noise of a point is normal, with the standard
deviation s of each coordinate, where

    s^2 = floor^2 + (proportional |u|)^2

The first part is noise on the scene, the second one is noise on the template that was scaled with
it. Given n points z and their corners p the evidence depends on three numbers only: the mean of z,
S = sum |z - mean|^2 and |a|, where a = sum z conj(p). Noise on the scene alone leaves a Gaussian
integral. In general t and the angle of u have closed forms, and log |u| is left to a quadrature:

    p(z) = int d|u| |u| / tau^2 exp(-|u|^2 / (2 tau^2)) Normal(mean; 0, (tau^2 + s^2 / n) I_2)
               1 / (n (2 pi s^2)^(n-1)) exp(-(S + n |u|^2) / (2 s^2)) I_0(|u| |a| / s^2)
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

NODES = 17  # nodes of the quadrature over log |u|, which has an error of about 1e-5 nats
REACH = 2.8  # half range of the quadrature: sinh(2.8) = 8 standard deviations on either side
NEWTON_STEPS = 2  # Newton steps to the mode of log |u|, in tables of all subsets
MANY_STEPS = 12  # Newton steps for single matchings, which may be bad fits
NEARLY = 0.05  # largest distance of corners that a guide regards as symmetric
_LOG_2_PI = math.log(2 * math.pi)


@dataclass(frozen=True)
class Noise:
    """The standard deviations of a point's coordinates.

    Attributes:
        floor: standard deviation of the noise on the scene; above 0.
        proportional: standard deviation of the noise on the template, for scale |u| = 1.
    """

    floor: float
    proportional: float = 0.0

    def variance(self, scale: Tensor) -> Tensor:
        """Compute the noise variance s^2 for objects of these scales |u|."""
        return self.floor**2 + (self.proportional * scale) ** 2


@dataclass(frozen=True, eq=False)
class Template:
    """The corners of an object, centered and scaled to mean square distance 1.

    Attributes:
        corners: complex numbers, (n,).
        radius: factor by which the corners were divided.
    """

    corners: Tensor
    radius: float = 1.0

    @classmethod
    def of(cls, points: Tensor) -> "Template":
        """Return the template of points (n, 2), centered and scaled."""
        corners, radius = center_points(points)
        return cls(corners, float(radius))

    def __len__(self) -> int:
        return len(self.corners)

    @cached_property
    def rotations(self) -> Tensor:
        """The permutations of corners by rotations that keep the template, (rotations, n)."""
        return self._rotations(1e-6)

    @cached_property
    def near_rotations(self) -> Tensor:
        """The permutations by rotations that nearly keep a (learned, irregular) template."""
        return self._rotations(NEARLY)

    def _rotations(self, tolerance: float) -> Tensor:
        orders = []
        for order in itertools.permutations(range(len(self))):
            moved = self.corners[[*order]]
            rotation = (moved * self.corners.conj()).sum() / len(self)
            if (moved - rotation * self.corners).abs().max() < tolerance:
                orders.append(order)
        return torch.tensor(orders)

    @property
    def symmetry_order(self) -> int:
        """The number of rotations that keep the template."""
        return len(self.rotations)

    @cached_property
    def orders(self) -> Tensor:
        """One order of the corners for each class of equivalent orders, (n! / rotations, n)."""
        representatives: list[tuple[int, ...]] = []
        equivalents: set[tuple[int, ...]] = set()
        rotations = self.rotations.tolist()
        for order in itertools.permutations(range(len(self))):
            if order not in equivalents:
                representatives.append(order)
                equivalents |= {tuple(rotation[i] for i in order) for rotation in rotations}
        return torch.tensor(representatives)


def center_points(points: Tensor) -> tuple[Tensor, Tensor]:
    """Center and scale points (n, 2) to complex corners of mean square 1, and return the radius."""
    away = points - points.mean(0)
    radius = away.square().sum(1).mean().sqrt()
    return torch.view_as_complex((away / radius).contiguous()), radius


class Fit(NamedTuple):
    """The sufficient statistics of n points, which determine their evidence.

    Attributes:
        center: the mean of the points, complex.
        spread: S, the sum of squared distances from it.
        cross: a, the sum of points times conjugate corners, complex.
        number: n.
    """

    center: Tensor
    spread: Tensor
    cross: Tensor
    number: int


def fit_of(points: Tensor, corners: Tensor) -> Fit:
    """Compute the sufficient statistics of complex points (*batch, n), ordered as the corners."""
    center = points.mean(-1)
    spread = (points - center[..., None]).abs().square().sum(-1)
    return Fit(center, spread, (points * corners.conj()).sum(-1), points.shape[-1])


def log_evidence(fit: Fit, noise: Noise, tau: float, steps: int = NEWTON_STEPS) -> Tensor:
    """Compute log p(points) in nats, with the similarity integrated out.

    Args:
        fit: sufficient statistics of points, in the order of the corners.
        noise: on the points.
        tau: standard deviation of the pose.
        steps: Newton steps to the mode of log |u|; bad fits need many.
    """
    if noise.proportional == 0:
        return _gaussian(fit, noise.floor**2, tau)
    log_scale, weight = scale_nodes(fit, noise, tau, steps=steps)
    return (log_scale_density(fit, log_scale, noise, tau) + weight).logsumexp(-1)


def _gaussian(fit: Fit, variance: float, tau: float) -> Tensor:
    precision = fit.number / variance + tau**-2
    exponent = fit.cross.abs().square() / (2 * variance**2 * precision)
    rotation = exponent - fit.spread / (2 * variance) - math.log(tau**2 * precision)
    constant = -(fit.number - 1) * (_LOG_2_PI + math.log(variance)) - math.log(fit.number)
    place = tau**2 + variance / fit.number
    away = fit.center.abs().square()
    return rotation + constant - away / (2 * place) - _LOG_2_PI - math.log(place)


def log_scale_density(fit: Fit, log_scale: Tensor, noise: Noise, tau: float) -> Tensor:
    """Compute the joint log density of the points and of log |u|.

    Args:
        log_scale: (*batch, nodes), for a fit of (*batch).
    """
    number, away = fit.number, fit.center.abs().square()[..., None]
    scale = log_scale.exp()
    variance = noise.variance(scale)
    place = tau**2 + variance / number
    cross = fit.cross.abs()[..., None]
    misfit = (fit.spread[..., None] + number * scale.square() - 2 * scale * cross) / (2 * variance)
    return (
        2 * log_scale
        - scale.square() / (2 * tau**2)
        - 2 * math.log(tau)
        - away / (2 * place)
        - place.log()
        - (number - 1) * variance.log()
        - number * _LOG_2_PI
        - math.log(number)
        - misfit
        + torch.special.i0e(scale * cross / variance).log()
    )


def scale_nodes(
    fit: Fit, noise: Noise, tau: float, number: int = NODES, steps: int = NEWTON_STEPS
) -> tuple[Tensor, Tensor]:
    """Return the quadrature nodes of log |u| and their log weights, (*batch, nodes).

    With m the mode of log |u| and w the standard deviation there, node x is at m + w sinh(x), so
    that nodes are dense at the mode and reach far. On a smooth peak a sum over equidistant x
    converges exponentially with the number of nodes.
    """
    with torch.no_grad():
        middle, width = _mode(fit, noise, tau, steps)
        grid = torch.linspace(-REACH, REACH, number).to(middle)
        log_step = math.log(2 * REACH / (number - 1)) + grid.cosh().log()
        log_scale = middle[..., None] + width[..., None] * grid.sinh()
        return log_scale, width.log()[..., None] + log_step


def _mode(fit: Fit, noise: Noise, tau: float, steps: int) -> tuple[Tensor, Tensor]:
    """Estimate the mode of log |u|, and the standard deviation around it.

    Newton steps begin at the best of three values: the mode without noise on the template, the
    mode without noise on the scene, and one between them.
    """
    cross, spread = fit.cross.abs(), fit.spread.clamp(min=noise.floor**2)
    powers = 8 * (fit.number - 1) * noise.proportional**2
    inverse = (cross + (cross.square() + powers * spread).sqrt()) / (2 * spread)
    ends = torch.stack([cross / fit.number, 1 / inverse], -1).clamp(1e-4 * tau, 10 * tau).log()
    starts = torch.cat([ends, ends.mean(-1, keepdim=True)], -1)
    best = log_scale_density(fit, starts, noise, tau).argmax(-1, keepdim=True)
    middle = starts.gather(-1, best)[..., 0]
    delta, width = 1e-3, torch.full_like(middle, 0.1)
    offsets = torch.tensor([-delta, 0.0, delta]).to(middle)
    for _ in range(steps):
        nearby = log_scale_density(fit, middle[..., None] + offsets, noise, tau)
        below, here, above = nearby.unbind(-1)
        curvature = ((2 * here - above - below) / delta**2).clamp(min=1.0)
        width = curvature.rsqrt()
        middle = middle + ((above - below) / (2 * delta) / curvature).clamp(-0.3, 0.3)
    return middle, width


def subsets(number: int, size: int) -> Tensor:
    """Return all subsets of `size` out of `number` points, (C(number, size), size)."""
    return torch.combinations(torch.arange(number), size)


def tuple_evidence(points: Tensor, template: Template, noise: Noise, tau: float) -> Tensor:
    """Compute the log evidence of every subset of points in every order of the corners.

    Args:
        points: complex, (B, n).

    Returns:
        (B, subsets, orders): row k, order l puts point `subsets(n, len(template))[k, i]` at the
        corner `template.orders[l, i]`. Each order stands for `template.symmetry_order` equal ones.
    """
    subset_points = points[:, subsets(points.shape[1], len(template))]  # (B, subsets, size)
    center = subset_points.mean(-1)
    spread = (subset_points - center[..., None]).abs().square().sum(-1)
    corners = template.corners.to(points)[template.orders]  # (orders, size)
    cross = subset_points @ corners.conj().mT
    fit = Fit(
        center[..., None].expand_as(cross), spread[..., None].expand_as(cross), cross, len(template)
    )
    template_noise = Noise(noise.floor, noise.proportional / template.radius)
    return log_evidence(fit, template_noise, tau)


def place_corners(pose: Tensor, corners: Tensor) -> Tensor:
    """Move complex corners (n,) by poses y (*batch, 4); returns complex (*batch, n)."""
    place = torch.complex(pose[..., 0], pose[..., 1])
    rotation = torch.complex(pose[..., 2], -pose[..., 3])
    return place[..., None] + rotation[..., None] * corners


def as_complex(points: Tensor) -> Tensor:
    """Return points (*batch, 2) as complex numbers (*batch)."""
    return torch.view_as_complex(points.contiguous())


def first_alike(
    templates: Sequence[Template], alike: Callable[[Template, Template], bool]
) -> tuple[int, ...]:
    """Return, for each template, the index of the first template that is alike."""
    return tuple(
        next(k for k, first in enumerate(templates) if first is template or alike(template, first))
        for template in templates
    )


def equal(one: Template, other: Template) -> bool:
    """Return True if two templates have equal corners, in equal order."""
    return (
        len(one) == len(other)
        and torch.allclose(other.corners, one.corners)
        and abs(other.radius - one.radius) < 1e-9
    )


def nearly_equal(one: Template, other: Template) -> bool:
    """Return True if two objects have nearly equal templates, corner by corner."""
    if len(one) != len(other):
        return False
    away = (one.corners * one.radius - other.corners * other.radius).abs().max()
    return bool(away < NEARLY * one.radius)
