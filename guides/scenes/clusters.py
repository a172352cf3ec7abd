"""Objects of a whole picture: proposals at all peaks, presences summed out cluster by cluster.

A picture of any size is a Poisson process of objects (`Scenes` with counts="poisson"), of which a
guide that was trained on small scenes infers one object from a window. With proposals u_1 .. u_K,
each from a patch of the picture, the log weight of presences z is

    log w_z = log p(image | z, u) - expected number + sum_s z_s log v_s
    v_s     = intensity p(u_s) / q(u_s | patch)

Two proposals interact where both paint a pixel. So p(image | z, u) / p(image | ground) is a product
over the connected clusters of proposals, and so is the distribution of the presences:

    q(z | u) = prod_c q(z_c | u),    q(z_c | u) = w_{z_c} / sum of all w_{z_c}

A cluster of at most `MOST` proposals has all its subsets summed; a larger one those that a greedy
search by flips of one or two visits. The number of objects is a sum of independent numbers, one of
each cluster; its distribution is their convolution. The cost grows with the area of the picture.
"""

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.nn import functional as F

from capsule_zoo.guides.scenes.peeling import Peeling, blur_maps
from capsule_zoo.guides.scenes.proposals import Proposal
from capsule_zoo.models.scenes import Scenes
from capsule_zoo.models.scenes.counts import subsets_of

MOST = 10  # proposals of a cluster whose subsets are all summed
PAINTED = 0.02  # least cover of a pixel that a proposal paints
AT_ONCE = 128  # subsets that are painted at once


@dataclass(frozen=True, eq=False)
class Patches:
    """K proposals for objects of one picture, each painted on a patch of P x P pixels.

    Attributes:
        layers: terms of each proposal in the sums of `Scenes.mix_layers`, each (K, c, P, P).
        cover: fraction of a pixel that it covers, (K, P, P).
        corner: row and column of the patch's first pixel in the picture, perhaps negative,
            integers (K, 2).
        pose: log size over the default, x and y of the center in pixels of the picture (and an
            angle), (K, 3 or 4).
        log_ratio: log v of each, (K,), in nats.
    """

    layers: tuple[Tensor, ...]
    cover: Tensor
    corner: Tensor
    pose: Tensor
    log_ratio: Tensor

    def __len__(self) -> int:
        return len(self.log_ratio)

    def __getitem__(self, index: Tensor) -> "Patches":
        fields = (self.cover, self.corner, self.pose, self.log_ratio)
        return Patches(tuple(layer[index] for layer in self.layers), *(x[index] for x in fields))

    def join(self, other: "Patches") -> "Patches":
        """Return the proposals of both."""
        layers = tuple(torch.cat(pair) for pair in zip(self.layers, other.layers, strict=True))
        names = ("cover", "corner", "pose", "log_ratio")
        return Patches(layers, *(torch.cat([getattr(self, n), getattr(other, n)]) for n in names))


@dataclass(frozen=True, eq=False)
class Cluster:
    """The proposals that interact, and the distribution of their presences.

    Attributes:
        members: indices of the proposals, (m,).
        rows: presences, (M, m).
        log_weight: log weight of each row, relative to the picture without objects, (M,), in nats.
    """

    members: Tensor
    rows: Tensor
    log_weight: Tensor

    @property
    def probabilities(self) -> Tensor:
        """The probability of each row, (M,)."""
        return self.log_weight.softmax(0)

    @property
    def presence(self) -> Tensor:
        """The probability that each proposal is present, (m,)."""
        return self.probabilities @ self.rows

    @property
    def counts(self) -> Tensor:
        """The distribution of the number of objects, (m + 1,)."""
        number = self.rows.sum(1).long()
        return self.rows.new_zeros(self.rows.shape[1] + 1).index_add(0, number, self.probabilities)


class AtMean(Messenger):
    """The context in which sites have the means of their distributions as values."""

    def _pyro_sample(self, msg: Any) -> None:
        if not msg["is_observed"] and msg["value"] is None:
            msg["value"] = msg["fn"].mean


