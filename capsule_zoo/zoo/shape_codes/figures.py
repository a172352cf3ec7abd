"""Figures of shape codes: kinds under different codes, and one digit that becomes another."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from capsule_zoo.figures.grids import image_rows
from capsule_zoo.guides.base import Guide
from capsule_zoo.inference import infer
from capsule_zoo.models import Capsules, ShapeCodes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STEPS = 9  # codes of a kind, or steps of a morph: columns of the figure
_FARTHEST = 2.5  # largest code, in standard deviations of its prior


@torch.no_grad()
def expected_parts(model: ShapeCodes, kind: Tensor, pose: Tensor, code: Tensor) -> Capsules:
    """Return the parts that objects vote for, with the probabilities of their presence.

    Args:
        kind, pose, code: kinds, poses and codes of B objects, (B,), (B, 6) and (B, d).
    """
    place, logits = model.shapes.votes(kind[:, None], pose[:, None], code[:, None])
    return Capsules(logits[:, 0].sigmoid(), place[:, 0])


@torch.no_grad()
def bent_kinds(model: ShapeCodes) -> "Figure":
    """Draw the six likeliest kinds with the first number of their codes from -2.5 to 2.5.

    In published weights the first number of a code is the one that parts determine best.
    """
    model = model.discretize()
    rows = {}
    for kind in model.kind_logits.argsort(descending=True)[:6].tolist():
        code = model.kind_logits.new_zeros(_STEPS, model.codes)
        code[:, 0] = torch.linspace(-_FARTHEST, _FARTHEST, _STEPS)
        pose = model.pose.distribution(model.kind_logits).mean.expand(_STEPS, 6)
        which = torch.full((_STEPS,), kind, device=code.device)
        rows[f"kind {kind}"] = model.render(expected_parts(model, which, pose, code))
    return image_rows(
        rows,
        "Six kinds of objects; the first number of their code goes from "
        f"-{_FARTHEST:g} (left) to {_FARTHEST:g} (right)",
    )


@torch.no_grad()
def morphs(model: ShapeCodes, guide: Guide, images: Tensor) -> "Figure":
    """Draw how one image becomes another: the objects are inferred, and their parts move across.

    Parts have the poses that the objects vote for, and move along straight lines. Between two
    objects of one kind this is equivalent to moving the code.

    Args:
        images: (B, C, H, W); the first and the second are a pair, and so on, up to four pairs. A
            single image is a pair with itself.
    """
    pairs = max(1, min(4, len(images) // 2))
    model, images = model.discretize(), images[:8].repeat(2, 1, 1, 1)[: 2 * pairs]
    drawn = infer(guide, images)
    kind, pose, code = (drawn[f"object_{name}"][:, 0] for name in ("kind", "pose", "code"))
    parts = expected_parts(model, kind, pose, code)
    fraction = torch.linspace(0, 1, _STEPS, dtype=images.dtype, device=images.device)
    rows = {}
    for i in range(0, len(images), 2):
        presence = torch.lerp(parts.presence[i], parts.presence[i + 1], fraction[:, None])
        place = torch.lerp(parts.pose[i], parts.pose[i + 1], fraction[:, None, None])
        painted = model.render(Capsules(presence, place))
        ends = images[i : i + 2].split(1)
        name = f"kind {int(kind[i])} to {int(kind[i + 1])}"
        rows[name] = torch.cat([ends[0], painted, ends[1]])
    return image_rows(rows, "From the object of one image (left) to the object of another (right)")
