"""Detection of the objects of scenes: their number, positions and pixels.

Several draws of the guide are combined by their weights. They give a posterior of the number of
objects. Among the draws with the most likely number, the most likely draw is returned.
"""

import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from capsule_zoo.data.progress import announce, track
from capsule_zoo.data.scenes import Objects, boxes_of, masks_of
from capsule_zoo.guides.scenes.peeling import Peeling
from capsule_zoo.guides.scenes.proposals import SceneGuide
from capsule_zoo.inference.evaluation.prepare import Images, prepare_images
from capsule_zoo.inference.other_model import refuse_another_model
from capsule_zoo.inference.segmentation import adjusted_rand_index
from capsule_zoo.inference.training.memory import keep_memory
from capsule_zoo.models.checks import check_at_least, check_whole
from capsule_zoo.models.common.modes import use_seed
from capsule_zoo.models.common.spaces import tile_batch
from capsule_zoo.models.scenes import Scenes
from capsule_zoo.models.scenes.pictures import Pictures

FEW_FULL = 3  # number of images with an object in every slot up to which there is no warning


@dataclass(frozen=True, eq=False)
class FoundObjects:
    """The objects that were found in B scenes of at most S objects.

    Attributes:
        count_probabilities: posterior of the number of objects, (B, S + 1). It is the
            model's posterior, which is too sure: many wrong numbers have a probability near 1.
        presence: mask of the slots with an object in the returned draw, bool (B, S).
        pose: log size relative to the default, x, y (and angle) of each, (B, S, 3 or 4).
        numbers: the slot, from 1, that each pixel most likely shows; 0 for the ground, (B, H, W).
            Pixels less than half as bright as the brightest gray object are of the ground.
        owners: the slot that it most likely shows if it shows an object, however little of it
            objects cover; 0 where none does, (B, H, W).
        cover: fraction of each pixel that objects cover, (B, H, W).
        unexplained: mean square of what the shown draw leaves of a pixel, (B,).
        log_evidence: log p(image), estimated from below by the draws, (B,), in nats.
    """

    count_probabilities: Tensor
    presence: Tensor
    pose: Tensor
    numbers: Tensor
    owners: Tensor
    cover: Tensor
    unexplained: Tensor
    log_evidence: Tensor

    @property
    def counts(self) -> Tensor:
        """The most likely number of objects, (B,)."""
        return self.count_probabilities.argmax(-1)

    @property
    def is_full(self) -> Tensor:
        """Whether every slot holds an object, so that there may be more objects, bool (B,)."""
        return self.counts == self.presence.shape[1]

    @property
    def masks(self) -> Tensor:
        """The visible pixels of each object, bool (B, S, H, W)."""
        return masks_of(self.numbers, self.presence.shape[1])

    @cached_property
    def boxes(self) -> Tensor:
        """Left, top, right and bottom edge of each object's pixels, (B, S, 4)."""
        return boxes_of(self.masks)


class Rendering(NamedTuple):
    """The mean images (B, C, H, W) of found objects, and pixel fields of `FoundObjects`."""

    mean: Tensor
    numbers: Tensor
    owners: Tensor
    cover: Tensor
    unexplained: Tensor