class PictureReader:
    """Proposals and presences of the objects of one picture.

    Args:
        guide: a guide to scenes with counts="poisson", trained on scenes of any size.
        image: (C, H, W), NaN where a pixel is missing.
        ground: picture of the ground, (C, H, W).
        likelihood_power: power of the likelihood in the weights; below 1 where errors of
            neighboring pixels are correlated. See `fit_likelihood_power`.
        draw: draw places and latents from the guide; otherwise its means are used.
    """

    def __init__(
        self,
        guide: Peeling,
        image: Tensor,
        ground: Tensor,
        likelihood_power: float = 1.0,
        draw: bool = False,
    ) -> None:
        self.guide, self.image, self.ground, self.draw = guide, image, ground, draw
        self.power = likelihood_power
        model = guide.model
        self.model = model.with_canvas(*image.shape[-2:])
        self.side = 2 * math.ceil(1.5 * model.size) 
        self.patch_guide = guide.on_model(model.with_canvas(self.side, self.side, slots=1))

    def propose(self, places: Tensor, canvas: Tensor) -> Patches:
        """Propose an object about each place, given the objects on a canvas.

        Args:
            places: row and column of pixels, (K, 2).
            canvas: mean picture of the other objects, (C, H, W) or one for each place.
        """
        guide, side = self.patch_guide, self.side
        corner = places - side // 2
        images = cut(self.image, corner, side)
        canvases = cut(canvas, corner, side)
        left = guide.measure_residual(images, canvases).nan_to_num()
        about = images.new_zeros(len(places), guide.model.pose_size)
        about[:, 1:3] = 1 / side  # the middle of pixel side // 2
        with nullcontext() if self.draw else AtMean():
            proposal = guide.propose_at(0, images.nan_to_num(), left, about)
        return self.to_patches(proposal, corner)

    def to_patches(self, proposal: Proposal, corner: Tensor) -> Patches:
        """Return a batch of proposals on patches as proposals for the picture."""
        guide, side = self.patch_guide, self.side
        pose = proposal.drawn.pose
        height, width = self.image.shape[-2:]
        extent = pose.new_tensor([width, height])
        pixels = (pose[:, 1:3] + 1) * side / 2 + corner.flip(1)  # from the edge of the picture
        whole = torch.cat([pose[:, :1], 2 * pixels / extent - 1, pose[:, 3:]], 1)
        of_patch = guide.model.pose_distribution(pose).log_prob(pose)
        of_whole = self.model.pose_distribution(pose).log_prob(whole)
        volume = 2 * math.log(side) - math.log(height * width)
        log_intensity = self.model.log_expected_count() + of_whole + volume - of_patch
        cover = proposal.placed.cover
        placed = proposal.placed._replace(cover=torch.where(cover > PAINTED, cover, 0))
        layers = tuple(layer[:, 0] for layer in guide.model.layers(placed))
        centers = torch.cat([pose[:, :1], pixels - 0.5, pose[:, 3:]], 1)
        cover = placed.cover[:, 0, 0]
        return Patches(layers, cover, corner, centers, proposal.log_ratio + log_intensity)

    def paint(self, patches: Patches, presence: Tensor) -> Tensor:
        """Return the mean picture of proposals with presences (K,), (C, H, W)."""
        margin = self.side
        height, width = self.image.shape[-2:]
        sums = []
        for layer in patches.layers:
            total = layer.new_zeros(layer.shape[1], height + 2 * margin, width + 2 * margin)
            for index in presence.nonzero()[:, 0].tolist():
                top, left = (patches.corner[index] + margin).tolist()
                window = total[:, top : top + self.side, left : left + self.side]
                window += presence[index] * layer[index]
            sums.append(total[None, :, margin : margin + height, margin : margin + width])
        if not len(presence):
            return self.ground
        return self.model.mix_layers(sums, self.ground)[0]

    def peaks(self, canvas: Tensor, least: float) -> Tensor:
        """Return the pixels of which a canvas leaves most unexplained, (K, 2), row and column."""
        left = self.guide.measure_residual(self.image[None], canvas[None]).nan_to_num()
        size = self.model.size
        heat = blur_maps(left, max(1.0, size * self.guide.blur))[0, 0]
        reach = max(1, int(0.35 * size))
        top = F.max_pool2d(heat[None], 2 * reach + 1, 1, reach)[0]
        return ((heat == top) & (heat > least)).nonzero()

    def clusters(self, patches: Patches) -> list[Cluster]:
        """Return the clusters of proposals that paint common pixels, with their distributions."""
        return [self.sum_cluster(patches, members) for members in self.group(patches)]

    def group(self, patches: Patches) -> list[Tensor]:
        """Return the connected sets of proposals that paint common pixels, indices (m,)."""
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import connected_components

        height, width = self.image.shape[-2:]
        painted = patches.cover > 0
        index, row, column = painted.nonzero(as_tuple=True)
        row, column = row + patches.corner[index, 0], column + patches.corner[index, 1]
        inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
        index, pixel = index[inside].numpy(), (row * width + column)[inside].numpy()
        shape = (len(patches), height * width)
        member = csr_array(([1.0] * len(index), (index, pixel)), shape=shape)
        number, labels = connected_components(member @ member.T, directed=False)
        labels = torch.from_numpy(labels)
        return [(labels == label).nonzero()[:, 0] for label in range(number)]

    def sum_cluster(self, patches: Patches, members: Tensor) -> Cluster:
        """Return the distribution of the presences of proposals, given no others."""
        few = patches[members]
        low, high = self._painted_box(few)
        box = (slice(low[0], high[0]), slice(low[1], high[1]))
        image, ground = self.image[:, *box], self.ground[:, *box]
        layers = [_embed(layer, few.corner - low, tuple(high - low)) for layer in few.layers]
        empty = self.model.log_likelihood(image[None], ground[None, None])[0]

        def weigh(rows: Tensor) -> Tensor:
            parts = []
            for part in rows.split(AT_ONCE):
                sums = [(part @ x.flatten(1)).unflatten(1, x.shape[1:]) for x in layers]
                means = self.model.mix_layers([x[None] for x in sums], ground[None])[0]
                parts.append(self.model.log_likelihood(image[None], means[None])[0])
            return self.power * (torch.cat(parts) - empty) + rows @ few.log_ratio

        if len(members) <= MOST:
            rows = subsets_of(len(members), few.log_ratio)
        else:
            rows = climb(weigh, few.log_ratio)
        return Cluster(members, rows, weigh(rows))


    def _painted_box(self, patches: Patches) -> tuple[Tensor, Tensor]:
        """Return the first row and column that proposals paint in the picture, and the last + 1."""
        index, row, column = (patches.cover > 0).nonzero(as_tuple=True)
        pixels = torch.stack([row, column], 1) + patches.corner[index]
        limits = pixels.new_tensor(self.image.shape[-2:])
        pixels = pixels[((pixels >= 0) & (pixels < limits)).all(1)]
        if not len(pixels):  # nothing in the picture: one pixel stands for it
            return torch.zeros_like(limits), torch.ones_like(limits)
        return pixels.amin(0), pixels.amax(0) + 1


