"""Stacked capsule autoencoder: objects vote for their parts, and parts compete for pixels.

Story. An object capsule has a presence, a pose and a feature. From the feature it computes how its
parts look in its own frame: a learned constellation, bent a little, and how surely and how exactly
each part is predicted. Every part takes its pose from one of the objects that are present, or from
a dummy. Each part has a learned template. Its own feature gives the template a color. Parts do not
cover each other: each pixel of the image comes from one part, or from the background.

    t_k ~ Bernoulli(1 / classes)                                  # objects, (B, K)
    OV_k ~ Normal(identity, sigma_top)                            # poses, (B, K, 6)
    c_k ~ Normal(0, 1)                                            # features, (B, K, F)
    OP_km, a_km, lambda_km = perceptron_k(c_k)                    # relation to part m, (B, K, M)
    d_m ~ Bernoulli(1 - (1 - leak) prod_k (1 - t_k a_km))         # parts, (B, M)
    s_m ~ Categorical(dummy: epsilon, object k: t_k a_km)         # (B, M), summed out
    x_m ~ Normal(OV_s OP_sm, lambda_sm) if d_m, else the dummy    # poses, (B, M, 6)
    z_m ~ Normal(0, 1)                                            # features, (B, M, S)
    p_ij ~ Categorical(background: beta, part m: d_m warp(alpha_m, x_m)_ij)     # pixels, summed out
    image_ij ~ Normal(color(z_m) warp(template_m, x_m)_ij, sigma_image)         # of part m = p_ij

The paper is an autoencoder, and not all of it is a density. Its two likelihoods are: log p(image |
parts), and log p(part poses | objects). They are sites of this model. Everything else is a loss:
the sparsity of the objects' presences, before and after the poses are seen, the penalty on dynamic
relations, the stop-gradients and the noise on presences. They are terms and switches of
`StackedCapsuleObjective` (`capsule_zoo.inference`). Distributions that the paper lacks are ours,
and make the joint density proper: priors of presences, poses and features, the noisy-or for the
presence of a part, and the pose of an absent part. With them the model has a held-out bound in
nats.

Parts and objects may be learned one after the other: see `with_scope`.

The dummy's distribution is normal, with a standard deviation at which its density is about .01 at a
typical pose; the authors' program takes the constant .01. For a presence between 0 and 1 the paper
raises the likelihood of a pose to that power, which is not a density. Here the distribution is a
mixture of present and absent. Both agree at 0 and 1, up to the density of absent parts.

References:
    Kosiorek, Sabour, Teh & Hinton 2019, "Stacked Capsule Autoencoders" (arXiv 1906.06818):
    sections 2.1 and 2.3 for objects and parts, 2.2 for parts and pixels, 2.4 for the losses, and
    the authors' public program for sizes, the noise and the weight of the dummy.
"""

import math
from dataclasses import dataclass

import pyro
import pyro.distributions as dist
import torch
from pyro.nn import PyroModule, pyro_method
from torch import Tensor, nn

from capsule_zoo.data.registration import Settings
from capsule_zoo.models.base import Site
from capsule_zoo.models.checks import check_at_least, check_positive
from capsule_zoo.models.parts import poses, templates
from capsule_zoo.models.parts.object_votes import (
    FeaturedCapsules,
    ObjectVotes,
    PartRelation,
    VoteNetwork,
    VoteSizes,
    log_parents,
    noisy_or,
    part_pose_distribution,
    place_votes,
)
from capsule_zoo.models.parts.painted_parts import PartsModel
from capsule_zoo.models.parts.parent_selection import Level, as_presence, log_presence
from capsule_zoo.models.parts.part_sets import PartSets
from capsule_zoo.models.parts.pixel_mixture import TintedMixture

_COLOR_UNITS = 32  # hidden units of the perceptron from features to colors
_BRIGHT = 2.0  # logit of the first colors: templates learn shapes before they are tinted


@dataclass(frozen=True)
class Clutter(Settings):
    """The settings of the dummy, which explains parts that no object explains.

    Args:
        sigma_dummy: standard deviation, about zero, of the pose of a part of the dummy.
        epsilon: weight of the dummy, compared with t_k a_km.
        leak: probability that a part for which no object votes is present.

    Raises:
        ValueError: a standard deviation or weight that is not positive, or a leak outside (0, 1).
    """

    sigma_dummy: float = 0.75
    epsilon: float = 0.01
    leak: float = 0.01

    def __post_init__(self) -> None:
        check_positive(sigma_dummy=self.sigma_dummy, epsilon=self.epsilon)
        if not 0 < self.leak < 1:
            raise ValueError(f"leak must lie inside (0, 1), not {self.leak!r}")


