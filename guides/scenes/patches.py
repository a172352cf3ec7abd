"""Patches: proposals for objects of one picture, painted on small squares of it.

Presences of proposals change the likelihood only at pixels that the proposals paint.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from capsule_zoo.models.scenes import Scenes

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
        number: a number of each that no other proposal of the reader has, (K,).
    """

    layers: tuple[Tensor, ...]
    cover: Tensor
    corner: Tensor
    pose: Tensor
    log_ratio: Tensor
    number: Tensor

    def __len__(self) -> int:
        return len(self.log_ratio)

    @property
    def side(self) -> int:
        """P, the height and width of a patch."""
        return self.cover.shape[-1]

    def __getitem__(self, index: Tensor | slice) -> "Patches":
        fields = (self.cover, self.corner, self.pose, self.log_ratio, self.number)
        return Patches(tuple(layer[index] for layer in self.layers), *(x[index] for x in fields))

    def move(self, index: int, right: int, down: int) -> "Patches":
        """Return the proposals, one of which is moved by whole pixels."""
        corner, pose = self.corner.clone(), self.pose.clone()
        corner[index] += corner.new_tensor([down, right])
        pose[index, 1:3] += pose.new_tensor([right, down])
        number = self.number.clone()
        number[index] = -1 - number.abs().max()  # another proposal, which was not summed yet
        return replace(self, corner=corner, pose=pose, number=number)

    def join(self, other: "Patches") -> "Patches":
        """Return the proposals of both."""
        layers = tuple(torch.cat(pair) for pair in zip(self.layers, other.layers, strict=True))
        names = ("cover", "corner", "pose", "log_ratio", "number")
        return Patches(layers, *(torch.cat([getattr(self, n), getattr(other, n)]) for n in names))


class Part(NamedTuple):
    """Some pixels of a picture, and the proposals that paint them.

    Attributes:
        painters: the proposals, bool (m,), of which p are.
        layers: their terms in the sums of `Scenes.mix_layers`, each (p, c, n).
        image, ground: (C, n).
    """

    painters: Tensor
    layers: list[Tensor]
    image: Tensor
    ground: Tensor


@dataclass(frozen=True, eq=False)
class Picture:
    """A picture, its ground, and what proposals change of them.

    Attributes:
        model: scenes on the picture's canvas.
        image, ground: (C, H, W), contiguous; NaN where a pixel of the image is missing.
    """

    model: Scenes
    image: Tensor
    ground: Tensor

    def paint(self, patches: Patches, presence: Tensor) -> Tensor:
        """Return the mean picture of proposals with presences (K,), (C, H, W)."""
        if not len(presence):
            return self.ground
        sums = [x[None] for x in self.sum_layers(patches, presence)]
        return self.model.mix_layers(sums, self.ground)[0]

    def sum_layers(self, patches: Patches, presence: Tensor) -> list[Tensor]:
        """Return the sums of the layers of proposals with presences (K,), each (c, H, W)."""
        margin, (height, width) = patches.side, self.image.shape[-2:]
        sums = []
        for layer in patches.layers:
            total = layer.new_zeros(layer.shape[1], height + 2 * margin, width + 2 * margin)
            for index in presence.nonzero()[:, 0].tolist():
                top, left = (patches.corner[index] + margin).tolist()
                window = total[:, top : top + margin, left : left + margin]
                window += presence[index] * layer[index]
            sums.append(total[:, margin : margin + height, margin : margin + width])
        return sums

    def painted_pixels(self, patches: Patches) -> tuple[Tensor, Tensor]:
        """Return each painted pixel's proposal, in order, and its index in the picture, (n,)."""
        height, width = self.image.shape[-2:]
        index, row, column = (patches.cover > 0).nonzero(as_tuple=True)
        row, column = row + patches.corner[index, 0], column + patches.corner[index, 1]
        inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
        return index[inside], (row * width + column)[inside]

    def group(self, patches: Patches) -> list[tuple[Tensor, Tensor]]:
        """Return the connected sets of proposals that paint common pixels.

        Returns:
            For each set its proposals, (m,), and which of them paint common pixels, bool (m, m).
        """
        from scipy.sparse import csr_array  # takes a while, and few need it

        index, flat = (x.numpy() for x in self.painted_pixels(patches))
        shape = (len(patches), self.image[0].numel())
        painted = csr_array((np.ones(len(index), np.float32), (index, flat)), shape=shape)
        common = (painted @ painted.T).tocoo()
        first, second = (torch.from_numpy(x).long() for x in common.coords)
        labels = label_connected(common)
        groups: list[tuple[Tensor, Tensor]] = []
        if not len(labels):
            return groups
        for members, pairs in zip(
            split_by(labels), split_by(labels[first], int(labels.max()) + 1), strict=True
        ):
            touching = torch.eye(len(members), dtype=torch.bool)
            place = (torch.searchsorted(members, x[pairs]) for x in (first, second))
            touching[tuple(place)] = True
            groups.append((members, touching))
        return groups

    def pixels_by_patch(self, patches: Patches) -> tuple[Tensor, ...]:
        """Return the indices of the pixels that each proposal paints, without missing pixels."""
        index, flat = self.painted_pixels(patches)
        here = ~self.image.flatten(1)[:, flat].isnan().any(0)
        return flat[here].split(torch.bincount(index[here], minlength=len(patches)).tolist())

    def part(self, patches: Patches, painters: Tensor, flat: Tensor) -> Part:
        """Return what paints some pixels.

        Args:
            painters: the proposals that paint there, bool (m,).
            flat: indices of the pixels in the picture, row by row, (n,).
        """
        width, last, index = self.image.shape[-1], patches.side - 1, painters.nonzero()[:, 0]
        corner = patches.corner[index]
        down, right = flat // width - corner[:, :1], flat % width - corner[:, 1:]
        on_patch = ((down >= 0) & (down <= last) & (right >= 0) & (right <= last))[:, None]
        place = down.clamp(0, last) * patches.side + right.clamp(0, last)
        layers = []
        for layer in patches.layers:
            channels = layer.shape[1]
            channel = index[:, None] * channels + torch.arange(channels)
            values = layer.take(channel[:, :, None] * patches.side**2 + place[:, None])
            layers.append(values * on_patch)
        image, ground = (x.flatten(1)[:, flat] for x in (self.image, self.ground))
        return Part(painters, layers, image, ground)

    def log_likelihood(self, presence: Tensor, part: Part) -> Tensor:
        """Return the log likelihood of presences (M, m) at the pixels of a part, (M,), in nats.

        The normalizer of the density is left out.
        """
        errors = []
        for rows in presence[:, part.painters].split(AT_ONCE):
            sums = [torch.einsum("zm,mcn->zcn", rows, x)[None, ..., None] for x in part.layers]
            means = self.model.mix_layers(sums, part.ground[None, ..., None])[0, ..., 0]
            errors.append((part.image - means).square().sum((1, 2)))
        return -0.5 * torch.cat(errors) / self.model.sigma_image**2


def label_connected(graph: Any) -> Tensor:
    """Return the number of the connected set of each node of a graph, an (m, m) array, (m,)."""
    from scipy.sparse.csgraph import connected_components

    return torch.from_numpy(connected_components(graph, directed=False)[1]).long()


def split_by(labels: Tensor, number: int = 0) -> tuple[Tensor, ...]:
    """Return the indices of each label from 0 on, in order; of `number` labels at least."""
    return labels.argsort(stable=True).split(torch.bincount(labels, minlength=number).tolist())


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
