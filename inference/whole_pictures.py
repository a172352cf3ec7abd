"""Reading of whole pictures: how many objects there are, where, and how sure that is."""

from dataclasses import dataclass

import torch
from torch import Tensor

from capsule_zoo.guides.scenes.clusters import Cluster, Patches, PictureReader, convolve
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
def read_once(
    guide: Peeling, image: Tensor, power: float = 1.0, draw: bool = False, rounds: int = 4,
    sweeps: int = 1, least: float = 0.02, drop: float = 1e-4, verbose=False,
) -> PictureObjects:
    """Read one picture (C, H, W)."""
    model = guide.model.with_canvas(*image.shape[-2:])
    ground = guide.on_model(model).backdrop(image[None]).drawn
    ground = ground.expand(1, *image.shape)[0]
    reader = PictureReader(guide, image, ground, power, draw)
    patches = None
    canvas = ground
    presence = image.new_zeros(0)

    def select(patches):
        clusters = reader.clusters(patches)
        presence = image.new_zeros(len(patches))
        for cluster in clusters:
            presence[cluster.members] = cluster.presence
        return clusters, presence

    def keep(patches, presence):
        on = presence > drop
        return patches[on.nonzero()[:, 0]], presence[on]

    for number in range(rounds):
        places = reader.peaks(canvas, least)
        if not len(places):
            break
        new = reader.propose(places, canvas)
        patches = new if patches is None else patches.join(new)
        clusters, presence = select(patches)
        if verbose:
            print(number, len(places), len(patches), (presence > .5).sum().item(), presence.sum().item(), max(len(c.members) for c in clusters))
        patches, presence = keep(patches, presence)
        canvas = reader.paint(patches, (presence > .5).to(presence))
    for sweep in range(sweeps):
        on = (presence > .5).nonzero()[:, 0]
        hard = (presence > .5).to(presence)
        canvases = []
        for index in on.tolist():
            others = hard.clone(); others[index] = 0
            canvases.append(reader.paint(patches, others))
        places = patches.pose[on][:, 1:3].flip(1).round().long()
        new = reader.propose(places, torch.stack(canvases))
        patches = patches.join(new)
        clusters, presence = select(patches)
        if verbose:
            print('sweep', len(new), len(patches), (presence > .5).sum().item(), presence.sum().item(), max(len(c.members) for c in clusters))
        patches, presence = keep(patches, presence)
        canvas = reader.paint(patches, (presence > .5).to(presence))
    clusters = reader.clusters(patches)
    counts = convolve([c.counts for c in clusters])
    presence = image.new_zeros(len(patches))
    for cluster in clusters:
        presence[cluster.members] = cluster.presence
    return PictureObjects(counts, presence, patches, clusters, canvas)
