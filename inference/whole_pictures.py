"""Objects of whole pictures of any size: how many there are, where, and how sure that is.

The guide of a model of scenes with counts="poisson" proposes objects at all peaks of a picture, in
rounds; their presences are summed out cluster by cluster (`guides.scenes.whole_pictures`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from capsule_zoo.data.leveling import warn_of_other_objects
from capsule_zoo.data.progress import announce
from capsule_zoo.data.scenes import boxes_of, masks_of
from capsule_zoo.data.tensors import as_tensor
from capsule_zoo.guides.scenes.clusters import Cluster, best_of, distribution_of_number
from capsule_zoo.guides.scenes.patches import Patches
from capsule_zoo.guides.scenes.peeling import Peeling
from capsule_zoo.guides.scenes.whole_pictures import PictureReader
from capsule_zoo.inference.other_model import refuse_another_model
from capsule_zoo.models.checks import check_positive, check_whole
from capsule_zoo.models.common.spaces import ImageSpace
from capsule_zoo.models.scenes import Scenes

SAME = 0.2  # distance of two proposals for one object, in default sizes
OUTLINE = 0.5  # fraction of an object's largest cover at which its mask ends


@dataclass(frozen=True, eq=False)
class PictureObjects:
    """The n objects of one picture, with places in its own pixels.

    Attributes:
        count_probabilities: posterior of the number of objects, (N + 1,).
        presence: probability that each object of the likeliest set is there, (n,).
        centers: x and y of each, (n, 2).
        numbers: the object, from 1, that each pixel shows; 0 for the ground, (H, W).
        owners: the object that it shows if it shows one, however little of it objects cover; 0
            where none does, (H, W).
        mean: mean of the picture as the model sees it, (C, h, w).
        unexplained: mean square of what the mean leaves of a pixel there.
        likelihood_power: power of the likelihood that the correlation of its errors asks for.
    """

    count_probabilities: Tensor
    presence: Tensor
    centers: Tensor
    numbers: Tensor
    owners: Tensor
    mean: Tensor
    unexplained: float
    likelihood_power: float

    @property
    def count(self) -> int:
        """The number of objects of the likeliest set, n."""
        return len(self.presence)

    @cached_property
    def masks(self) -> Tensor:
        """The pixels of each object, bool (n, H, W)."""
        return masks_of(self.numbers[None], len(self.presence))[0]

    @property
    def visible(self) -> Tensor:
        """Whether an object has a pixel, and does not lie wholly behind others, bool (n,)."""
        return self.numbers.flatten().bincount(minlength=self.count + 1)[1:] > 0

    @cached_property
    def boxes(self) -> Tensor:
        """Left, top, right and bottom edge of each object's pixels, (n, 4); 0 without pixels."""
        return boxes_of(self.masks[None])[0]


@torch.no_grad()
def read_pictures(
    model: Scenes,
    guide: Peeling,
    pictures: Sequence[Tensor],
    *,
    sweeps: int = 1,
    likelihood_power: float | None = None,
) -> list[PictureObjects]:
    """Find the objects of whole pictures (C, H, W), which may have different sizes.

    Args:
        model: scenes with counts="poisson", trained on tiles of such pictures. If it has a
            `leveling`, pictures are leveled by it first.
        guide: a `Peeling` of the model.
        sweeps: number of times that every object is proposed again, given all others. At last
            objects of unfamiliar looks are proposed apart from them. 0 is several times as fast,
            and takes less of a cluttered ground for objects.
        likelihood_power: power of the likelihood, from which presences follow. By default it is
            measured on what a picture's objects leave unexplained. 1 finds more faint objects
            where the model is right about the ground.

    Raises:
        ValueError: another guide or model, or pictures that do not fit.
    """
    check_whole(0, sweeps=sweeps)
    if likelihood_power is not None:
        check_positive(likelihood_power=likelihood_power)
    if not isinstance(guide, Peeling) or not isinstance(model, Scenes):
        raise ValueError(
            "whole pictures are read by a Peeling guide of Scenes, not by a "
            f"{type(guide).__name__} of {type(model).__name__}; train the entry scenes"
        )
    if model.log_intensity is None:
        raise ValueError(
            'model must be Scenes with counts="poisson" to read whole pictures; train the entry '
            "scenes on them: capsule-zoo train scenes --data PICTURE.png"
        )
    refuse_another_model(model, guide)
    results = []
    for number, picture in enumerate(pictures):
        picture = as_tensor("pictures", picture)
        if picture.is_floating_point():
            picture = picture.to(next(model.parameters()).dtype)
        leveled = picture
        if model.leveling is not None:
            _check_pixels_of(picture)  # a leveling clamps them
            leveled = model.leveling(picture)
            warn_of_other_objects(model.leveling, picture, number)
        model.with_canvas(*leveled.shape[-2:]).space.check(leveled[None])
        height, width = picture.shape[-2:]
        announce(f"reading picture {number + 1} of {len(pictures)}, {width}x{height} pixels")
        results.append(_read(guide, leveled, (height, width), sweeps, likelihood_power))
    return results


