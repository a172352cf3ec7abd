"""Reading of whole pictures: how many objects there are, where, and how sure that is."""

from dataclasses import dataclass

import torch
from torch import Tensor

from capsule_zoo.guides.scenes.clusters import Cluster, Patches, PictureReader, convolve, presence_of
from capsule_zoo.guides.scenes.peeling import Peeling


@dataclass(frozen=True, eq=False)
class PictureObjects:
    """The objects of one picture.

    Attributes:
        counts: distribution of the number of objects, (N + 1,).
        presence: the probability of each proposal, (K,).
        patches: the proposals.
        clusters: the clusters of proposals.
        mean: mean picture, (C, H, W).
    """

    counts: Tensor
    presence: Tensor
    patches: Patches
    clusters: list[Cluster]
    mean: Tensor


@torch.no_grad()
def read_once(guide: Peeling, image: Tensor) -> PictureObjects:
    """Read one picture (C, H, W)."""
    model = guide.model.with_canvas(*image.shape[-2:])
    ground = guide.on_model(model).backdrop(image[None]).drawn
    reader = PictureReader(guide, image, ground.expand(1, *image.shape)[0])
    patches, clusters, canvas = reader.read()
    print("power", reader.power, max(len(c.members) for c in clusters))
    counts = convolve([c.counts for c in clusters])
    return PictureObjects(counts, presence_of(clusters), patches, clusters, canvas)