def climb(weigh, like: Tensor) -> Tensor:
    """Return the presences that a greedy search by flips of one or two visits, (M, m)."""
    flips = subsets_of(len(like), like, most=2)
    now = like.new_zeros(1, len(like))
    visited = [now]
    for _ in range(2 * len(like)):
        with torch.no_grad():
            near = (now - flips).abs()
            now, before = near[weigh(near).argmax()][None], now
        visited.append(near)
        if torch.equal(now, before):
            break
    return torch.cat(visited).unique(dim=0)


def cut(picture: Tensor, corner: Tensor, side: int) -> Tensor:
    """Cut patches from a picture (C, H, W), or from one of each, (K, C, side, side); 0 outside.

    Args:
        corner: row and column of each patch's first pixel, integers (K, 2).
    """
    pictures = picture.expand(len(corner), *picture.shape[-3:])
    height, width = picture.shape[-2:]
    offset = torch.arange(side)
    row, column = (corner[:, i, None] + offset for i in (0, 1))
    inside = ((row >= 0) & (row < height))[:, :, None] & ((column >= 0) & (column < width))[:, None]
    row, column = row.clamp(0, height - 1), column.clamp(0, width - 1)
    index = torch.arange(len(corner))[:, None, None]
    patches = pictures[index, :, row[:, :, None], column[:, None]].movedim(-1, 1)
    return patches * inside[:, None]


def _embed(layer: Tensor, offset: Tensor, size: tuple[int, int]) -> Tensor:
    """Place patches (m, c, P, P) at offsets (m, 2) on empty canvases, (m, c, *size)."""
    side, (height, width) = layer.shape[-1], size
    placed = []
    for patch, (top, left) in zip(layer, offset.tolist(), strict=True):
        pads = (left, int(width) - left - side, top, int(height) - top - side)
        placed.append(F.pad(patch, pads))
    return torch.stack(placed)


def convolve(counts: list[Tensor]) -> Tensor:
    """Return the distribution of a sum of independent numbers, from that of each."""
    total = torch.ones(1, dtype=counts[0].dtype if counts else None)
    for one in counts:
        total = F.conv1d(total[None, None], one.flip(0)[None, None], padding=len(one) - 1)[0, 0]
    return total
