"""Rendering of templates: warping by affine poses, and composition of layers.

All are pure tensor functions. Layers are kept part-major, (parts, channels, B, height, width),
because all images share the templates: one `grid_sample` per call then reads each template once for
the batch, instead of copying it for every image.
"""

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from capsule_zoo.models.networks.leading import flat_batch
from capsule_zoo.models.parts import poses


@lru_cache(maxsize=16)
@torch.inference_mode(False)  # the cached tensor is used in training too
def _pixel_centers(height: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the matrix (6, height * width * 2) from a pose (6,) to moved pixel centers.

    The product holds x and y of all pixel centers, which lie in [-1, 1]^2, mapped by the
    pose. One matrix product for all poses is twice as fast as one for each, and has the order that
    `grid_sample` reads.
    """
    y = (torch.arange(height, dtype=dtype, device=device) + 0.5) / height * 2 - 1
    x = (torch.arange(width, dtype=dtype, device=device) + 0.5) / width * 2 - 1
    grid_y, grid_x = torch.meshgrid(y, x, indexing="ij")
    centers = torch.stack([grid_x, grid_y, torch.ones_like(grid_x)]).flatten(1)  # (3, pixels)
    return torch.block_diag(centers, centers).unflatten(1, (2, -1)).mT.flatten(1)


def faint(shape: tuple[int, int, int, int]) -> Tensor:
    """Return the initial logits of templates, gray and nearly transparent.

    Strong templates would at first cover more background than ink. A guide would then learn to
    shrink its parts and to hide them in the corners, where no gradient brings them back.

    Args:
        shape: (parts, channels + 1, h, w), alpha last.
    """
    logits = 0.1 * torch.randn(shape)
    logits[:, -1] -= 3
    return logits


def warp_templates(templates: Tensor, pose: Tensor, size: tuple[int, int]) -> Tensor:
    """Warp templates into the image frame by bilinear interpolation, with zeros outside.

    Args:
        templates: (parts, channels, h, w), each spanning its own frame [-1, 1]^2. If every outer
            index has its own templates, (*outer, 1, parts, channels, h, w).
        pose: (*outer, B, parts, 6), part frame to image frame.
        size: (height, width) of the image.

    Returns:
        Layers (parts, channels, B, height, width); the outer dims are flattened into B.
    """
    if templates.dim() > 4:
        return _warp_stacks(templates, pose, size)
    pose = flat_batch(pose, 2)
    height, width = size
    parts, channels = templates.shape[:2]
    batch = pose.shape[0]
    to_part = poses.inverse(pose).transpose(0, 1).reshape(parts * batch, 6)
    # an export has tensors without data, which must not be cached
    centers = _pixel_centers.__wrapped__ if torch.compiler.is_exporting() else _pixel_centers
    grid = to_part @ centers(height, width, pose.dtype, pose.device)
    layers = F.grid_sample(
        templates, grid.view(parts, batch * height, width, 2), align_corners=False
    )
    return layers.view(parts, channels, batch, height, width)


def _warp_stacks(templates: Tensor, pose: Tensor, size: tuple[int, int]) -> Tensor:
    """Apply `warp_templates` to templates that differ between outer indices."""
    outer = pose.shape[:-3]
    stacks = templates.squeeze(-5).expand(*outer, *templates.shape[-4:]).flatten(0, len(outer) - 1)
    pairs = zip(stacks, pose.flatten(0, len(outer) - 1), strict=True)
    return torch.cat([warp_templates(*pair, size) for pair in pairs], dim=2)


def over(color: Tensor, alpha: Tensor, background: Tensor) -> Tensor:
    """Compose layers over a background, the last on top (Porter & Duff's *over*).

    Args:
        color: (parts, channels, B, height, width).
        alpha: opacity in [0, 1], (parts, 1, B, height, width).
        background: (channels, 1 or B, height, width) or anything that broadcasts to it.

    Returns:
        The composite (channels, B, height, width).
    """
    canvas = background.expand(color.shape[1:])
    # unbind, not indexing: the backward of an index fills a zero tensor of the whole stack per part
    for layer, opacity in zip(color.unbind(0), alpha.unbind(0), strict=True):
        canvas = torch.lerp(canvas, layer, opacity.expand_as(layer))
    return canvas


def visibility(alpha: Tensor) -> Tensor:
    """Compute the fraction of each layer that the layers above leave visible, shaped as `alpha`.

    `(visibility * color).sum(0)` is the composite over a black background.
    """
    through = torch.cumprod((1 - alpha).flip(0), dim=0)
    above = torch.cat([torch.ones_like(alpha[:1]), through[:-1]]).flip(0)
    return alpha * above