class StackedCapsuleAutoencoder(PartsModel):
    """The generative model of stacked capsule autoencoders, described at the top of this file.

    Args:
        image_shape: (channels, height, width).
        objects: number of object capsules.
        parts: number of part capsules.
        template_size: height and width of a part's template, in template pixels.
        part_features: size of a part's feature vector.
        votes: sizes of the networks by which objects vote.
        classes: kinds of images; an object is present in one of them.
        presence: "relaxed" (Concrete; for gradients) or "discrete" (Bernoulli; for reporting).
        temperature: temperature of the Concrete distribution of relaxed presences.
        sigma_image: standard deviation of a pixel, in units of its range.
        sigma_top: standard deviation of an object's pose from the identity.
        clutter: parts that no object explains.

    Raises:
        ValueError: a size below 1, fewer than two classes, a standard deviation that is not
            positive, or an unknown presence.

    Called as `model(images=None, labels=None, batch_size=1)` it returns the image (B, C, H, W).
    In the scope "parts" (`with_scope`) parts have broad priors.
    """

    scopes = ("scene", "objects", "parts")
    plate_dims = {"images": -2, "objects": -1, "parts": -1}

    def __init__(
        self,
        image_shape: tuple[int, int, int] = (1, 28, 28),
        objects: int = 16,
        parts: int = 24,
        *,
        template_size: int = 11,
        part_features: int = 16,
        votes: VoteSizes = VoteSizes(),
        classes: int = 10,
        presence: str = "relaxed",
        temperature: float = 0.5,
        sigma_image: float = 0.3,
        sigma_top: float = 0.5,
        clutter: Clutter = Clutter(),
    ) -> None:
        check_at_least(1, objects=objects, parts=parts, template_size=template_size)
        check_at_least(1, part_features=part_features)
        check_at_least(2, classes=classes)
        check_positive(sigma_image=sigma_image, sigma_top=sigma_top)
        levels = Level("object", objects), Level("part", parts)
        super().__init__(image_shape, levels, presence, temperature)
        self.object_features = votes.object_features
        self.part_features = part_features
        self.classes = classes
        self.sigma_image = sigma_image
        self.sigma_top = sigma_top
        self.clutter = clutter
        self.relation = VoteNetwork(objects, parts, votes)
        channels = image_shape[0]
        shape = (parts, channels + 1, template_size, template_size)
        self.template_logits = nn.Parameter(templates.faint(shape))  # gray or color, then alpha
        self.color_hidden = PyroModule[nn.Linear](part_features, _COLOR_UNITS)
        self.color_read = PyroModule[nn.Linear](_COLOR_UNITS, channels)
        nn.init.constant_(self.color_read.bias, _BRIGHT)
        self.background_logits = nn.Parameter(torch.full((channels,), -3.0))
        self.background_log_weight = nn.Parameter(torch.tensor(0.1).log())

    @property
    def sites(self) -> tuple[Site, ...]:
        all_sites = []
        for level in self.levels[1:] if self.scope == "parts" else self.levels:
            plates = ("images", level.plate)
            all_sites.append(Site(f"{level.name}_presence", plates, discrete=not self.relaxed))
            all_sites.append(Site(f"{level.name}_pose", plates, event_dim=1))
            all_sites.append(Site(f"{level.name}_feature", plates, event_dim=1))
        return tuple(all_sites)

    @property
    def dummy(self) -> tuple[float, float]:
        """The mixing weight of the dummy, and the standard deviation of its parts' poses."""
        return self.clutter.epsilon, self.clutter.sigma_dummy

    @property
    def part_sets(self) -> PartSets:
        """The observation space of encoded parts, see `StackedCapsuleGuide`."""
        return PartSets(self.levels[1].size, 14 + self.part_features)

    @property
    def prior_logit(self) -> float:
        """The logit of the prior probability that an object is present, 1 / classes."""
        return -math.log(self.classes - 1)

    def forward(
        self, images: Tensor | None = None, labels: Tensor | None = None, batch_size: int = 1
    ) -> Tensor:
        batch = batch_size if images is None else len(images)
        with pyro.plate("images", batch, dim=-2):
            if self.scope == "parts":
                parts = self._draw_parts(None)
            else:
                parts = self._draw_parts(self.votes(self._draw_objects()))
            if self.scope == "objects":
                return parts.pose
            return self.sample_image(self.image_distribution(parts), images)

    def _draw_objects(self) -> FeaturedCapsules:
        like, level = self.template_logits, self.levels[0]
        with pyro.plate("objects", level.size, dim=-1):
            odds = like.new_tensor(self.prior_logit)
            presence = pyro.sample("object_presence", self.presence_distribution(odds))
            centered = dist.Normal(poses.identity_like(like), self.sigma_top)
            pose = pyro.sample("object_pose", centered.to_event(1))
            feature = self._draw_feature("object_feature", self.object_features)
        return FeaturedCapsules.from_sites(level, presence, pose, feature)

    def _draw_parts(self, votes: ObjectVotes | None) -> FeaturedCapsules:
        """Sample the parts from the votes of objects or, without objects, from broad priors."""
        like, level = self.template_logits, self.levels[1]
        with pyro.plate("parts", level.size, dim=-1):
            odds = like.new_zeros(()) if votes is None else noisy_or(votes, self.clutter.leak)
            presence = pyro.sample("part_presence", self.presence_distribution(odds))
            pose_distribution: dist.TorchDistribution
            if votes is None:
                pose_distribution = dist.Normal(
                    like.new_zeros(6), self.clutter.sigma_dummy
                ).to_event(1)
            else:
                pose_distribution = part_pose_distribution(
                    votes, presence, self.relaxed, *self.dummy
                )
            pose = pyro.sample("part_pose", pose_distribution)
            feature = self._draw_feature("part_feature", self.part_features)
        return FeaturedCapsules.from_sites(level, presence, pose, feature)

    def _draw_feature(self, name: str, size: int) -> Tensor:
        origin = self.template_logits.new_zeros(size)
        return pyro.sample(name, dist.Normal(origin, 1.0).to_event(1))

    @pyro_method
    def relation_of(self, feature: Tensor) -> PartRelation:
        """Compute the relation of objects to their parts from features (B, K, F)."""
        return self.relation(feature)

    @pyro_method
    def votes(self, objects: FeaturedCapsules, noise: float = 0.0) -> ObjectVotes:
        """Compute the votes of objects for all parts.

        Args:
            noise: width of the uniform noise on the logits of the votes' presences.
        """
        relation = self.relation(objects.feature)
        present = log_presence(objects.presence, self.relaxed)
        if not noise:
            return place_votes(relation, objects.pose, present)
        jitter = noise * (torch.rand_like(relation.presence_logits) - 0.5)
        return place_votes(relation, objects.pose, present, jitter)

    @pyro_method
    def colors(self, feature: Tensor) -> Tensor:
        """Compute the templates' colors (B, M, C), in (0, 1), from features (B, M, S)."""
        return self.color_read(self.color_hidden(feature).relu()).sigmoid()

    @pyro_method
    def templates(self) -> tuple[Tensor, Tensor]:
        """Return every part's template (M, C, h, w) and alpha (M, 1, h, w), in [0, 1]."""
        return self.template_logits.sigmoid().split([self.image_shape[0], 1], dim=1)

    @pyro_method
    def image_distribution(self, parts: FeaturedCapsules) -> TintedMixture:
        """Return p(image | parts), batch shape (B, 1), event shape (C, H, W).

        The weight of a part at a pixel is its alpha times its presence.
        """
        paint = self.template_logits.sigmoid()
        drawn = templates.warp_templates(paint, parts.pose, self.image_shape[1:])
        return TintedMixture(
            drawn,
            self.colors(parts.feature),
            as_presence(parts.presence, self.relaxed),
            self.background_logits.sigmoid(),
            self.background_log_weight.exp(),
            self.sigma_image,
        )

    def render(self, parts: FeaturedCapsules) -> Tensor:
        """Render the mean images (B, C, H, W) of the parts."""
        return self.image_distribution(parts).mean.squeeze(-4)

    def responsibilities(self, objects: FeaturedCapsules, parts: FeaturedCapsules) -> Tensor:
        """Compute the posterior p(s_m | objects, pose of m) of parents, (B, M, 1 + K); 0: dummy."""
        return log_parents(self.votes(objects), parts.pose, *self.dummy).softmax(-1)

    def predict_parts(self, objects: FeaturedCapsules, parts: FeaturedCapsules) -> FeaturedCapsules:
        """Return the parts with poses replaced by the votes of their most responsible objects."""
        winner = self.responsibilities(objects, parts)[..., 1:].argmax(-1)  # (B, M)
        votes = self.votes(objects).pose  # (B, M, K, 6)
        winning_votes = votes.gather(-2, winner[..., None, None].expand(*winner.shape, 1, 6))
        return parts._replace(pose=winning_votes.squeeze(-2))
