"""How nearly the templates of two parts are affine copies of each other.

A part that is an affine copy of another can take its place wherever it is drawn. If images are
turned, such parts swap: the same stroke is then found by one part upright, and by another turned.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from capsule_zoo.models.parts import poses
from capsule_zoo.models.parts.templates import warp_templates

COPY = 0.95  # likeness from which one template counts as a copy of another
_MARGIN = 2  # side of the canvas, in sides of a template
_RATE = 0.05


def likeness(templates: Tensor, turns: int = 8, steps: int = 50) -> Tensor:
    """Compute how alike each template can be made to each other one by an affine map, (P, P).

    The likeness is the cosine of the angle between two images, row i drawn as column j, at the best
    affine map that Adam finds from several turns. It is 1 on the diagonal.

    Args:
        templates: ink of P templates, (P, h, w), at least 0.
        turns: turns from which the search starts.
        steps: updates of Adam.
    """
    size = (_MARGIN * templates.shape[1], _MARGIN * templates.shape[2])
    parts = len(templates)
    rest = poses.identity_like(templates) / _MARGIN  # templates fill the middle of the canvas
    ink = templates.detach()[:, None]
    target = _drawn(ink, rest.expand(1, parts, 6), size)[0]  # (P, pixels)
    angle = 2 * math.pi * torch.arange(turns, dtype=rest.dtype, device=rest.device) / turns
    pose = poses.rotation(angle) / _MARGIN
    pose = pose[None, :, None].repeat(parts, 1, parts, 1).requires_grad_()  # (targets, T, P, 6)
    optimizer = torch.optim.Adam([pose], _RATE)
    best = templates.new_zeros(parts, parts)
    with torch.enable_grad():
        for _ in range(steps):
            drawn = _drawn(ink, pose.flatten(0, 1), size).unflatten(0, (parts, turns))
            cosine = F.cosine_similarity(drawn, target[:, None, None], dim=-1, eps=1e-6)
            best = torch.maximum(best, cosine.detach().amax(1).T)
            optimizer.zero_grad()
            (-cosine.sum()).backward()
            optimizer.step()
    return best


def copies(alike: Tensor, least: float = COPY) -> int:
    """Return the number of templates that have a copy, each of the other, given `likeness`."""
    mutual = torch.minimum(alike, alike.T).fill_diagonal_(0)
    return int((mutual.amax(1) >= least).sum())


def _drawn(ink: Tensor, pose: Tensor, size: tuple[int, int]) -> Tensor:
    """Draw templates (P, 1, h, w) at poses (B, P, 6) on a canvas, (B, P, pixels)."""
    return warp_templates(ink, pose, size)[:, 0].transpose(0, 1).flatten(2)
