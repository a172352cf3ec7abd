"""Objects of a whole picture: proposals at all peaks, presences summed out cluster by cluster.

A picture of any size is a Poisson process of objects (`Scenes` with counts="poisson"), of which a
guide that was trained on small scenes infers one object from a window. With proposals u_1 .. u_K,
each from a patch of the picture, the log weight of presences z is

    log w_z = log p(image | z, u) - expected number + sum_s z_s log v_s
    v_s     = intensity p(u_s) / q(u_s | patch)

Two proposals interact where both paint a pixel. So p(image | z, u) / p(image | ground) is a product
over the connected clusters of proposals, and so is the distribution of the presences:

    q(z | u) = prod_c q(z_c | u),    q(z_c | u) = w_{z_c} / sum of all w_{z_c}

Proposals are made at the peaks of what the present objects leave unexplained, in rounds. Then every
object is proposed again, given all others, and so is one object in place of two that stand close.
At last objects are proposed apart from the present ones. All but the first rounds' proposals are
refined by gradient steps.

A cluster of at most `MOST` proposals has all its subsets summed. In a larger one a greedy search
finds the best presences. Members that it can change only at a great loss stay as they are, and the
others form smaller clusters, given these. The number of objects is a sum of independent numbers,
one of each cluster; its distribution is their convolution. The cost grows with the area.

Two proposals for one object are two ways to explain it, and both count. So the weights give the
distribution of the presences, and no bound on log p(image). Errors of neighboring pixels are
correlated, so the likelihood has a power (`PictureReader.fit_power`), which is measured before
objects are refined.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial, reduce

import torch
from torch import Tensor
from torch.nn import functional as F

from capsule_zoo.guides.scenes.clusters import (
    CLOSE,
    LEAST_PRESENCE,
    MOST,
    Cluster,
    ClusterSums,
    best_of,
    presence_of,
)
from capsule_zoo.guides.scenes.patches import AT_ONCE, Patches, Picture, cut
from capsule_zoo.guides.scenes.peeling import Peeling, blur_maps
from capsule_zoo.guides.scenes.proposals import Proposal
from capsule_zoo.guides.scenes.refinement import PatchPosterior

PAINTED = 0.02  # least cover of a pixel that a proposal paints
LARGE_BOX, SMALL_BOXES = 1 / 2, (1 / 12, 1 / 8)  # sides of boxes of residuals, in default sizes
CONTRAST = 0.1  # of a pixel with the ground, in units of its range, from which it is of an object
LEAST_POWER = 0.25  # of the likelihood
REFINEMENT = 40  # steps that refine an object
GAIN = 3.0  # least gain, in nats of likelihood, for which an object is proposed


class PictureReader:
    """Proposals and presences of the objects of one picture.

    Args:
        guide: a guide to scenes with counts="poisson", trained on scenes of any size.
        image: (C, H, W), NaN where a pixel is missing.
        likelihood_power: power of the likelihood in the weights; below 1 where errors of
            neighboring pixels are correlated. By default it is measured while the picture is read.
        most: largest cluster whose subsets are all summed.
        refinement: gradient steps that refine an object when it is proposed again.
    """

    def __init__(
        self,
        guide: Peeling,
        image: Tensor,
        likelihood_power: float | None = None,
        most: int = MOST,
        refinement: int = REFINEMENT,
    ) -> None:
        self.guide, self.most, self.refinement = guide, most, refinement
        self.power, self.measures = likelihood_power or 1.0, likelihood_power is None
        model = guide.model
        self.model = model.with_canvas(*image.shape[-2:])
        ground = guide.on_model(self.model).backdrop(image[None]).drawn.expand(1, *image.shape)[0]
        self.picture = Picture(self.model, image.contiguous(), ground.contiguous())
        self.side = 2 * math.ceil(1.5 * model.size)
        self._proposed, self._clusters = 0, dict[tuple[int, ...], list[Cluster]]()
        self.patch_guide = guide.on_model(model.with_canvas(self.side, self.side, slots=1))
        corner = torch.zeros(1, 2).long()
        one = self._propose(corner, cut(self.picture.ground, corner, self.side))
        self.nothing = self.to_patches(one, corner)[:0]

    def propose(self, places: Tensor, canvas: Tensor) -> Patches:
        """Propose an object about each place, given the objects on a canvas.

        Args:
            places: row and column of pixels, (K, 2).
            canvas: mean picture of the other objects, (C, H, W).
        """
        parts = [self.nothing]
        for some in places.split(AT_ONCE) if len(places) else ():
            corner = some - self.side // 2
            proposal = self._propose(corner, cut(canvas, corner, self.side))
            parts.append(self.to_patches(proposal, corner))
        return reduce(Patches.join, parts)

    def _propose(self, corner: Tensor, canvases: Tensor) -> Proposal:
        """Propose an object in the middle of each patch, given the others on it (K, C, P, P)."""
        guide, images = self.patch_guide, cut(self.picture.image, corner, self.side)
        left = guide.measure_residual(images, canvases).nan_to_num()
        about = images.new_zeros(len(corner), guide.model.pose_size)
        about[:, 1:3] = 1 / self.side  # the middle of pixel side // 2
        return guide.propose_at(0, images.nan_to_num(), left, about, draw=False)

    def refine(self, proposal: Proposal, corner: Tensor, others: list[Tensor]) -> Proposal:
        """Move each proposal to where its object explains its patch better, given the others.

        Args:
            others: sums of the layers of the others, each (K, c, P, P).
        """
        if not self.refinement:
            return proposal
        picture, side = self.picture, self.side
        image, ground = (cut(x, corner, side) for x in (picture.image, picture.ground))
        observed = (cut(torch.ones_like(picture.image), corner, side) > 0) & ~image.isnan()
        plate = self.patch_guide.plate(corner)
        posterior = PatchPosterior(
            self.patch_guide.model, plate, image.nan_to_num(), ground, observed, others, self.power
        )
        return posterior.refine(proposal, self.refinement)

    def to_patches(self, proposal: Proposal, corner: Tensor) -> Patches:
        """Return a batch of proposals on patches as proposals for the picture."""
        guide, side = self.patch_guide, self.side
        pose = proposal.drawn.pose
        height, width = self.picture.image.shape[-2:]
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

    def peaks(self, canvas: Tensor, free: Tensor | float = 1.0) -> Tensor:
        """Return the pixels about which a canvas leaves most unexplained, (K, 2), row and column.

        A peak counts if an object there may gain more than `GAIN` nats of likelihood.

        Args:
            free: fraction of each pixel whose residual counts, (1, H, W).
        """
        guide, size = self.guide, self.model.size
        left = guide.measure_residual(self.picture.image[None], canvas[None]).nan_to_num() * free
        if not guide.residual_is_linear:
            left = (left / 4).sqrt()
        scale = max(1.0, size * guide.blur)
        heat = blur_maps(left, scale)[0, 0] / (math.tau * scale**2)
        reach = max(1, int(0.35 * size))
        top = pool(F.max_pool2d, heat[None], reach)
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
        error = (self.picture.image - canvas).nan_to_num()
        painted = (canvas - self.picture.ground).abs().amax(0) > CONTRAST
        largest = 0.0
        for fraction, region in (
            (LARGE_BOX, torch.ones_like(painted)),
            *((f, painted) for f in SMALL_BOXES),
        ):
            reach = int(self.model.size * fraction / 2)
            mean = pool(partial(F.avg_pool2d, count_include_pad=False), error[None], reach)[0]
            squares = (mean * (2 * reach + 1)).square().mean(0)[region]
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
        if start is None:
            start = patches.log_ratio.new_zeros(len(patches))
        for members, touching in self.picture.group(patches):
            key = tuple(patches.number[members].tolist())
            if key not in self._clusters or torch.is_grad_enabled():
                sums = ClusterSums(self.picture, patches[members], touching, self.power)
                self._clusters[key] = sums.clusters(self.most, start[members])
            clusters += [
                replace(cluster, members=members[cluster.members], power=self.power)
                for cluster in self._clusters[key]
            ]
        return clusters

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
            sweeps: number of times that every object is proposed again, given all others. At last
                objects are proposed apart from them, unless it is 0.

        Returns:
            The proposals, their clusters, and the mean picture of the likeliest presences.
        """
        patches, canvas, clusters = self.nothing, self.picture.ground, list[Cluster]()
        for number in range(rounds + sweeps + (sweeps > 0)):
            present = best_of(clusters)
            if number < rounds:
                new = self.propose(self.peaks(canvas), canvas)
            elif number < rounds + sweeps:
                new = self.propose_again(patches, present)
            else:
                new = self.propose_apart(patches, present, canvas)
            if not len(new):
                continue
            start = torch.cat([present.to(canvas), canvas.new_zeros(len(new))])
            patches, clusters = self.select(patches.join(new), start)
            canvas = self.picture.paint(patches, best_of(clusters))
            # not after refinement: refined objects fit this picture's noise too
            if self.measures and number < rounds:
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
        if not len(objects):
            return objects
        centers, side, index = objects.pose[:, 1:3], self.side, torch.arange(len(objects))
        pairs = (torch.cdist(centers, centers) <= CLOSE * self.model.size).triu(1).nonzero()
        one, two = torch.cat([torch.stack([index, index], 1), pairs]).unbind(1)
        places = ((centers[one] + centers[two]) / 2).flip(1).round().long()
        totals = self.picture.sum_layers(patches, present)
        parts = []
        for first, second, some in zip(
            *(x.split(AT_ONCE) for x in (one, two, places)), strict=True
        ):
            corner, differ = some - side // 2, (first != second)[:, None, None, None]
            others = [
                cut(total, corner, side)
                - cut(layer[first], corner - objects.corner[first], side)
                - differ * cut(layer[second], corner - objects.corner[second], side)
                for total, layer in zip(totals, objects.layers, strict=True)
            ]
            parts.append(self._propose_refined(corner, others))
        return reduce(Patches.join, parts)

    def propose_apart(self, patches: Patches, present: Tensor, canvas: Tensor) -> Patches:
        """Propose objects far from the objects with presence 1, and refine these proposals.

        An object of an unfamiliar look often gains more than it costs only when it is refined. What
        is left unexplained near a present object is most often of that object, so it is left out.

        Args:
            canvas: mean picture of the present objects, (C, H, W).
        """
        totals = self.picture.sum_layers(patches, present)
        places = self.peaks(canvas, totals[0].exp())
        centers = patches.pose[present > 0, 1:3].flip(1)
        far = torch.cdist(places.to(centers), centers) > CLOSE * self.model.size
        parts, places = [self.nothing], places[far.all(1)]
        for some in places.split(AT_ONCE) if len(places) else ():
            corner = some - self.side // 2
            others = [cut(total, corner, self.side) for total in totals]
            parts.append(self._propose_refined(corner, others))
        return reduce(Patches.join, parts)

    def _propose_refined(self, corner: Tensor, others: list[Tensor]) -> Patches:
        """Propose an object in the middle of each patch, and refine it, given the others.

        Args:
            others: sums of the layers of the others, each (K, c, P, P).
        """
        ground = cut(self.picture.ground, corner, self.side)
        canvas = self.model.mix_layers([x[:, None] for x in others], ground)[:, 0]
        proposal = self.refine(self._propose(corner, canvas), corner, others)
        return self.to_patches(proposal, corner)


def pool(function: Callable[..., Tensor], maps: Tensor, reach: int) -> Tensor:
    """Pool maps (B, C, H, W) over squares of 2 reach + 1 pixels, rows and columns in turn."""
    for axes in ((0, 1), (1, 0)):
        size = tuple(2 * reach * axis + 1 for axis in axes)
        maps = function(maps, size, 1, tuple(reach * axis for axis in axes))
    return maps
