"""Objects of a whole picture: proposals at all peaks, presences summed out cluster by cluster.

A picture of any size is a Poisson process of objects (`Scenes` with counts="poisson"), of which a
guide that was trained on small scenes infers one object from a window. With proposals u_1 .. u_K,
each from a patch of the picture, the log weight of presences z is

    log w_z = log p(image | z, u) - expected number + sum_s z_s log v_s
    v_s     = intensity p(u_s) / q(u_s | patch)

Two proposals interact where both paint a pixel. So p(image | z, u) / p(image | ground) is a product
over the connected clusters of proposals, and so is the distribution of the presences:

    q(z | u) = prod_c q(z_c | u),    q(z_c | u) = w_{z_c} / sum of all w_{z_c}

A cluster of at most `MOST` proposals has all its subsets summed. In a larger one a greedy search
finds the best presences. Members that it can change only at a great loss stay as they are, and the
others form smaller clusters, given these. The number of objects is a sum of independent numbers,
one of each cluster; its distribution is their convolution. The cost grows with the area.

Two proposals for one object are two ways to explain it, and both count. So the weights give the
distribution of the presences, and no bound on log p(image). Errors of neighboring pixels are
correlated, so the likelihood has a power (`PictureReader.fit_power`).
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from capsule_zoo.guides.scenes.clusters import (
    AT_ONCE,
    DOUBT,
    MOST,
    Cluster,
    Moves,
    Part,
    best_of,
    climb,
    presence_of,
)
from capsule_zoo.guides.scenes.peeling import Peeling, blur_maps
from capsule_zoo.guides.scenes.proposals import Proposal
from capsule_zoo.models.scenes.counts import subsets_of

PAINTED = 0.02  # least cover of a pixel that a proposal paints
LARGE_BOX, SMALL_BOXES = 1 / 2, (1 / 12, 1 / 8)  # sides of boxes of residuals, in default sizes
CONTRAST = 0.1  # of a pixel with the ground, in units of its range, from which it is of an object
LEAST_POWER = 0.25  # of the likelihood
LEAST_PRESENCE = 1e-4  # least probability with which a proposal is kept
GAIN = 3.0  # least gain, in nats of likelihood, for which an object is proposed
CLOSE = 0.6  # distance, in default sizes, up to which two objects may be parts of one


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

    def __getitem__(self, index: Tensor) -> "Patches":
        fields = (self.cover, self.corner, self.pose, self.log_ratio, self.number)
        return Patches(tuple(layer[index] for layer in self.layers), *(x[index] for x in fields))

    def join(self, other: "Patches") -> "Patches":
        """Return the proposals of both."""
        layers = tuple(torch.cat(pair) for pair in zip(self.layers, other.layers, strict=True))
        names = ("cover", "corner", "pose", "log_ratio", "number")
        return Patches(layers, *(torch.cat([getattr(self, n), getattr(other, n)]) for n in names))


class PictureReader:
    """Proposals and presences of the objects of one picture.

    Args:
        guide: a guide to scenes with counts="poisson", trained on scenes of any size.
        image: (C, H, W), NaN where a pixel is missing.
        likelihood_power: power of the likelihood in the weights; below 1 where errors of
            neighboring pixels are correlated. It is fitted while the picture is read.
        most: largest cluster whose subsets are all summed.
    """

    def __init__(
        self, guide: Peeling, image: Tensor, likelihood_power: float = 1.0, most: int = MOST
    ) -> None:
        self.guide, self.image = guide, image.contiguous()
        self.power, self.most = likelihood_power, most
        model = guide.model
        self.model = model.with_canvas(*image.shape[-2:])
        ground = guide.on_model(self.model).backdrop(image[None]).drawn
        self.ground = ground.expand(1, *image.shape)[0].contiguous()
        self.side = 2 * math.ceil(1.5 * model.size)
        self._proposed, self._clusters = 0, dict[tuple[int, ...], list[Cluster]]()
        self.patch_guide = guide.on_model(model.with_canvas(self.side, self.side, slots=1))

    def propose(self, places: Tensor, canvas: Tensor) -> Patches:
        """Propose an object about each place, given the objects on a canvas.

        Args:
            places: row and column of pixels, (K, 2).
            canvas: mean picture of the other objects, (C, H, W).
        """
        return self._propose(places, cut(canvas, places - self.side // 2, self.side))

    def _propose(self, places: Tensor, canvases: Tensor) -> Patches:
        """Propose an object about each place, given the others on its patch (K, C, P, P)."""
        guide, side = self.patch_guide, self.side
        corner = places - side // 2
        images = cut(self.image, corner, side)
        left = guide.measure_residual(images, canvases).nan_to_num()
        about = images.new_zeros(len(places), guide.model.pose_size)
        about[:, 1:3] = 1 / side  # the middle of pixel side // 2
        proposal = guide.propose_at(0, images.nan_to_num(), left, about, draw=False)
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
        number = torch.arange(len(corner)) + self._proposed
        self._proposed += len(corner)
        return Patches(layers, cover, corner, centers, proposal.log_ratio + log_intensity, number)

    def paint(self, patches: Patches, presence: Tensor) -> Tensor:
        """Return the mean picture of proposals with presences (K,), (C, H, W)."""
        if not len(presence):
            return self.ground
        return self.model.mix_layers([x[None] for x in self._sums(patches, presence)], self.ground)[
            0
        ]

    def _sums(self, patches: Patches, presence: Tensor) -> list[Tensor]:
        """Return the sums of the layers of proposals with presences (K,), each (c, H, W)."""
        margin, (height, width) = self.side, self.image.shape[-2:]
        sums = []
        for layer in patches.layers:
            total = layer.new_zeros(layer.shape[1], height + 2 * margin, width + 2 * margin)
            for index in presence.nonzero()[:, 0].tolist():
                top, left = (patches.corner[index] + margin).tolist()
                window = total[:, top : top + self.side, left : left + self.side]
                window += presence[index] * layer[index]
            sums.append(total[:, margin : margin + height, margin : margin + width])
        return sums

    def peaks(self, canvas: Tensor) -> Tensor:
        """Return the pixels about which a canvas leaves most unexplained, (K, 2), row and column.

        A peak counts if an object there may gain more than `GAIN` nats of likelihood.
        """
        guide, size = self.guide, self.model.size
        left = guide.measure_residual(self.image[None], canvas[None]).nan_to_num()
        if not guide.residual_is_linear:
            left = (left / 4).sqrt()
        scale = max(1.0, size * guide.blur)
        heat = blur_maps(left, scale)[0, 0] / (math.tau * scale**2)
        reach = max(1, int(0.35 * size))
        top = heat[None]
        for axes in ((0, 1), (1, 0)):  # rows and columns in turn
            size_along = tuple(2 * reach * axis + 1 for axis in axes)
            top = F.max_pool2d(top, size_along, 1, tuple(reach * axis for axis in axes))
        gain = (
            self.power * heat.square() * 2 * math.tau * scale**2 / (2 * self.model.sigma_image**2)
        )
        return ((heat == top[0]) & (gain > GAIN)).nonzero()

    def fit_power(self, canvas: Tensor) -> float:
        """Return the power of the likelihood at which residuals vary as much as it says.

        Errors of neighboring pixels are correlated. So the sum of a residual over a box has a
        larger variance than the likelihood says, which takes pixels for independent: sigma^2 times
        their number. The power is the ratio of the two, and makes the curvature of the weighted
        likelihood equal to the variance of its score for a change of tone in such a box (the
        magnitude adjustment of composite likelihoods, Pauli, Racugno & Ventura 2011, "Bayesian
        composite marginal likelihoods"). Three boxes are measured: of half an object's width in the
        whole picture, where the ground may be wrong, and of a twelfth and an eighth on objects,
        where strokes and textures may be. The least ratio counts, from `LEAST_POWER` to 1: below
        it, objects that are not found yet would count as noise, and then never be found.

        Args:
            canvas: mean picture of the objects, (C, H, W).
        """
        error = (self.image - canvas).nan_to_num()
        painted = (canvas - self.ground).abs().amax(0) > CONTRAST
        largest = 0.0
        for fraction, region in (
            (LARGE_BOX, torch.ones_like(painted)),
            *((f, painted) for f in SMALL_BOXES),
        ):
            side = 2 * int(self.model.size * fraction / 2) + 1
            mean = F.avg_pool2d(error[None], side, 1, side // 2, count_include_pad=False)[0]
            squares = (mean * side).square().mean(0)[region]
            if len(squares):
                largest = max(largest, float(squares.mean()))
        power = self.model.sigma_image**2 / max(largest, 1e-12)
        return min(1.0, max(LEAST_POWER, power))

    def clusters(self, patches: Patches, start: Tensor | None = None) -> list[Cluster]:
        """Return the clusters of proposals that paint common pixels, with their distributions.

        Args:
            start: presences from which the search in large clusters begins, (K,).
        """
        clusters = []
        for members, pairs in self.group(patches):
            key = tuple(patches.number[members].tolist())
            if key not in self._clusters or torch.is_grad_enabled():
                first = (
                    patches.log_ratio.new_zeros(len(members)) if start is None else start[members]
                )
                self._clusters[key] = self.sum_cluster(patches[members], pairs, first)
            clusters += [
                replace(cluster, members=members[cluster.members], power=self.power)
                for cluster in self._clusters[key]
            ]
        return clusters

    def group(self, patches: Patches) -> list[tuple[Tensor, Tensor]]:
        """Return the connected sets of proposals that paint common pixels.

        Returns:
            For each set its proposals, (m,), and its pairs that paint common pixels, (n, 2).
        """
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import connected_components

        width = self.image.shape[-1]
        index, pixel = self._painted_pixels(patches)
        shape = (len(patches), self.image[0].numel())
        flat = (pixel[:, 0] * width + pixel[:, 1]).numpy()
        painted = csr_array((np.ones(len(index), np.float32), (index.numpy(), flat)), shape=shape)
        common = (painted @ painted.T).tocoo()
        number, labels = connected_components(common, directed=False)
        labels = torch.from_numpy(labels).long()
        pairs = torch.stack([torch.from_numpy(x).long() for x in common.coords], 1)
        pairs = pairs[pairs[:, 0] < pairs[:, 1]]
        groups = []
        for members, inside in zip(
            _split_by(labels, number), _split_by(labels[pairs[:, 0]], number), strict=True
        ):
            groups.append((members, torch.searchsorted(members, pairs[inside])))
        return groups

    def sum_cluster(self, patches: Patches, pairs: Tensor, start: Tensor) -> list[Cluster]:
        """Return the distributions of the presences of m proposals, given no others.

        They are one cluster if m is at most `most`. Otherwise members that are certain are one
        cluster of a single row. The others are clusters given the certain ones.

        Args:
            pairs: pairs of proposals that paint common pixels, (n, 2).
            start: presences from which the search begins where m is large, (m,).
        """
        number = len(patches)
        touching = torch.eye(number, dtype=torch.bool)
        touching[pairs[:, 0], pairs[:, 1]] = touching[pairs[:, 1], pairs[:, 0]] = True
        pixels = self._pixels_of_each(patches)

        def part_of(changed: Tensor) -> Part:
            """Return the pixels that some members paint, bool (m,), with all that paint there."""
            flat = torch.cat([pixels[k] for k in changed.nonzero()[:, 0].tolist()]).unique()
            return self._part(patches, touching[changed].any(0), flat)

        def summed(members: Tensor, rows: Tensor, given: Tensor) -> Cluster:
            """Return the distribution over rows of some members, given the presences of all."""
            part = part_of(F.one_hot(members, number).sum(0) > 0)
            presence = given.index_fill(0, members, 0).repeat(len(rows) + 1, 1)
            presence[1:, members] = rows
            scores = self._score(presence, part)
            ratio = rows @ patches.log_ratio[members]
            return Cluster(members, rows, scores[1:] - scores[0], ratio, self.power)

        if number <= self.most:
            rows = subsets_of(number, patches.log_ratio)
            return [summed(torch.arange(number), rows, torch.zeros_like(start))]
        moves = Moves.among(patches.pose[:, 1:3], CLOSE * self.model.size)
        parts = [part_of(changed) for changed in moves.changed]
        log_ratio = patches.log_ratio.detach()
        with torch.no_grad():
            best, gains = climb(self._score, log_ratio / self.power, start, moves, parts)
        near = moves.neighbors(best)
        change = (near - best) @ log_ratio
        total = torch.stack([self.power * f * gains + change for f in DOUBT]).amax(0)
        possible = total > math.log(LEAST_PRESENCE)
        changed = near != best
        uncertain = changed[possible].any(0)
        certain = (~uncertain).nonzero()[:, 0]
        ratio = best[certain] @ patches.log_ratio[certain]
        alone = Cluster(certain, best[certain][None], ratio.new_zeros(1), ratio[None], self.power)
        clusters = [alone]
        for members in connected(touching, uncertain):
            if len(members) <= self.most:
                rows = subsets_of(len(members), patches.log_ratio)
            else:
                outside = torch.ones(number, dtype=torch.bool).index_fill(0, members, False)
                moved = near[possible & ~changed[:, outside].any(1)]
                rows = torch.cat([best[None], moved])[:, members].unique(dim=0)
            clusters.append(summed(members, rows, best))
        return clusters

    def _score(self, presence: Tensor, part: Part) -> Tensor:
        """Return the log likelihood of presences (M, m) at the pixels of a part, (M,), in nats.

        The normalizer of the density is left out.
        """
        scores = []
        for rows in presence[:, part.painters].split(AT_ONCE):
            sums = [torch.einsum("zm,mcn->zcn", rows, x)[None, ..., None] for x in part.layers]
            means = self.model.mix_layers(sums, part.ground[None, ..., None])[0, ..., 0]
            scores.append((part.image - means).square().sum((1, 2)))
        return -0.5 * torch.cat(scores) / self.model.sigma_image**2

    def _part(self, patches: Patches, painters: Tensor, flat: Tensor) -> Part:
        """Return what paints some pixels of the picture.

        Args:
            painters: the proposals that paint there, bool (m,).
            flat: indices of the pixels, row by row, (n,).
        """
        row, column = flat // self.image.shape[-1], flat % self.image.shape[-1]
        index = painters.nonzero()[:, 0]
        corner = patches.corner[index]
        down, right = row - corner[:, :1], column - corner[:, 1:]
        last = self.side - 1
        on_patch = ((down >= 0) & (down <= last) & (right >= 0) & (right <= last))[:, None]
        place = down.clamp(0, last) * self.side + right.clamp(0, last)
        layers = []
        for layer in patches.layers:
            channels = layer.shape[1]
            channel = index[:, None] * channels + torch.arange(channels)
            values = layer.take(channel[:, :, None] * self.side**2 + place[:, None])
            layers.append(values * on_patch)
        image, ground = (x.flatten(1)[:, flat] for x in (self.image, self.ground))
        return Part(painters, layers, image, ground)

    def _pixels_of_each(self, patches: Patches) -> list[Tensor]:
        """Return the flat indices of the pixels that each proposal paints, without missing ones."""
        index, pixels = self._painted_pixels(patches)
        here = ~self.image[:, pixels[:, 0], pixels[:, 1]].isnan().any(0)
        flat = (pixels[:, 0] * self.image.shape[-1] + pixels[:, 1])[here]
        return list(flat.split(torch.bincount(index[here], minlength=len(patches)).tolist()))

    def _painted_pixels(self, patches: Patches) -> tuple[Tensor, Tensor]:
        """Return the painted pixels of the picture: proposal (n,), row and column (n, 2)."""
        index, row, column = (patches.cover > 0).nonzero(as_tuple=True)
        pixels = torch.stack([row, column], 1) + patches.corner[index]
        inside = ((pixels >= 0) & (pixels < pixels.new_tensor(self.image.shape[-2:]))).all(1)
        return index[inside], pixels[inside]

    def select(self, patches: Patches, start: Tensor) -> tuple[Patches, list[Cluster]]:
        """Return the proposals that may be present, and their clusters, given that others are not.

        Args:
            start: see `clusters`.
        """
        clusters = self.clusters(patches, start)
        likely = presence_of(clusters) > LEAST_PRESENCE
        return patches[likely.nonzero()[:, 0]], [cluster.among(likely) for cluster in clusters]

    def read(self, rounds: int = 4, sweeps: int = 1) -> tuple[Patches, list[Cluster], Tensor]:
        """Propose objects in rounds, each at the peaks of what the present ones leave unexplained.

        Args:
            rounds: rounds at most.
            sweeps: number of times that every object is proposed again, given all others.

        Returns:
            The proposals, their clusters, and the mean picture of the likeliest presences.
        """
        none = torch.zeros(0).long()
        patches, canvas = self.propose(torch.zeros(1, 2).long(), self.ground)[none], self.ground
        clusters: list[Cluster] = []
        for number in range(rounds + sweeps):
            present = best_of(clusters)
            places = self.peaks(canvas) if number < rounds else present.nonzero()
            if not len(places):
                continue
            if number < rounds:
                new = self.propose(places, canvas)
            else:
                new = self.propose_again(patches, present)
            start = torch.cat([present.to(canvas), canvas.new_zeros(len(new))])
            patches, clusters = self.select(patches.join(new), start)
            canvas = self.paint(patches, best_of(clusters))
            self.power = self.fit_power(canvas)
        return patches, self.clusters(patches, best_of(clusters)), canvas

    def propose_again(self, patches: Patches, present: Tensor) -> Patches:
        """Propose every object with presence 1 again, and one in place of two that stand close.

        Each is proposed given all other objects, presences (K,). What one proposal explains only
        in part is often taken for two objects, of which neither alone becomes the whole again.

        Returns:
            The objects in their order, and then one for each pair.
        """
        objects = patches[present.nonzero()[:, 0]]
        centers, side, index = objects.pose[:, 1:3], self.side, torch.arange(len(objects))
        pairs = (torch.cdist(centers, centers) <= CLOSE * self.model.size).triu(1).nonzero()
        one, two = torch.cat([torch.stack([index, index], 1), pairs]).unbind(1)
        places = ((centers[one] + centers[two]) / 2).flip(1).round().long()
        corner, differ = places - side // 2, (one != two)[:, None, None, None]
        others = [
            cut(total, corner, side)
            - cut(layer[one], corner - objects.corner[one], side)
            - differ * cut(layer[two], corner - objects.corner[two], side)
            for total, layer in zip(self._sums(patches, present), objects.layers, strict=True)
        ]
        ground = cut(self.ground, corner, side)
        return self._propose(
            places, self.model.mix_layers([x[:, None] for x in others], ground)[:, 0]
        )


def _split_by(labels: Tensor, number: int) -> tuple[Tensor, ...]:
    """Return the indices of each of a number of labels, in order."""
    return labels.argsort(stable=True).split(torch.bincount(labels, minlength=number).tolist())


def connected(touching: Tensor, some: Tensor) -> list[Tensor]:
    """Return the connected sets of some members, as indices.

    Args:
        touching: pairs that are connected, bool (m, m).
        some: the members, bool (m,).
    """
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import connected_components

    index = some.nonzero()[:, 0]
    graph = csr_array(touching[index][:, index].numpy())
    number, labels = connected_components(graph, directed=False)
    return [index[part] for part in _split_by(torch.from_numpy(labels).long(), number)]


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
