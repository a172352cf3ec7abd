"""How the poses of objects and parts follow a shift and a turn of the image."""

from __future__ import annotations

import torch
from torch import Tensor

from capsule_zoo.data import load_dataset, transforms
from capsule_zoo.experiments import Options, Result, experiment
from capsule_zoo.experiments.common.findings import by_quantity, mean_and_error
from capsule_zoo.experiments.part_whole.transformations import bordered
from capsule_zoo.figures.curves import followed
from capsule_zoo.guides import PartWholeGuide
from capsule_zoo.inference.evaluation.ancestral import infer
from capsule_zoo.models.parts import poses
from capsule_zoo.records import Numbers, Table
from capsule_zoo.registry import load

WEIGHTS = "part-whole-affnist"


@experiment("part-whole/equivariance", data="mnist")
def equivariance(
    options: Options,
    *,
    images: int = 1000,
    shifts: tuple[float, ...] = (0.5, 1.0, 2.5, 6.0),
    degrees: tuple[float, ...] = (5.0, 10.0, 15.0, 30.0, 45.0),
) -> Result:
    """Measure how inferred poses follow the image as it is shifted and turned (a minute).

    An image is parsed as it is, and moved. A pose that is inferred from the moved image is compared
    with the first pose, moved in the same way: `place_error` is the distance of their positions
    (pixels), `angle_error` the rotation between them (degrees). Poses that do not follow at all
    have the motion itself as their error: `place_motion` is the distance that the position should
    have moved. Only capsules that are present in both parses count; `seen` is their share among
    those that are present in the first.

    It measures the published weights `part-whole-affnist` unless another run is given.

    Args:
        images: number of test images.
        shifts: shifts, in pixels.
        degrees: turns.
    """
    guide = load(options.run or WEIGHTS).guide
    if not isinstance(guide, PartWholeGuide):
        raise ValueError(
            f"run holds a {type(guide).__name__}, but part-whole capsules are needed; name a run "
            "of part-whole"
        )
    side = guide.model.image_shape[-1]
    data = load_dataset("mnist", root=options.data_root)
    shown = data.test.images[:images]
    if side == 40:
        shown = bordered(shown)
    before = infer(guide, shown, seed=options.seed)
    motions = {
        "pixels": {amount: transforms.motion(shift=(amount, 0)) for amount in shifts},
        "degrees": {amount: transforms.motion(amount) for amount in degrees},
    }
    found: dict[str, dict[str, Numbers]] = {unit: {} for unit in motions}
    for unit, own in motions.items():
        for amount, motion in own.items():
            moved = transforms.warp_images(shown, motion).clamp(0, 1)
            after = infer(guide, moved, seed=options.seed)
            pose = as_pose(motion[0], side)
            found[unit][f"{amount:g}".replace(".", "_")] = errors(guide, before, after, pose, side)
    tables = {
        f"images moved, in {unit}": Table(by_quantity(rows), f"{{quantity}}_{{variant}}_{unit}")
        for unit, rows in found.items()
    }
    return Result({**tables}, {"": followed(found)})


def errors(
    guide: PartWholeGuide,
    before: dict[str, Tensor],
    after: dict[str, Tensor],
    motion: Tensor,
    side: int,
) -> Numbers:
    """Return the mean errors of objects and of parts, and the share that is seen again.

    Args:
        before, after: what was inferred from the images and from the moved images.
        motion: the motion of all images, (6,).
        side: side of the images, in pixels.
    """
    found: Numbers = {}
    for level in (guide.model.levels[0], guide.model.levels[-1]):
        presence, pose = f"{level.name}_presence", f"{level.name}_pose"
        first = before[presence] > 0
        both = first & (after[presence] > 0)
        count, number = both.sum(1), first.sum(1)
        wanted = poses.compose(motion, before[pose])
        distances = {
            "place_error": pixels(after[pose], wanted, side),
            "place_motion": pixels(before[pose], wanted, side),
            "angle_error": angle(after[pose], wanted),
        }
        for name, distance in distances.items():
            mean = (distance * both).sum(1) / count
            found[f"{level.name}_{name}"] = mean_and_error(mean[count > 0])
        found[f"{level.name}_seen"] = mean_and_error((count / number)[number > 0])
    return found


def as_pose(motion: Tensor, side: int) -> Tensor:
    """Return a motion (2, 3) in pixels as a pose (6,) in a frame [-1, 1]^2 of square images."""
    return torch.cat([motion[:, :2], motion[:, 2:] * 2 / side], dim=-1).flatten()


def pixels(first: Tensor, second: Tensor, side: int) -> Tensor:
    """Return the distance between the positions of two poses, in pixels of an image."""
    return (first - second)[..., 2::3].norm(dim=-1) * side / 2


def angle(first: Tensor, second: Tensor) -> Tensor:
    """Return the angle of the rotation that is nearest to the change between poses, in degrees."""
    change = poses.to_matrix(poses.compose(poses.inverse(second), first))
    turn = torch.atan2(change[..., 1, 0] - change[..., 0, 1], change[..., 0, 0] + change[..., 1, 1])
    return turn.abs().rad2deg()
