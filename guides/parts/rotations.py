"""Views of an image: with centered ink, and at the rotation with the highest likelihood.

An encoder that must parse every rotation of a digit parses each of them less well. Here the encoder
sees the image at several rotations. The model, whose objects may have any angle, then scores which
parse explains the original image best:

    z_k    ~ rotation(angle_k) q(. | image rotated by angle_k)      # one draw for each rotation
    angle* = argmax_k log p(image, z_k) - log q(z_k)

A guide that then draws again at angle* is an ordinary approximate posterior, and its ELBO is a
bound. If the model is invariant under the rotations, the guide is equivariant under them, even
untrained.
"""

import math

import torch
import torch.nn.functional as F
from pyro import poutine
from torch import Tensor

from capsule_zoo.guides.base import Guide
from capsule_zoo.models.common.modes import eval_mode
from capsule_zoo.models.common.param_store import StoredValues
from capsule_zoo.models.common.trace_density import log_density
from capsule_zoo.models.part_whole import PartWholeCapsules
from capsule_zoo.models.parts import poses


def rotate_images(images: Tensor, angle: Tensor) -> Tensor:
    """Rotate square images (B, C, H, H) counter-clockwise as seen by `angle` (B,), in radians.

    A thing with the pose A in the rotated image has the pose `rotation(angle) A` in the original
    image.
    """
    return _seen_from(images, poses.rotation(angle))


def center_images(images: Tensor) -> tuple[Tensor, Tensor]:
    """Move images (B, C, H, W) by whole pixels until the mean of their ink is in the middle.

    Returns:
        The images, and the poses (B, 6) that move their content back to its position.
    """
    pixel = 2 / images.new_tensor([images.shape[-1], images.shape[-2]])
    back = poses.identity_like(images).repeat(len(images), 1)
    centers = F.affine_grid(back[:1].view(1, 2, 3), [1, 1, *images.shape[-2:]], align_corners=False)
    ink = images.sum(1).flatten(1)  # (B, pixels)
    fraction = ink / ink.sum(1, keepdim=True).clamp(min=1e-6)
    back[:, 2::3] = (fraction @ centers.view(-1, 2) / pixel).round() * pixel
    return _seen_from(images, back), back


def _seen_from(images: Tensor, pose: Tensor) -> Tensor:
    """Return images (B, C, H, W) resampled in the frames (B, 6): bilinear, zero outside."""
    grid = F.affine_grid(pose.view(-1, 2, 3), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False).clamp(0, 1)


@torch.no_grad()
def best_rotation(
    guide: Guide, images: Tensor, rotations: int, model: PartWholeCapsules | None = None
) -> Tensor:
    """Return the rotation of each image, among `rotations` equally spaced ones, explained best.

    All rotations are scored with the same noise.

    Args:
        guide: a guide to part-whole capsules that takes the `angle` of each image.
        images: (B, C, H, H).
        model: the model that scores; the guide's own by default. A model that was trained with
            upright objects scores rotated objects fairly as
            `model.sharing_parameters(pose=replace(model.pose, rotations=rotations))`.

    Returns:
        (B,), in radians; to be passed to the guide or to `rotate_images`.
    """
    model = (guide.model if model is None else model).with_selection("marginal")
    angles = images.new_tensor(range(rotations)) * (2 * math.pi / rotations)
    seed = int(torch.randint(2**31, ()))
    scores = []
    hidden = poutine.block(), StoredValues()  # the block hides parameters from outer handlers
    with hidden[0], hidden[1], torch.random.fork_rng(), eval_mode(guide):
        for angle in angles:
            torch.manual_seed(seed)
            draws = poutine.trace(guide).get_trace(images, angle=angle.expand(len(images)))
            joint = poutine.trace(poutine.replay(model, trace=draws)).get_trace(images)
            scores.append(log_density(joint, images) - log_density(draws, images))
    return angles[torch.stack(scores).argmax(0)]