def _check_pixels_of(picture: Tensor) -> None:
    """Raise ValueError unless a picture is (C, H, W) from 0 to 1; NaN marks missing pixels."""
    if picture.dim() != 3:
        raise ValueError(
            f"pictures must be (channels, height, width) each, not {tuple(picture.shape)}"
        )
    channels, height, width = picture.shape
    ImageSpace((channels, height, width), may_miss=True).check(picture[None])


def _read(
    guide: Peeling,
    image: Tensor,
    size: tuple[int, int],
    sweeps: int,
    likelihood_power: float | None,
) -> PictureObjects:
    """Read one leveled image, and return its objects in a picture of a size."""
    reader = PictureReader(guide, image, likelihood_power)
    patches, clusters, canvas = reader.read(sweeps=sweeps)
    present = best_of(clusters).nonzero()[:, 0]
    objects = patches[present]
    scale = torch.tensor([size[1] / image.shape[-1], size[0] / image.shape[-2]])
    centers = (objects.pose[:, 1:3] + 0.5) * scale - 0.5
    return PictureObjects(
        distribution_of_number(clusters),
        presence_about(patches, clusters, SAME * guide.model.size)[present],
        centers,
        *outline(objects, image.shape[-2:], size),
        canvas,
        float((image - canvas).square().nanmean()),
        reader.power,
    )


def presence_about(patches: Patches, clusters: list[Cluster], distance: float) -> Tensor:
    """Return the probability that a proposal near each one is present, (K,).

    Args:
        distance: pixels between the centers of two proposals for one object, at most.
    """
    probability = torch.zeros(len(patches))
    for cluster in clusters:
        centers = patches.pose[cluster.members, 1:3]
        near = (torch.cdist(centers, centers) <= distance).to(cluster.rows)
        probability[cluster.members] = cluster.probabilities @ (cluster.rows @ near > 0).to(near)
    return probability


def outline(patches: Patches, canvas: torch.Size, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return `numbers` and `owners` of `PictureObjects`, each (H, W).

    Args:
        patches: objects on a canvas.
        canvas: height and width of the canvas.
        size: height and width of the picture, which is the canvas enlarged.
    """
    (height, width), (rows, columns) = size, canvas
    owners, best = torch.zeros(size, dtype=torch.long), torch.zeros(size)
    for number, (cover, corner) in enumerate(zip(patches.cover, patches.corner, strict=True), 1):
        top, left = corner.tolist()
        side = cover.shape[-1]
        first_row, last_row = (round((top + k) * height / rows) for k in (0, side))
        first_column, last_column = (round((left + k) * width / columns) for k in (0, side))
        enlarged = F.interpolate(
            cover[None, None] / cover.max().clamp_min(1e-9),
            (last_row - first_row, last_column - first_column),
            mode="bilinear",
        )[0, 0]
        box = (
            slice(max(0, first_row), max(0, min(height, last_row))),
            slice(max(0, first_column), max(0, min(width, last_column))),
        )
        part = enlarged[
            box[0].start - first_row : box[0].stop - first_row,
            box[1].start - first_column : box[1].stop - first_column,
        ]
        more = part > best[box]
        best[box] = torch.where(more, part, best[box])
        owners[box] = torch.where(more, number, owners[box])
    return torch.where(best > OUTLINE, owners, 0), owners