@torch.no_grad()
def find_objects(
    model: Scenes,
    guide: SceneGuide,
    images: Images,
    *,
    draws: int = 5,
    temperature: float | None = None,
    seed: int = 0,
    batch_size: int = 50,
) -> FoundObjects:
    """Find the objects of images (B, C, H, W).

    Args:
        guide: any guide to `model` that proposes objects, such as `Peeling`.
        draws: draws of the guide that are combined.
        temperature: randomness of the attention of a `Peeling`, see its argument; by
            default the guide's own. With .1 digits that stand close are separated more often.
        batch_size: images times draws that are encoded at once. Few are faster: subsets of many
            slots are painted, and take memory.

    Warns:
        UserWarning: objects fill every slot of many images, so that further ones are not counted.

    Raises:
        ValueError: a guide of another kind or to another model, a temperature below 0, or images
            that do not fit.
    """
    check_whole(1, draws=draws, batch_size=batch_size)
    if not isinstance(guide, SceneGuide):
        raise ValueError(
            f"guide must propose objects, as Peeling does, to find objects in a scene; "
            f"{type(guide).__name__} does not"
        )
    if temperature is not None:
        check_at_least(0, temperature=temperature)
        if not isinstance(guide, Peeling):
            raise ValueError(
                "temperature is of the places at which a Peeling looks; leave temperature=None "
                f"for a {type(guide).__name__}"
            )
        guide = guide.sharing_parameters(temperature=temperature)
    refuse_another_model(model, guide)
    images = prepare_images(model, images, guide)
    guide.model.space.check(images)
    keep_memory()
    height, width = images.shape[-2:]
    size = f"{width}x{height} pixels, at most {model.slots} objects in each"
    announce(f"finding objects; pictures: {len(images):,} of {size}")
    rows = max(1, batch_size // draws)
    with use_seed(seed):
        batches = track(images.split(rows), "finding objects", "batches")
        parts = [_detect_objects(model, guide, batch, draws) for batch in batches]
    objects = FoundObjects(*(torch.cat(field) for field in zip(*parts, strict=True)))
    if model.log_intensity is None:  # whole pictures have no slots
        _warn_of_full_images(objects)
    return objects


def _warn_of_full_images(objects: FoundObjects) -> None:
    """Warn if objects fill every slot of more than a third of the images."""
    number, (images, slots) = int(objects.is_full.sum()), objects.presence.shape
    if number > max(FEW_FULL, images / 3):
        warnings.warn(
            f"objects fill all slots={slots} in {number} of {images} images, and no image is "
            f"counted above {slots}; if there may be more objects, read them by --slots N, or "
            "train scenes with --set slots=N (slots=N in Python)",
            stacklevel=3,
        )


def _detect_objects(
    model: Scenes, guide: SceneGuide, images: Tensor, draws: int
) -> tuple[Tensor, ...]:
    """Return the fields of `FoundObjects` for one batch."""
    copies = tile_batch(images, draws)
    scene_proposals = guide.draw_proposals(copies)
    distribution = guide.presence_distribution(copies, scene_proposals)
    number = len(images)
    weight = distribution.log_weight.unflatten(0, (draws, number))
    of_count = distribution.log_weight_of_counts.unflatten(0, (draws, number)).logsumexp(0)
    evidence = of_count.logsumexp(-1)
    sizes = distribution.rows.sum(-1).unflatten(0, (draws, number))
    fits = sizes == of_count.argmax(-1)[:, None]
    best = torch.where(fits, weight, -torch.inf).movedim(0, 1).flatten(1).argmax(1)
    draw, row = best // weight.shape[-1], best % weight.shape[-1]
    index = draw * number + torch.arange(number, device=draw.device)
    on = distribution.rows[index, row]
    pictures = Pictures._make(None if x is None else x[index] for x in scene_proposals.pictures)
    pose = torch.stack([p.drawn.pose for p in scene_proposals.proposals], 1)[index]
    ground = (
        scene_proposals.ground.drawn
        if scene_proposals.ground.drawn.dim() == 3
        else scene_proposals.ground.drawn[index]
    )
    _, *pixels = render_objects(model, images, on, pictures, ground)
    draws_less = torch.tensor(float(draws)).log()
    posterior = (of_count - evidence[:, None]).exp()
    return posterior, on > 0, pose, *pixels, evidence - draws_less


def render_objects(
    model: Scenes, images: Tensor, on: Tensor, pictures: Pictures, ground: Tensor
) -> Rendering:
    """Render the objects with presences (B, S), and assign pixels to them.

    A pixel shows what is likeliest in a mixture of the ground and the objects. Their weights are
    their fractions of its mean (`Scenes.mix_layers`), and each has a Normal density about its color
    with the variance that the whole drawing leaves unexplained. Objects without colors are as
    bright as the brightest of them, and have a fraction of 1 where they are drawn as bright. So
    they end at about half of its brightness.

    Args:
        images: (B, C, H, W), NaN where a pixel is missing.
        pictures, ground: see `Scenes.blend`.
    """
    fraction = on[:, :, None, None] * pictures.cover[:, :, 0]
    cover = 1 - (1 - fraction).prod(1)
    mean = model.blend(on[:, None], pictures, ground)[:, 0]
    if pictures.color is not None and pictures.depth is not None:
        weight, color = fraction * pictures.depth.exp()[..., None, None], pictures.color
    else:
        bright = fraction.amax((1, 2, 3), keepdim=True).clamp_min(1e-9)
        weight = fraction = fraction / bright
        color = 1 - (1 - bright[:, :, None]) * (1 - ground.unsqueeze(-4))
    free = (1 - fraction).prod(1, keepdim=True)
    weight = (1 - free) * weight / weight.sum(1, keepdim=True).clamp_min(1e-9)
    unexplained = (mean - images).square().flatten(1).nanmean(1)
    variance = unexplained.clamp_min(1e-9)[:, None, None, None]
    of_object = _score(weight, images[:, None] - color, variance)
    of_ground = _score(free, (images - ground)[:, None], variance)
    numbers = torch.cat([of_ground, of_object], 1).argmax(1)
    owners = torch.where(cover > 0, 1 + of_object.argmax(1), 0)
    return Rendering(mean, numbers, owners, cover, unexplained)


def _score(weight: Tensor, error: Tensor, variance: Tensor) -> Tensor:
    """Return the log of weights (B, S, H, W) times the density of errors (B, S, C, H, W)."""
    return weight.log() - 0.5 * error.square().sum(2).nan_to_num() / variance


def foreground_ari(owners: Tensor, truth: Objects) -> Tensor:
    """Compute the adjusted Rand index of the true objects' pixels, (N,); NaN below two objects.

    Args:
        owners: number of the object that each pixel is given to, (N, H, W).
    """
    true, too_few = truth.numbers.flatten(1), truth.counts < 2
    index = adjusted_rand_index(owners.flatten(1), true, (true > 0) | too_few[:, None])
    return index.where(~too_few, torch.nan)


def box_overlaps(boxes: Tensor, presence: Tensor, truth: Objects) -> Tensor:
    """Compute the overlap (IoU) of every true box with the best found box, (objects,).

    Args:
        boxes: (N, S, 4); `presence` says which of them are of an object, (N, S).
    """
    overlap = box_overlap(truth.boxes[:, :, None], boxes[:, None])
    best = torch.where(presence[:, None], overlap, 0).amax(-1)
    return best[truth.classes >= 0]


def box_overlap(first: Tensor, second: Tensor) -> Tensor:
    """Compute the intersection of boxes over their union (IoU)."""
    low = torch.maximum(first[..., :2], second[..., :2])
    high = torch.minimum(first[..., 2:], second[..., 2:])
    shared = (high - low).clamp_min(0).prod(-1)
    areas = [(box[..., 2:] - box[..., :2]).prod(-1) for box in (first, second)]
    return shared / (areas[0] + areas[1] - shared).clamp_min(1e-9)


def count(model: Scenes, guide: SceneGuide, images: Images, **options: Any) -> Tensor:
    """Predict the number of objects in each image, (B,); see `find_objects`."""
    return find_objects(model, guide, images, **options).counts


def segment(model: Scenes, guide: SceneGuide, images: Images, **options: Any) -> Tensor:
    """Predict the pixels of each object, bool (B, S, H, W); see `find_objects`."""
    return find_objects(model, guide, images, **options).masks


def boxes(model: Scenes, guide: SceneGuide, images: Images, **options: Any) -> list[Tensor]:
    """Predict left, top, right and bottom edge of each image's objects, in pixels, (objects, 4)."""
    detections = find_objects(model, guide, images, **options)
    return [box[on] for box, on in zip(detections.boxes, detections.presence, strict=True)]
